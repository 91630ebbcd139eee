"""Scores for pruning, and masks with exact counts. A layer's matrix is w [n, k], a row for each output.

Scores: magnitude |w|; Wanda |w| * ‖x_j‖ (Sun et al. 2023, arXiv 2306.11695); OBS w² / U_jj², U the upper Cholesky factor of the
inverse Hessian (SparseGPT, arXiv 2301.00774). Of equal scores the left one is kept.
"""

import re
from dataclasses import dataclass

import numpy as np

ROW, LAYER, GLOBAL = "row", "layer", "global"
_PATTERN = re.compile(r"(\d{1,3}):(\d{1,3})")
EXAMPLES = "2:4, or a share of the weights such as 0.5 (of each row), layer:0.5 (of each matrix) or global:0.5 (of all)"


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Weights to remove: `share` of each row, of each matrix or of all matrices, or all but `kept` of each `of` neighbours."""

    share: float
    kept: int = 0
    of: int = 0
    per: str = ROW

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}" if self.of else f"{'' if self.per == ROW else f'{self.per}:'}{self.share:g}"

    def gone(self, first: int, last: int) -> int:
        """Number of weights [first, last) of a row (or layer) to remove. Parts add up to the whole."""
        return round(self.share * last) - round(self.share * first)


def parse_sparsity(text: str) -> Sparsity:
    """Parse "2:4" (two of four are kept), "0.5" (half of each row is removed), "layer:0.5" (half of each matrix) or
    "global:0.5" (half of all matrices together).

    SparseGPT removes a share of each 128 columns, over all rows with "layer", as its authors do. Raises ValueError.
    """
    if match := _PATTERN.fullmatch(text):
        kept, of = int(match[1]), int(match[2])
        if not 0 < kept < of:
            raise ValueError(f"sparsity {text!r} keeps {kept} of {of} weights; write {EXAMPLES}")
        return Sparsity(1 - kept / of, kept, of)
    scope, colon, number = text.rpartition(":")
    per = scope if colon and scope in (LAYER, GLOBAL) else ROW
    number = text if per == ROW else number
    try:
        share = float(number)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f"{text!r} is not a sparsity; write {EXAMPLES}")
    return Sparsity(share, per=per)


def magnitude(w: np.ndarray) -> np.ndarray:
    """|w|."""
    return np.abs(w)


def wanda(w: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """|w| * ‖x_j‖. norms: [k], of each input over all tokens."""
    scores: np.ndarray = np.abs(w) * norms
    return scores


def obs(w: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """(w / U_jj)²: cost of removing a weight if the others compensate. diagonal: U_jj [k]."""
    return np.square(w / diagonal)


def keep_mask(scores: np.ndarray, sparsity: Sparsity, first: int = 0) -> np.ndarray:
    """Mask of weights to keep, bool [n, k], by scores [n, k]; the counts are exact, also over parts of a matrix that start at
    column `first`.

    Raises ValueError if scores are NaN, or a row is not whole groups of neighbours.
    """
    n, k = scores.shape
    if np.isnan(scores).any():
        raise ValueError("scores are NaN: the weights or their inputs contain NaN")
    if sparsity.of:
        if k % sparsity.of:
            raise ValueError(f"rows of {k} weights cannot be divided into groups of {sparsity.of}, as {sparsity} needs")
        return _largest(scores.reshape(-1, sparsity.of), sparsity.of - sparsity.kept).reshape(n, k)
    if sparsity.per == LAYER:
        return _largest(scores.reshape(1, -1), sparsity.gone(n * first, n * (first + k))).reshape(n, k)
    return _largest(scores, sparsity.gone(first, first + k))


def _largest(scores: np.ndarray, gone: int) -> np.ndarray:
    """All but the `gone` least of each row."""
    size = scores.shape[1]
    if gone == 0:
        return np.ones(scores.shape, bool)
    if gone >= size:
        return np.zeros(scores.shape, bool)
    least = np.partition(scores, gone, axis=1)[:, gone : gone + 1]  # of those kept
    above, ties = scores > least, scores == least
    room = size - gone - above.sum(1, keepdims=True)
    return above | (ties & (ties.cumsum(1) <= room))
