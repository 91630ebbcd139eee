"""Least squares: what a matrix is to be after its inputs changed, so that its outputs change least."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.compress.grids.hessian import DAMPING, TIMES, TRIES, output_error

HELD_TRIES = 6  # dampings, ten times as much each: where texts are few, more than GPTQ's
SINGULAR = "the moments of its inputs cannot be inverted: nothing is made good; more texts help"


@dataclass(slots=True)
class Residual:
    """What outputs miss, r = y - W' x', where a matrix W' reads inputs x' in place of those that gave y; in means over texts.

    `moment` E[x' x'ᵀ] [k, k], `missing` E[r x'ᵀ] [n, k], `squares` E|r|², `energy` E|y|²."""

    moment: Tensor
    missing: Tensor
    squares: float = 0.0
    energy: float = 0.0
    count: int = 0

    @classmethod
    def empty(cls, w: Tensor) -> "Residual":
        """For a matrix w [n, k], in its dtype."""
        return cls(w.new_zeros(w.shape[1], w.shape[1]), torch.zeros_like(w))

    @classmethod
    def of_kept(cls, w: Tensor, moment: Tensor, kept: Tensor) -> "Residual":
        """Of w [n, all] where only the inputs `kept` are left, with their columns as they are."""
        left = w.clone()
        left[:, kept] = 0.0
        missing = (left @ moment)[:, kept]
        return cls(moment[kept][:, kept], missing, output_error(left, moment), output_error(w, moment), 1)

    def add(self, x: Tensor, wanted: Tensor, missed: Tensor) -> None:
        """Rows: x' [rows, k], y and r [rows, n]."""
        self.moment.addmm_(x.t(), x)
        self.missing.addmm_(missed.t(), x)
        self.squares += float(missed.square().sum(dtype=torch.float64))
        self.energy += float(wanted.square().sum(dtype=torch.float64))
        self.count += len(x)

    def finish(self) -> None:
        """Sums become means."""
        count = max(self.count, 1)
        self.moment /= count
        self.missing /= count
        self.squares, self.energy = self.squares / count, self.energy / count

    def repair(self, held: "Residual | None" = None) -> Tensor | None:
        """D [n, k] that makes E|r - D x'|² least, damped as for GPTQ. Where texts were held out, of several dampings that which
        leaves least of theirs, and zeros where none helps there. None where no damping makes the moment invertible."""
        mean = float(self.moment.diagonal().double().mean())
        best: Tensor | None = None
        for attempt in range(TRIES if held is None else HELD_TRIES):
            damped = self.moment.clone()
            damped.diagonal().add_(DAMPING * TIMES**attempt * mean)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if failed or not bool(torch.isfinite(lower.diagonal()).all()):
                continue
            change = torch.cholesky_solve(self.missing.t(), lower).t().contiguous()
            if held is None:
                return change
            if best is None or held.error(change) < held.error(best):
                best = change
        if best is None or held is None or held.error(best) < held.error():
            return best
        return torch.zeros_like(best)

    def error(self, change: Tensor | None = None) -> float:
        """E|r - D x'|² / E|y|²."""
        squares = self.squares
        if change is not None:
            gained = float((change * self.missing).sum(dtype=torch.float64))
            squares += output_error(change, self.moment) - 2 * gained
        return max(squares, 0.0) / (self.energy or 1.0)


def error_record(measured: Residual, held: Residual | None, change: Tensor | None) -> dict[str, float | None]:
    """What is told of a repair, as structure.CutReport has it."""
    return {
        "error": measured.error(),
        "repaired": measured.error(change),
        "held": None if held is None else held.error(),
        "held_repaired": None if held is None else held.error(change),
    }
