"""Keys of the sampling noise, and its purposes. `ops.noise` and the native core compute the noise."""

import enum
import hashlib

Key = tuple[int, int]

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: neighbouring rounds get seeds far apart


class Purpose(enum.IntEnum):
    """The independent streams of one key. Every use of noise in Headrace has its number here."""

    TARGET = 0  # sampling the target, and drafters that share its noise
    DRAFT = 1  # draft sampling under the rejection rule
    ACCEPT = 2  # the acceptance test
    RESIDUAL = 3  # the draw from the residual
    COIN = 4  # samplers that toss coins of their own: the word of token id 0 is XTC's


def key(seed: int, child: int = 0) -> Key:
    """The two 32-bit key words of child `child` of a request seeded with `seed`; a single run is child 0.

    Raises ValueError for a seed outside 0 .. 2**64 - 1 or a child outside 0 .. 2**32 - 1.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be between 0 and 2**64 - 1, not {seed}")
    if not 0 <= child < 2**32:
        raise ValueError(f"child must be between 0 and 2**32 - 1, not {child}")
    message = seed.to_bytes(8, "little") + child.to_bytes(4, "little")
    digest = hashlib.blake2b(message, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def round_key(seed: int, known: int, child: int) -> Key:
    """The noise key of the speculation round that begins after `known` tokens."""
    return key((seed + known * GOLDEN) % 2**64, child)
