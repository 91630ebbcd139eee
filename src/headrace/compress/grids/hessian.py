"""Second moment of a layer's inputs, H = mean of x xᵀ, and the factor U for the column loop: upper triangular, UᵀU = H⁻¹.

A change D of a matrix [n, k] changes its outputs by tr(D H Dᵀ) in mean square.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

DAMPING = 0.01  # share of the mean of H's diagonal that is added to it
TIMES, TRIES = 10, 3  # factor of the damping, and attempts, if H is not positive definite


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
