"""The sampling noise: a pure function of (seed, child, position, token id, purpose), with the same bits on every back end.

A token is argmax(processed logit + Gumbel noise) over the kept set, of equals the lowest id. So the tokens of a request depend
neither on its batch nor on the order of draws. Words are Philox4x32-10; a word becomes a Gumbel value through float32
additions, subtractions and multiplications in a fixed order, never fused. Any change here changes every seeded output.
`reference_*` are numpy references of the torch functions.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.
"""

import numpy as np
import torch

from headrace.ops.keys import Key, Purpose

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10

# ln(1 + f) = f + f² Q(f) for sqrt(1/2) <= 1 + f < sqrt(2); ln 2 is LN2_HIGH + LN2_LOW, both exact in float32
Q = tuple(
    float.fromhex(c)
    for c in (
        "-0x1.fffff8p-2",
        "0x1.555558p-2",
        "-0x1.00041cp-2",
        "0x1.999fbcp-3",
        "-0x1.5425aep-3",
        "0x1.22c058p-3",
        "-0x1.0f9622p-3",
        "0x1.068486p-3",
        "-0x1.321fcep-4",
    )
)
LN2_HIGH = 0.693359375
LN2_LOW = float.fromhex("-0x1.bd0106p-13")
SQRT_HALF_BITS = 0x3F3504F3

GUMBEL_MIN, GUMBEL_MAX = -3.13, 22.88
REACH = 26.01  # GUMBEL_MAX - GUMBEL_MIN: a token whose logit is further below the best cannot win


def coins(keys: torch.Tensor, positions: torch.Tensor, purpose: int = Purpose.COIN) -> torch.Tensor:
    """The coins of n draws, 0 <= coin < 1, float64 [n]: the word of the purpose and token id 0, over 2**32. keys [n, 2] and
    positions [n] are int64."""
    zero = torch.zeros_like(positions)
    words = _rounds(positions, zero, zero + purpose, zero, keys[:, 0], keys[:, 1])
    return words[0].double() / 2**32


def philox(counter: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10: counter [..., 4] and keys [..., 2] int64 holding 32-bit words -> words [..., 4] int64."""
    return torch.stack(_rounds(*counter.unbind(-1), *keys.unbind(-1)), dim=-1)


def _rounds(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The ten rounds on four counter words and two key words that broadcast against each other."""
    for _ in range(ROUNDS):
        # int64 wraps: the low 64 bits of the product are right, and masking drops the sign the shift drags in
        a, b = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) & MASK) ^ c1 ^ k0, b & MASK, ((a >> 32) & MASK) ^ c3 ^ k1, a & MASK
        k0, k1 = (k0 + KEY_STEPS[0]) & MASK, (k1 + KEY_STEPS[1]) & MASK
    return c0, c1, c2, c3


