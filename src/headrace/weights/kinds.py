"""The number formats a stored tensor may have: exactly these twenty-four, each a row of equal blocks.

All but the last eight are GGUF's. NF4 and FP4, of bitsandbytes, have blocks like IQ4_NL's (a half, then nibbles) and tables of
their own, whose values times the half are those of bitsandbytes but for 1/350 (NF4) and 1/190 (FP4) of the largest of a block.
S4 and S8 are 2:4 (`weights.sparse`): a half, 2-bit indices of the two numbers that each four neighbours keep, and these numbers
as Q4_0 and Q8_0 store theirs. G4_32 and G4_128 (a half, a zero point from 0 to 16, nibbles as Q4_0 stores them, 32 by 32) are
what GPTQ and AWQ make of groups: w = d * (q - z). G8_32 and G8_128 are the same of bytes (a half, a zero point, bytes).
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
}
NOT_GGUF = ("NF4", "FP4", "S4", "S8", "G4_32", "G4_128", "G8_32", "G8_128")
FLOATS = ("F32", "F16", "BF16")  # numbers one by one; the others are integers and scales
