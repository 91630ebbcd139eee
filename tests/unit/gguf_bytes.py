"""GGUF files byte by byte, so that tests can write what no writer would; and seeded damage to whole ones."""

import random
import struct
from collections.abc import Iterable

UINT8, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, UINT32 = 0, 5, 6, 7, 8, 9, 10, 4
F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: str | bytes, code: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", code) + payload


def array(name: str, code: int, count: int, payload: bytes) -> bytes:
    return key(name, ARRAY, struct.pack("<IQ", code, count) + payload)


def tensor(name: str | bytes, sizes: Iterable[int], code: int = F32, offset: int = 0) -> bytes:
    """Sizes as the file has them: the innermost first."""
    sizes = list(sizes)
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, code, offset)


def gguf(
    keys: Iterable[bytes] = (),
    tensors: Iterable[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
) -> bytes:
    keys, tensors = list(keys), list(tensors)
    head = b"GGUF" + struct.pack(
        "<IQQ", version, len(tensors) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys
    )
    head += b"".join(keys) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def sample() -> bytes:
    """A small whole file with every part of the format in it."""
    numbers = [key(f"n.{code}", code, struct.pack(fmt, 1)) for code, fmt in enumerate("<B <b <H <h <I <i <f <?".split())] + [
        key("n.10", 10, struct.pack("<Q", 1)),
        key("n.11", 11, struct.pack("<q", -1)),
        key("n.12", 12, struct.pack("<d", 0.5)),
    ]
    words = ["a", "", "Größe", "你好"]
    keys = [
        key("general.architecture", STRING, text("llama")),
        key("general.alignment", UINT32, struct.pack("<I", 32)),
        *numbers,
        array("words", STRING, len(words), b"".join(text(word) for word in words)),
        array("types", INT32, 4, struct.pack("<4i", 1, 2, 3, 4)),
        array("flags", BOOL, 2, b"\0\1"),
    ]
    tensors = [
        tensor("a", [4, 2], F32, 0),
        tensor("b", [32, 2], Q4_0, 32),
        tensor("c", [8], F16, 96),
    ]
    return gguf(keys, tensors, bytes(range(112)))


WILD = [0, 1, 31, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]


def damaged(whole: bytes, rng: random.Random) -> bytes:
    """One to four random injuries: bits, wild numbers, cuts, repeats, noise."""
    raw = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(raw)) if raw else 0
        kind = rng.randrange(7)
        if kind == 0 and raw:
            raw[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            raw[at : at + 8] = struct.pack("<Q", rng.choice(WILD))
        elif kind == 2:
            raw[at : at + 4] = struct.pack("<I", rng.choice(WILD) & 0xFFFFFFFF)
        elif kind == 3:
            del raw[at:]
        elif kind == 4:
            del raw[at : at + rng.randint(1, 16)]
        elif kind == 5:
            raw[at:at] = raw[at : at + rng.randint(1, 64)]
        else:
            raw[at : at + 16] = rng.randbytes(rng.randint(0, 16))
    return bytes(raw)