def gumbel(words: torch.Tensor) -> torch.Tensor:
    """Gumbel(0, 1) float32 from 32-bit words in int64, the same shape; falling in the word."""
    # high: all bits set if the word is 2**30 or more. Selects by bits, as torch.where is slow on a CPU.
    high = ((2**30 - 1) - words) >> 63
    y = (words ^ (high & MASK)).to(torch.float32).mul_(2.0**-32).add_(2.0**-33)
    high = high.to(torch.int32)
    f, e = _split(y)
    f = ((f.view(torch.int32) & high) | ((-y).view(torch.int32) & ~high)).view(torch.float32)
    f, e = _split(-_ln(f, e & high))
    return -_ln(f, e)


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x = 2**e (1 + f) with 1 + f between sqrt(1/2) and sqrt(2); x float32 > 0, f float32, e int32."""
    bits = x.view(torch.int32)
    e = (bits - SQRT_HALF_BITS) >> 23
    return (bits - (e << 23)).view(torch.float32) - 1.0, e


def _ln(f: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """ln(2**e (1 + f))."""
    e = e.to(torch.float32)
    q = f * Q[-1]  # first step of Horner's rule
    for c in Q[-2:0:-1]:
        q.add_(c).mul_(f)
    q.add_(Q[0])
    return (f * f).mul_(q).add_(e * LN2_LOW).add_(f).add_(e * LN2_HIGH)


def gumbel_at(
    keys: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor | int,
    purpose: torch.Tensor | int = Purpose.TARGET,
) -> torch.Tensor:
    """The noise of n draws: keys [n, 2], positions [n] (index of the token being drawn), purpose one or [n], all int64.

    ids: token ids int64 [n, m], or a vocabulary size V for all of 0 .. V-1. Returns float32 [n, m] or [n, V].
    """
    device = keys.device
    k0, k1 = keys[:, :1], keys[:, 1:]
    position = positions[:, None]
    purposes = torch.as_tensor(purpose, dtype=torch.int64, device=device).expand(len(keys))[:, None]
    zero = torch.zeros_like(position)
    if isinstance(ids, int):
        groups = torch.arange((ids + 3) // 4, device=device)[None]
        words = torch.stack(_rounds(position, groups, purposes, zero, k0, k1), dim=-1)
        return gumbel(words.flatten(1)[:, :ids])
    words = torch.stack(_rounds(position, ids >> 2, purposes, zero, k0, k1), dim=-1)
    return gumbel(words.gather(-1, (ids & 3)[..., None])[..., 0])


def reference_philox(counter: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Numpy reference of `philox`: uint32 [..., 4] and [..., 2] -> uint32 [..., 4]."""
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [keys[..., i].astype(np.uint64) for i in range(2)]
    mask, shift = np.uint64(MASK), np.uint64(32)
    for _ in range(ROUNDS):
        a, b = c[0] * np.uint64(MULTIPLIERS[0]), c[2] * np.uint64(MULTIPLIERS[1])
        c = [(b >> shift) ^ c[1] ^ k[0], b & mask, (a >> shift) ^ c[3] ^ k[1], a & mask]
        k = [(word + np.uint64(step)) & mask for word, step in zip(k, KEY_STEPS, strict=True)]
    return np.stack(c, axis=-1).astype(np.uint32)


def reference_gumbel(words: np.ndarray) -> np.ndarray:
    """Numpy reference of `gumbel`: uint32 -> float32, the same shape."""
    words = np.asarray(words, dtype=np.uint32)
    low = words < 2**30
    y = np.where(low, words, words ^ np.uint32(MASK)).astype(np.float32) * np.float32(2.0**-32) + np.float32(2.0**-33)
    f, e = _reference_split(y)
    f, e = _reference_split(-_reference_ln(np.where(low, -y, f), np.where(low, np.float32(0), e)))
    return -_reference_ln(f, e)


def _reference_split(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    bits = x.view(np.int32)
    e = (bits - np.int32(SQRT_HALF_BITS)) >> 23
    return (bits - (e << 23)).view(np.float32) - np.float32(1), e.astype(np.float32)


def _reference_ln(f: np.ndarray, e: np.ndarray) -> np.ndarray:
    q = np.full_like(f, np.float32(Q[-1]))
    for c in Q[-2::-1]:
        q = q * f + np.float32(c)
    ln: np.ndarray = (((f * f) * q + e * np.float32(LN2_LOW)) + f) + e * np.float32(LN2_HIGH)
    return ln


def reference_gumbel_at(keys: Key, position: int, vocab: int, purpose: int = Purpose.TARGET) -> np.ndarray:
    """Numpy reference of `gumbel_at` for one draw: float32 [vocab]."""
    counter = np.zeros(((vocab + 3) // 4, 4), dtype=np.uint32)
    counter[:, 0], counter[:, 1], counter[:, 2] = position, np.arange(len(counter)), purpose
    words = reference_philox(counter, np.broadcast_to(np.array(keys, dtype=np.uint32), (len(counter), 2)))
    return reference_gumbel(words.reshape(-1)[:vocab])
