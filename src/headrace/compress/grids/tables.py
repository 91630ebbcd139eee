"""Tables of unevenly spaced values: float32, ascending, with a zero."""

from statistics import NormalDist

import numpy as np

# Exponent bits, mantissa bits, bias, and number of highest codes that are NaN or infinite.
_MINIFLOATS = {"e4m3": (4, 3, 7, 1), "e5m2": (5, 2, 15, 4), "e2m1": (2, 1, 1, 0)}
TAIL = 0.9677083  # the outermost quantile of NF4 (QLoRA, https://arxiv.org/abs/2305.14314)


def minifloat(name: str) -> np.ndarray:
    """All values of a small float format: E4M3 to 448, E5M2 to 57344 (arXiv 2209.05433), E2M1 to 6."""
    exponent_bits, mantissa_bits, bias, reserved = _MINIFLOATS[name]
    codes = np.arange(2 ** (exponent_bits + mantissa_bits) - reserved)
    exponent, mantissa = codes >> mantissa_bits, (codes & (2**mantissa_bits - 1)) / 2**mantissa_bits
    values = np.where(exponent > 0, (1 + mantissa) * 2.0 ** (exponent - bias), mantissa * 2.0 ** (1 - bias))
    return np.concatenate([-values[:0:-1], values]).astype(np.float32)


def normal_float() -> np.ndarray:
    """NF4 (QLoRA, arXiv 2305.14314): quantiles of N(0, 1), eight above zero and seven below, the outermost at ±1."""
    normal = NormalDist()

    def side(count: int) -> list[float]:
        return [normal.inv_cdf(p) for p in np.linspace(TAIL, 0.5, count + 1)[:-1]]

    values = np.array([*(-value for value in side(7)), 0.0, *reversed(side(8))])
    return (values / values.max()).astype(np.float32)


def powers(bits: int) -> np.ndarray:
    """Zero and ± powers of two down from 1; one code is unused."""
    values = 2.0 ** -np.arange(2 ** (bits - 1) - 1)
    return np.concatenate([-values, [0.0], values[::-1]]).astype(np.float32)


def lloyd(x: np.ndarray, bits: int, rounds: int = 40) -> np.ndarray:
    """2**bits values with a small squared error for numbers x, each the mean of its cell (Lloyd 1982); one of them is 0."""
    x = np.sort(x.reshape(-1).astype(np.float64))
    sums = np.concatenate([[0.0], np.cumsum(x)])
    table = np.quantile(x, (np.arange(2**bits) + 0.5) / 2**bits)
    for _ in range(rounds):
        table[np.abs(table).argmin()] = 0.0
        table.sort()
        cuts = np.concatenate([[0], np.searchsorted(x, (table[1:] + table[:-1]) / 2), [len(x)]])
        count = np.diff(cuts)
        means = np.diff(sums[cuts]) / np.maximum(count, 1)
        table = np.where((count > 0) & (table != 0), means, table)
    return np.sort(table).astype(np.float32)
