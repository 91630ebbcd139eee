"""Rounding in a layer pass: to nearest, or by the column loop of GPTQ (arXiv 2210.17323).

Pruning goes first, or happens in the loop (SparseGPT, arXiv 2301.00774).
"""

import time
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from headrace.compress.base import Inputs, Matrix, OutputReport, QuantizedRows, Visit
from headrace.compress.grids.errors import outside
from headrace.compress.grids.keep import Sparsity, keep_mask, obs
from headrace.compress.grids.loop import BLOCK, Keep, reconstruct
from headrace.compress.grids.targets import nearest, target
from headrace.compress.least_squares import DAMPING, inverse_factor, output_error
from headrace.compress.pruning import SPARSEGPT, pruning_mask
from headrace.weights.kinds import FLOATS

DEAD = 0.05  # share of always-zero inputs above which a warning is given


class Rounding:
    """Rounds every matrix of a layer. Scales are searched with the importance of each input.

    gptq: by the column loop, otherwise to nearest. ordered: the loop takes columns by falling importance, with scales fixed
    beforehand (act-order with static groups); the file does not depend on the order. prune: method and sparsity; SparseGPT
    chooses in the loop, which then takes columns in their own order. damping: share of the mean of the Hessian's diagonal that
    is added to it. sequential: inputs of a matrix are measured again after the matrices before it in the layer are rounded.
    """

    def __init__(
        self,
        gptq: bool,
        ordered: bool = True,
        threads: int = 1,
        prune: tuple[str, Sparsity] | None = None,
        damping: float = DAMPING,
        sequential: bool = False,
    ) -> None:
        self._prune, self._threads, self._damping, self._sequential = prune, threads, damping, sequential
        self._chooses = prune is not None and prune[0] == SPARSEGPT
        self._gptq, self._ordered = gptq or self._chooses, ordered and not self._chooses

    def visit(self, visit: Visit) -> None:
        changed = False
        for name in visit.order or visit.matrices:
            matrix = visit.matrices[name]
            wanted = {part: kind for part, kind in matrix.kinds.items() if kind not in FLOATS}
            if wanted:
                if self._sequential and changed:
                    visit.measure([name])
                self._matrix(visit, matrix, wanted)
                changed = True

    def _matrix(self, visit: Visit, matrix: Matrix, wanted: dict[str, str]) -> None:
        began, inputs, importance = time.perf_counter(), matrix.inputs, importance_of(matrix.inputs)
        diagonal = inputs.hessian.diagonal()
        order = torch.argsort(diagonal, descending=True, stable=True) if self._ordered else None
        factor = inverse_factor(inputs.hessian, order, self._damping) if self._gptq and importance is not None else None
        if self._gptq and (factor is None or factor.damping > self._damping):
            how = (
                "not positive definite: rounded to nearest" if factor is None else f"damped by {factor.damping:.0%} of its mean"
            )
            visit.notes.append(f"{matrix.path}: the moments of its inputs are {how}; more texts help")
        dead = int((diagonal == 0).sum())
        if dead > DEAD * len(diagonal):
            visit.notes.append(f"{matrix.path}: {dead} of {len(diagonal)} inputs are 0 in all texts; other texts may use them")
        for part, kind in wanted.items():
            w = matrix.parts[part]
            mask = self._mask(w, importance)
            kept = w if mask is None else torch.where(torch.from_numpy(mask), w, 0.0)
            to = target(kind)
            rows, plain = nearest(kept, to, importance, self._threads)
            values, damping = plain, 0.0
            if factor is not None:
                static = rows if self._ordered else None
                grids = to.grids(kept.numpy(), importance, rows=static, order=order, threads=self._threads)
                keep = self._keep(mask, order)
                result = reconstruct(w, factor.factor, grids=grids, keep=keep, order=order, block=self._block())
                rows, values = grids.rows(result)
                damping = factor.damping
            report = output_report(w, values, plain, kind, inputs, outside(w.numpy(), values.numpy(), rows, to))
            seconds, began = time.perf_counter() - began, time.perf_counter()
            visit.outputs[matrix.target(part)] = replace(report, dead=dead, damping=damping, seconds=seconds)
            matrix.coded[part] = QuantizedRows(to.kind, rows)
            w.copy_(values)

    def _mask(self, w: Tensor, importance: np.ndarray | None) -> np.ndarray | None:
        """Weights to keep, known before the loop; by magnitude if the inputs are unknown."""
        if self._prune is None:
            return None
        method, sparsity = self._prune
        return pruning_mask(w.numpy(), (method if importance is not None else "magnitude", sparsity), importance)

    def _keep(self, mask: np.ndarray | None, order: Tensor | None) -> Keep | None:
        """Object that chooses weights in the loop."""
        if self._prune is not None and self._chooses:
            return KeptBlocks(self._prune[1])
        return None if mask is None else KeptMask(mask, order)

    def _block(self) -> int:
        """Columns of the loop whose errors are spread at a time: whole groups of neighbours."""
        of = self._prune[1].of if self._prune is not None else 0
        return max(of, BLOCK - BLOCK % of) if of else BLOCK


