"""Unstructured pruning: which weights of the layers are set to 0, before or while the others are rounded."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.compress.grids.keep import EXAMPLES, GLOBAL, Sparsity, keep_mask, magnitude, parse_sparsity, wanda
from headrace.weights.kinds import FLOATS

SPARSEGPT = "sparsegpt"
PRUNES = ("magnitude", "wanda", SPARSEGPT)
HOLDS_ZERO = (*FLOATS, "Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K", "MXFP4")  # kinds that hold 0 exactly
WITHOUT_MINIMUM = {"Q4_1": "Q4_0", "Q5_1": "Q5_0"}
DROPPED_BITS = 12  # of a float32, when weights are counted by size
_MATRIX = re.compile(r"blk\.\d+\.\w+\.weight")


def parse_pruning(methods: Sequence[str], sparsity: str | None) -> tuple[str, Sparsity] | None:
    """The pruning method among `methods` and its sparsity, or None. Raises ValueError if only one of the two is given."""
    pruning_methods = [name for name in methods if name in PRUNES]
    if not pruning_methods:
        if sparsity is not None:
            raise ValueError(f"sparsity needs a method that prunes: {' or '.join(PRUNES)}")
        return None
    if sparsity is None:
        raise ValueError(f"{pruning_methods[0]} needs a sparsity: {EXAMPLES}")
    return pruning_methods[0], parse_sparsity(sparsity)


def is_pruned(name: str, shape: tuple[int, ...]) -> bool:
    """True for a matrix of a layer in a GGUF file; token table, head, norms and biases are not pruned."""
    return len(shape) == 2 and _MATRIX.fullmatch(name) is not None


def zero_kind(kind: str) -> str:
    """Kind of a pruned matrix. Raises ValueError if it cannot hold 0."""
    kind = WITHOUT_MINIMUM.get(kind, kind)
    if kind not in HOLDS_ZERO:
        raise ValueError(
            f"0 does not stay 0 in {kind}: pruned models are written as Q4_0, Q5_0, Q8_0, Q6_K, Q3_K_S, MXFP4, F16 or BF16"
        )
    return kind


def pruning_mask(rows: np.ndarray, how: tuple[str, Sparsity], importance: np.ndarray | None) -> np.ndarray:
    """Weights to keep, bool [n, k], of rows float32 [n, k], each row by itself. importance: mean squares of the inputs [k].

    For SparseGPT, which chooses in the column loop, Wanda's mask. Raises ValueError if rows are not whole groups of neighbours,
    or Wanda lacks the importance.
    """
    method, sparsity = how
    if method == "magnitude":
        scores = magnitude(rows)
    elif importance is None:
        raise ValueError("is missing from the imatrix, which wanda needs; use an imatrix of this model")
    else:
        scores = wanda(rows, np.sqrt(importance.astype(np.float32)))
    return keep_mask(scores, sparsity)


def global_threshold(matrices: Iterable[np.ndarray], share: float) -> float:
    """The |w| below which a share of the weights of all matrices lies, to one part in 2,048: they are counted by their leading
    bits, so that one matrix is in memory at a time.

    Raises ValueError if a weight is NaN.
    """
    counts = np.zeros(1 << (31 - DROPPED_BITS), np.int64)
    for matrix in matrices:
        if np.isnan(matrix).any():
            raise ValueError("a weight is NaN; no share of the weights can be chosen")
        bits = np.abs(np.ascontiguousarray(matrix, np.float32)).view(np.uint32).reshape(-1) >> DROPPED_BITS
        counts += np.bincount(bits, minlength=len(counts))
    below = np.cumsum(counts) <= share * counts.sum()
    return float(np.uint32(below.sum() << DROPPED_BITS).view(np.float32))


@dataclass(frozen=True, slots=True)
class PruningSchedule:
    """Rounds of magnitude pruning up to the sparsity `final`, spread evenly over the first half of a training.

    Source: Zhu & Gupta, "To prune, or not to prune", arXiv 1710.01878, equation 1.
    """

    final: Sparsity
    rounds: int

    def sparsity_after(self, finished: int) -> Sparsity:
        """Sparsity after `finished` rounds; the last round has the final one. Of 2:4, a whole number of each group."""
        share = self.final.share * (1 - (1 - finished / self.rounds) ** 3)
        return replace(self.final, share=share, kept=self.final.of - round(share * self.final.of))

    def first_steps(self, steps: int) -> list[int]:
        """The step before which each round prunes. All lie in the first half: what a late round removes, the falling learning
        rate no longer gives back."""
        return [number * steps // (2 * self.rounds) for number in range(self.rounds)]

    def prune(self, matrices: Sequence[np.ndarray], finished: int) -> None:
        """Set weights of float32 matrices [n, k] to 0, in place, so that the shares are those after `finished` rounds."""
        sparsity = self.sparsity_after(finished)
        if sparsity.per == GLOBAL:
            least = global_threshold(matrices, sparsity.share)
            for matrix in matrices:
                matrix[np.abs(matrix) < least] = 0.0
            return
        for matrix in matrices:
            matrix[...] = prune_rows(matrix, ("magnitude", sparsity), None)


def prune_rows(rows: np.ndarray, how: tuple[str, Sparsity], importance: np.ndarray | None) -> np.ndarray:
    """Rows [n, k] with pruned weights set to 0. Raises ValueError as `pruning_mask` does."""
    return np.where(pruning_mask(rows, how, importance), rows, np.float32(0))
