"""Activation scales folded into weights: AWQ (Lin et al. 2023, arXiv 2306.00978) for better rounding of weights, SmoothQuant
(Xiao et al. 2022, arXiv 2211.10438) for better rounding of inputs.

The inverse scales are folded into the layer that makes the inputs, so that nothing is left to do at run time.
"""

import torch
from torch import Tensor

from headrace.compress.base import ScaleMapping, Visit
from headrace.compress.grids.targets import nearest, target
from headrace.compress.rounding import importance_of
from headrace.weights.kinds import FLOATS

POWERS = 20  # exponents tried: 0, 1/20, …, 19/20
ROWS = 64  # sampled rows of each matrix, evenly spread
LEAST = 1e-4  # lower bound of a mean
ALPHA, TINY = 0.8, 1e-5  # of SmoothQuant: migration strength; lower bound of a maximum


class AWQ:
    """Scales inputs down by a power of their mean |x|, and the weight columns up, for each scale mapping.

    The exponent with the least output error after rounding is taken; 0 means no scaling.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def visit(self, visit: Visit) -> None:
        for edge in visit.edges:
            s = self._best(visit, edge)
            if s is not None:
                visit.fold(edge, s)

    def _best(self, visit: Visit, edge: ScaleMapping) -> Tensor | None:
        first = visit.matrices[edge.consumers[0]].inputs
        if importance_of(first) is None:
            return None
        mean = visit.shared(edge, first.mean).mean(1)
        best, least = None, self._error(visit, edge, torch.ones_like(mean))
        for power in range(1, POWERS):
            s = mean.clamp_min(LEAST) ** (power / POWERS)
            s = s / (s.max() * s.min()).sqrt()
            error = self._error(visit, edge, s)
            if error < least:
                best, least = s, error
        return best

    def _error(self, visit: Visit, edge: ScaleMapping, s: Tensor) -> float:
        """Squared output error over sampled outputs of all consumers, rounded to nearest after the fold."""
        columns, error = visit.columns(edge, s), 0.0
        for name in edge.consumers:
            matrix = visit.matrices[name]
            importance = (matrix.inputs.hessian.diagonal() / columns.square()).numpy()
            for part, kind in matrix.kinds.items():
                if kind in FLOATS:
                    continue
                w = matrix.parts[part]
                w = w[:: max(1, len(w) // ROWS)] * columns
                change = (nearest(w, target(kind), importance, self._threads)[1] - w) / columns
                error += float(((change @ matrix.inputs.hessian) * change).sum(dtype=torch.float64))
        return error


class SmoothQuant:
    """Splits the range between inputs and weight columns, both by their maxima: s = |x|^alpha / |w|^(1-alpha).

    alpha 1 makes the largest input 1 and leaves the range to the columns; 0 is the opposite; 0.5 gives both the same maximum.
    """

    def __init__(self, alpha: float = ALPHA) -> None:
        self._alpha = alpha

    def visit(self, visit: Visit) -> None:
        for edge in visit.edges:
            columns = torch.stack([visit.matrices[name].linear.weight.abs().amax(0) for name in edge.consumers]).amax(0)
            largest = visit.matrices[edge.consumers[0]].inputs.largest
            x, w = (visit.shared(edge, one).amax(1).clamp_min(TINY) for one in (largest, columns))
            visit.fold(edge, x**self._alpha / w ** (1 - self._alpha))
