"""Sizes of memory as people write them."""

import re

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(value: int | str) -> int:
    """Bytes from a number or from text such as "2GiB", "500MB", "1.5g". Raises ValueError."""
    if isinstance(value, int):
        size = float(value)
    else:
        match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmg]i?)?b?\s*", value.lower())
        if match is None:
            raise ValueError(f"{value!r} is not a size; write a number of bytes or, say, 2GiB")
        size = float(match[1]) * UNITS[match[2] or ""]
    if size <= 0:
        raise ValueError(f"a memory size must be above 0, not {value!r}")
    return int(size)