def importance_of(inputs: Inputs) -> np.ndarray | None:
    """Importance of each column, float32 [k]: mean square of its input; None if not finite or all 0."""
    diagonal = inputs.hessian.diagonal()
    usable = bool(torch.isfinite(diagonal).all()) and bool((diagonal > 0).any())
    return np.asarray(diagonal.numpy(), np.float32).copy() if usable else None


def output_report(
    w: Tensor, values: Tensor, plain: Tensor, kind: str, inputs: Inputs, parts: tuple[float, float]
) -> OutputReport:
    """Errors of rounded `values` for w, next to those of `plain` (to nearest). parts: as grids.errors.outside returns them."""

    def error(rounded: Tensor, moment: Tensor) -> float:
        return output_error(rounded - w, moment) / (output_error(w, moment) or 1.0)

    held = inputs.held if inputs.held_count else None
    return OutputReport(
        kind=kind,
        weights=w.numel(),
        inputs=w.shape[1],
        error=error(values, inputs.hessian),
        held=None if held is None else error(values, held),
        nearest=error(plain, inputs.hessian),
        held_nearest=None if held is None else error(plain, held),
        lost=float((values - w).square().sum(dtype=torch.float64)),
        energy=float(w.square().sum(dtype=torch.float64)),
        largest=float(inputs.largest.max()),
        clipping=parts[0],
        noise=parts[1],
    )


@dataclass(frozen=True, slots=True)
class KeptMask:
    """A mask [n, k] made beforehand, for a loop that takes columns in `order` (None: in their own)."""

    mask: np.ndarray
    order: Tensor | None = None

    def at(self, j: int, w: Tensor, upper: Tensor) -> Tensor:
        """As KeptBlocks.at."""
        return torch.from_numpy(self.mask[:, j if self.order is None else int(self.order[j])])


@dataclass(slots=True)
class KeptBlocks:
    """Masks made in the loop: at the first of `block` neighbouring columns (for n:m, of m) from the OBS scores of the weights
    at that moment. The loop's blocks must be whole blocks of these. One instance serves one matrix.
    """

    sparsity: Sparsity
    block: int = 128
    _start: int = field(default=-1, init=False)
    _mask: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), bool), init=False)

    def at(self, j: int, w: Tensor, upper: Tensor) -> Tensor:
        """Rows that keep their weight in column j: bool [n]. w: current weights [n, k]. upper: [k, k].

        Raises ValueError as `keep_mask` does.
        """
        step = self.sparsity.of or self.block
        start = j - j % step
        if start != self._start:
            if j != start:
                raise ValueError(f"column {j} comes before the first of its {step}")
            now, diagonal = w[:, start : start + step].numpy(), upper.diagonal()[start : start + step].numpy()
            self._start, self._mask = start, keep_mask(obs(now, diagonal), self.sparsity, start)
        return torch.from_numpy(self._mask[:, j - start])
