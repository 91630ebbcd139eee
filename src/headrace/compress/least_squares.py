"""Second moments of a layer's inputs, and corrections by least squares.

H is the mean of x xᵀ. The column loop takes its factor U: upper triangular, UᵀU = H⁻¹. Least squares corrects a matrix after
its inputs have changed, so that its outputs change least.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

HELD_TRIES = 6  # dampings, each ten times the one before; few texts need more than GPTQ's
SINGULAR = "the moments of its inputs cannot be inverted: nothing is made good; more texts help"
DAMPING = 0.01  # share of the mean of H's diagonal that is added to it
TIMES, TRIES = 10, 3  # factor of the damping, and attempts, if H is not positive definite


@dataclass(slots=True)
class Residual:
    """Moments of the residual r = y - W' x', where W' reads inputs x' in place of those that gave y; means over texts.

    moment: E[x' x'ᵀ] [k, k]. missing: E[r x'ᵀ] [n, k]. squares: E|r|². energy: E|y|².
    """

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
        """Of w [n, all] if only the inputs `kept` remain, with unchanged columns."""
        left = w.clone()
        left[:, kept] = 0.0
        missing = (left @ moment)[:, kept]
        return cls(moment[kept][:, kept], missing, output_error(left, moment), output_error(w, moment), 1)

    def add(self, x: Tensor, wanted: Tensor, missed: Tensor) -> None:
        """Add rows x' [rows, k], y and r [rows, n]."""
        self.moment.addmm_(x.t(), x)
        self.missing.addmm_(missed.t(), x)
        self.squares += float(missed.square().sum(dtype=torch.float64))
        self.energy += float(wanted.square().sum(dtype=torch.float64))
        self.count += len(x)

    def finish(self) -> None:
        """Turn sums into means."""
        count = max(self.count, 1)
        self.moment /= count
        self.missing /= count
        self.squares, self.energy = self.squares / count, self.energy / count

    def repair(self, held: "Residual | None" = None) -> Tensor | None:
        """The correction D [n, k] that minimizes E|r - D x'|², damped as for GPTQ; None if no damping makes the moment
        invertible.

        held: choose the damping by the error on other texts, which report no error; zeros if none improves it.
        """
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
    """Errors with and without correction, as structure.CutReport has them."""
    return {
        "error": measured.error(),
        "repaired": measured.error(change),
        "held": None if held is None else held.error(),
        "held_repaired": None if held is None else held.error(change),
    }


@dataclass(frozen=True, slots=True)
class InverseFactor:
    """factor: U [k, k] for the columns in their new order. dead: [k], inputs that are always 0, in the old order. damping:
    share added.
    """

    factor: Tensor
    dead: Tensor
    damping: float


def inverse_factor(hessian: Tensor, order: Tensor | None = None, damping: float = DAMPING) -> InverseFactor | None:
    """U of a symmetric matrix [k, k] with columns in `order`; None if it is not finite, or not positive definite with 100 times
    the damping.

    With J the reversal of order and J H J = M Mᵀ, U is the inverse of J M J, so that H⁻¹ is never formed. Two matrices of this
    size are in memory besides H.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    mean = float(diagonal.double().mean())
    columns = torch.arange(len(hessian)) if order is None else order
    backward = columns.flip(0)
    for attempt in range(TRIES):
        share = damping * TIMES**attempt
        damped = hessian[backward[:, None], backward]
        damped.diagonal().add_(torch.full_like(diagonal, share * mean).masked_fill_(dead[backward], 1.0))
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not failed and bool(torch.isfinite(lower.diagonal()).all()):
            reversed_factor = lower.flip(0, 1)  # upper
            del lower
            factor = torch.eye(len(reversed_factor), dtype=reversed_factor.dtype)
            return InverseFactor(torch.linalg.solve_triangular(reversed_factor, factor, upper=True, out=factor), dead, share)
    return None


def output_error(change: Tensor, hessian: Tensor) -> float:
    """tr(D H Dᵀ) of D [n, k]: mean squared change of the outputs, summed over them."""
    return max(float(((change @ hessian) * change).sum(dtype=torch.float64)), 0.0)
