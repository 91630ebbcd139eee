"""Kinds: number formats of stored tensors. A row is a sequence of equal blocks.

All but the last nine are GGUF's.

| kind | block | values |
|---|---|---|
| NF4, FP4 | float16 scale, nibbles as IQ4_NL | tables of bitsandbytes, within 1/350 (NF4) and 1/190 (FP4) of a block's maximum
| | S4, S8 | float16 scale, 2-bit indices, kept numbers as Q4_0 and Q8_0 | 2:4 sparse (weights.sparse) |
| G4_32, G4_128 | float16 scale, zero point 0 to 16, nibbles as Q4_0 by 32 | d * (q - z): groups of GPTQ and AWQ |
| G8_32, G8_128 | float16 scale, zero point, bytes | d * (q - z) |
| C8 | as Q8_0, all blocks of a row with the same scale | d * q: one scale a row |
"""

from typing import NamedTuple


class Kind(NamedTuple):
    """A block of `block` elements takes `nbytes` bytes."""

    block: int
    nbytes: int


KINDS: dict[str, Kind] = {
    "F32": Kind(1, 4),
    "F16": Kind(1, 2),
    "BF16": Kind(1, 2),
    "Q4_0": Kind(32, 18),
    "Q4_1": Kind(32, 20),
    "Q5_0": Kind(32, 22),
    "Q5_1": Kind(32, 24),
    "Q8_0": Kind(32, 34),
    "Q2_K": Kind(256, 84),
    "Q3_K": Kind(256, 110),
    "Q4_K": Kind(256, 144),
    "Q5_K": Kind(256, 176),
    "Q6_K": Kind(256, 210),
    "IQ4_NL": Kind(32, 18),
    "IQ4_XS": Kind(256, 136),
    "MXFP4": Kind(32, 17),
    "NF4": Kind(32, 18),
    "FP4": Kind(32, 18),
    "S4": Kind(32, 14),
    "S8": Kind(32, 22),
    "G4_32": Kind(32, 19),
    "G4_128": Kind(128, 67),
    "G8_32": Kind(32, 35),
    "G8_128": Kind(128, 131),
    "C8": Kind(32, 34),
}
NOT_GGUF = ("NF4", "FP4", "S4", "S8", "G4_32", "G4_128", "G8_32", "G8_128", "C8")
FLOATS = ("F32", "F16", "BF16")  # all others are codes with scales
