"""Pruning: which weights of a model's layers become 0 before the others are rounded, or while they are."""

import re
from collections.abc import Sequence

import numpy as np

from headrace.compress.grids.keep import EXAMPLES, Sparsity, keep_mask, magnitude, parse_sparsity, wanda
from headrace.weights.kinds import FLOATS

SPARSEGPT = "sparsegpt"
PRUNES = ("magnitude", "wanda", SPARSEGPT)
HOLDS_ZERO = (*FLOATS, "Q4_0", "Q5_0", "Q8_0", "Q3_K", "Q6_K", "MXFP4")  # kinds in which 0 stays 0
WITHOUT_MINIMUM = {"Q4_1": "Q4_0", "Q5_1": "Q5_0"}
_MATRIX = re.compile(r"blk\.\d+\.\w+\.weight")


def parse_pruning(methods: Sequence[str], sparsity: str | None) -> tuple[str, Sparsity] | None:
    """Which of the methods prunes, and what is to go; None where none does. Raises ValueError for what cannot be."""
    found = [name for name in methods if name in PRUNES]
    if not found:
        if sparsity is not None:
            raise ValueError(f"sparsity needs a method that prunes: {' or '.join(PRUNES)}")
        return None
    if sparsity is None:
        raise ValueError(f"{found[0]} needs a sparsity: {EXAMPLES}")
    return found[0], parse_sparsity(sparsity)


def is_pruned(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of a GGUF file is a matrix of a layer: tables of tokens, the head, norms and biases stay whole."""
    return len(shape) == 2 and _MATRIX.fullmatch(name) is not None


def zero_kind(kind: str) -> str:
    """The kind that a pruned matrix gets. Raises ValueError where 0 would not stay 0 in it."""
    kind = WITHOUT_MINIMUM.get(kind, kind)
    if kind not in HOLDS_ZERO:
        raise ValueError(
            f"0 does not stay 0 in {kind}: pruned models are written as Q4_0, Q5_0, Q8_0, Q6_K, Q3_K_S, MXFP4, F16 or BF16"
        )
    return kind


def pruning_mask(rows: np.ndarray, how: tuple[str, Sparsity], importance: np.ndarray | None) -> np.ndarray:
    """What stays of rows float32 [n, k], bool [n, k], each row by itself; of SparseGPT, which chooses as it goes, what Wanda
    would keep. importance [k]: mean squares of the inputs.

    Raises ValueError where rows are no whole neighbours, or Wanda lacks the importance of this matrix.
    """
    method, sparsity = how
    if method == "magnitude":
        scores = magnitude(rows)
    elif importance is None:
        raise ValueError("has no importance in the imatrix, which wanda needs; is it another model's?")
    else:
        scores = wanda(rows, np.sqrt(importance.astype(np.float32)))
    return keep_mask(scores, sparsity)


def prune_rows(rows: np.ndarray, how: tuple[str, Sparsity], importance: np.ndarray | None) -> np.ndarray:
    """Rows [n, k] with zeros. Raises ValueError as `pruning_mask` does."""
    return np.where(pruning_mask(rows, how, importance), rows, np.float32(0))
