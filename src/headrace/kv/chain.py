"""Hash chain of the full blocks of a prefix: each hash covers all tokens up to the end of its block.

Equal hashes mean equal prefixes under equal roots. The prefix cache finds blocks by them.
"""

import struct
from collections.abc import Sequence
from hashlib import sha256


def chain(tokens: Sequence[int], root: bytes, size: int) -> list[bytes]:
    """Return one hash (32 bytes) per full block of `size` tokens. root: separates tenants, adapters and sources."""
    hashes: list[bytes] = []
    extend(hashes, tokens, root, size, len(tokens) // size)
    return hashes


def extend(hashes: list[bytes], tokens: Sequence[int], root: bytes, size: int, count: int) -> None:
    """Append to `hashes`, the chain of the first blocks of `tokens`, until it has `count` hashes."""
    start = len(hashes)
    if start >= count:
        return
    parent = hashes[-1] if hashes else sha256(b"headrace" + root).digest()
    data = struct.pack(f"<{(count - start) * size}i", *tokens[start * size : count * size])
    stride = 4 * size
    for at in range(0, (count - start) * stride, stride):
        parent = sha256(parent + data[at : at + stride]).digest()
        hashes.append(parent)
