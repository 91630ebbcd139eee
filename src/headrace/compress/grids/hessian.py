"""The second moment of a layer's inputs, H = Σ x xᵀ / n, made ready for the column loop: U upper with UᵀU = H⁻¹.

What a change D of a matrix [n, k] does to its outputs, in the mean square over the inputs, is tr(D H Dᵀ).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.01  # of the mean of H's diagonal, added to all of it
TIMES, TRIES = 10, 3  # more damping, so often, where H is not positive definite


@dataclass(frozen=True, slots=True)
class Upper:
    """`factor` [k, k] of the columns in their new order; `dead` [k], as they stand: inputs that were always 0; `damping`: the
    share of the mean that was added."""

    factor: Tensor
    dead: Tensor
    damping: float


def upper(hessian: Tensor, order: Tensor | None = None, damping: float = DAMPING) -> Upper | None:
    """U of a symmetric matrix [k, k], its columns taken in `order`. None where ten and a hundred times the damping do not make
    it positive definite, or it is not finite.

    With J the reversal of order and J H J = M Mᵀ, U is the inverse of J M J, so H⁻¹ itself is never formed. Two matrices of
    this size are in memory at a time, besides H.
    """
    diagonal = hessian.diagonal()
    dead = diagonal == 0
    mean = float(diagonal.double().mean())
    taken = torch.arange(len(hessian)) if order is None else order
    backward = taken.flip(0)
    for attempt in range(TRIES):
        share = damping * TIMES**attempt
        damped = hessian[backward[:, None], backward]
        damped.diagonal().add_(torch.full_like(diagonal, share * mean).masked_fill_(dead[backward], 1.0))
        lower, failed = torch.linalg.cholesky_ex(damped)
        del damped
        if not failed and bool(torch.isfinite(lower.diagonal()).all()):
            turned = lower.flip(0, 1)  # upper
            del lower
            made = torch.eye(len(turned), dtype=turned.dtype)
            return Upper(torch.linalg.solve_triangular(turned, made, upper=True, out=made), dead, share)
    return None


def output_error(change: Tensor, hessian: Tensor) -> float:
    """tr(D H Dᵀ) of D [n, k]: the mean square of what a change of the matrix does to its outputs, added up over these."""
    return max(float(((change @ hessian) * change).sum(dtype=torch.float64)), 0.0)
