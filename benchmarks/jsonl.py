"""Data sets with a JSON object in each line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_lines(path: Path, keys: set[str], form: str) -> Iterator[dict[str, Any]]:
    """Objects of a file. Raises ValueError for a line that is no object or lacks one of the `keys` of that `form`."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if not isinstance(found, dict) or not keys <= set(found):
                wanted = ", ".join(sorted(keys))
                raise ValueError(f"line {number} of {path} is no JSON object with {wanted}; give a file in {form}'s form")
            yield found
