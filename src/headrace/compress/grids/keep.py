"""Which weights are kept: scores, and masks with exact counts. A layer's matrix is w [n, k], a row for each output.

Scores: magnitude |w|; Wanda |w| · ‖x_j‖ (Sun et al. 2023); OBS w² / U_jj², U the upper Cholesky factor of the inverse Hessian
(SparseGPT, Frantar and Alistarh 2023). Of equal scores the one farther left is kept.
"""

import re
from dataclasses import dataclass

import numpy as np

ROW, LAYER = "row", "layer"
_PATTERN = re.compile(r"(\d{1,3}):(\d{1,3})")
EXAMPLES = "2:4, or a share of the weights such as 0.5"


@dataclass(frozen=True, slots=True)
class Sparsity:
    """What goes: `share` of the weights of each row (or, together, of a layer), or all but `kept` of each `of` neighbours."""

    share: float
    kept: int = 0
    of: int = 0
    per: str = ROW

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}" if self.of else f"{self.share:g}"

    def gone(self, first: int, last: int) -> int:
        """How many of weights [first, last), counted along a row (or a layer), go: parts add up to the whole."""
        return round(self.share * last) - round(self.share * first)


def parse_sparsity(text: str) -> Sparsity:
    """ "2:4" (two of four are kept) or "0.5" (half of each row goes). Raises ValueError."""
    if found := _PATTERN.fullmatch(text):
        kept, of = int(found[1]), int(found[2])
        if not 0 < kept < of:
            raise ValueError(f"sparsity {text!r} keeps {kept} of {of}; it takes {EXAMPLES}")
        return Sparsity(1 - kept / of, kept, of)
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(f"sparsity {text!r} is none; it takes {EXAMPLES}")
    return Sparsity(share)


def magnitude(w: np.ndarray) -> np.ndarray:
    """|w|."""
    return np.abs(w)


def wanda(w: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """|w| · ‖x_j‖. norms [k]: of each input over all tokens."""
    scores: np.ndarray = np.abs(w) * norms
    return scores


def obs(w: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """(w / U_jj)², what it costs to lose a weight where the others make up for it. diagonal [k]: U_jj."""
    return np.square(w / diagonal)


def keep_mask(scores: np.ndarray, sparsity: Sparsity, first: int = 0) -> np.ndarray:
    """The mask, bool [n, k], of scores [n, k]: as many as `sparsity` says, exactly; of a matrix's columns from `first` on, as
    many as make the whole exact.

    Raises ValueError where scores are NaN, or a row is no whole number of neighbours.
    """
    n, k = scores.shape
    if np.isnan(scores).any():
        raise ValueError("scores are NaN: the weights or their inputs hold numbers that are none")
    if sparsity.of:
        if k % sparsity.of:
            raise ValueError(f"rows of {k} weights are no whole groups of {sparsity.of}, of which {sparsity} keeps some")
        return _largest(scores.reshape(-1, sparsity.of), sparsity.of - sparsity.kept).reshape(n, k)
    if sparsity.per == LAYER:
        return _largest(scores.reshape(1, -1), sparsity.gone(n * first, n * (first + k))).reshape(n, k)
    return _largest(scores, sparsity.gone(first, first + k))


def _largest(scores: np.ndarray, gone: int) -> np.ndarray:
    """All but `gone` of each row."""
    size = scores.shape[1]
    if gone == 0:
        return np.ones(scores.shape, bool)
    if gone >= size:
        return np.zeros(scores.shape, bool)
    least = np.partition(scores, gone, axis=1)[:, gone : gone + 1]  # of those kept
    above, ties = scores > least, scores == least
    room = size - gone - above.sum(1, keepdims=True)
    return above | (ties & (ties.cumsum(1) <= room))
