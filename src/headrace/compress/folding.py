"""Scales that go from inputs into weights, or back: AWQ (Lin et al. 2023, https://arxiv.org/abs/2306.00978), so that rounding
weights loses less, and SmoothQuant (Xiao et al. 2022, https://arxiv.org/abs/2211.10438), so that rounding inputs does.

What divides is folded into what makes the input: nothing is left to do when the model runs.
"""

import torch
from torch import Tensor

from headrace.compress.base import ScaleMapping, Visit
from headrace.compress.grids.targets import nearest, target
from headrace.compress.rounding import importance_of
from headrace.weights.kinds import FLOATS

POWERS = 20  # of the mean |x|, from 0 up to but not 1
ROWS = 64  # of each matrix on which a power is tried, evenly spread
LEAST = 1e-4  # of a mean
ALPHA, TINY = 0.8, 1e-5  # of SmoothQuant: the share of the range that goes into the columns; the least of a largest number


class AWQ:
    """Inputs that are large on average are made smaller, and the columns that multiply them larger: for each edge by the power
    of the mean |x| whose rounding leaves the least error of the outputs; 0 is no scale at
    all."""

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
        """Square error of some outputs of all consumers, rounded to nearest after the fold."""
        columns, found = visit.columns(edge, s), 0.0
        for name in edge.consumers:
            matrix = visit.matrices[name]
            importance = (matrix.inputs.hessian.diagonal() / columns.square()).numpy()
            for part, kind in matrix.kinds.items():
                if kind in FLOATS:
                    continue
                w = matrix.parts[part]
                w = w[:: max(1, len(w) // ROWS)] * columns
                change = (nearest(w, target(kind), importance, self._threads)[1] - w) / columns
                found += float(((change @ matrix.inputs.hessian) * change).sum(dtype=torch.float64))
        return found


class SmoothQuant:
    """Of each edge the range of inputs and of columns, both by their largest numbers, is shared out: s = |x|^alpha /
    |w|^(1-alpha).

    With alpha 1 every input is 1 at the most and the columns have all the range, with 0 it is the other way round; with 0.5
    both are the root of their product."""

    def __init__(self, alpha: float = ALPHA) -> None:
        self._alpha = alpha

    def visit(self, visit: Visit) -> None:
        for edge in visit.edges:
            columns = torch.stack([visit.matrices[name].linear.weight.abs().amax(0) for name in edge.consumers]).amax(0)
            largest = visit.matrices[edge.consumers[0]].inputs.largest
            x, w = (visit.shared(edge, one).amax(1).clamp_min(TINY) for one in (largest, columns))
            visit.fold(edge, x**self._alpha / w ** (1 - self._alpha))
