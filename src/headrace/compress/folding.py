"""Activation scales folded into weights: AWQ (Lin et al. 2023, arXiv 2306.00978) for better rounding of weights, SmoothQuant
(Xiao et al. 2022, arXiv 2211.10438) for better rounding of inputs.

The inverse scales are folded into the layer that makes the inputs, so that nothing is left to do at run time. Scales
are judged by the outputs of the layer on the first chunk of calibration texts.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from headrace.compress.base import InputObserver, Matrix, ScaleMapping, Visit
from headrace.compress.grids.targets import nearest, target
from headrace.compress.pipeline import ALPHA
from headrace.compress.rounding import importance_of
from headrace.weights.kinds import FLOATS

POWERS = 20  # exponents are multiples of 1/20: first 0, 2/20 … 18/20, then the neighbours of the best
LEAST = 1e-4  # lower bound of a mean
TINY = 1e-5  # lower bound of a maximum
ALPHAS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # tried by SmoothQuant if none is given


class LayerOutputs:
    """Outputs of a layer on the first chunk of calibration texts, before any weight changes."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._before = self._outputs()

    def _outputs(self) -> list[Tensor]:
        return [after - before for before, after, _ in islice(self._visit.run(), 1)]

    def error(self, weights: Mapping[str, Tensor], methods: Mapping[str, Any] | None = None) -> float:
        """Squared error of what the layer adds to its input, over its squares, with other weights [n, k] by matrix.

        methods: linear methods by matrix. The layer is unchanged afterwards.
        """
        with _replaced(self._visit, weights, methods or {}):
            changed = self._outputs()
        pairs = list(zip(self._before, changed, strict=True))
        lost = sum(float((after - before).square().sum(dtype=torch.float64)) for before, after in pairs)
        return lost / (sum(float(before.square().sum(dtype=torch.float64)) for before, _ in pairs) or 1.0)


@contextmanager
def _replaced(visit: Visit, weights: Mapping[str, Tensor], methods: Mapping[str, Any]) -> Iterator[None]:
    """Other weights and methods for a time."""
    before = {name: visit.matrices[name].linear.weight for name in weights}
    try:
        for name, weight in weights.items():
            visit.matrices[name].linear.weight = weight
        for name, method in methods.items():
            visit.matrices[name].linear.method = method
        yield
    finally:
        for name, weight in before.items():
            visit.matrices[name].linear.weight = weight
        for name in methods:
            visit.matrices[name].linear.method = None


def rounded_scaled(matrix: Matrix, columns: Tensor, threads: int) -> Tensor:
    """The weights [n, k] that a matrix has in effect if its columns are scaled, then rounded to nearest with importance."""
    inputs, importance = matrix.inputs, None
    if importance_of(inputs) is not None:
        importance = (inputs.hessian.diagonal() / columns.square()).numpy()
    parts = []
    for part, w in matrix.parts.items():
        kind = matrix.kinds.get(part)
        plain = kind is None or kind in FLOATS
        parts.append(w if plain else nearest(w * columns, target(str(kind)), importance, threads)[1] / columns)
    return torch.cat(parts)


class AWQ:
    """Scales inputs down by a power of their mean |x|, and the weight columns up, for each scale mapping.

    The exponent with the least output error of the matrices after rounding is taken. Scales that do not lower the error of the
    layer's output, compared with rounding the same matrices unscaled, are left out.
    """

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def visit(self, visit: Visit) -> None:
        outputs: LayerOutputs | None = None
        folded = []
        for edge in visit.edges:
            best = self._best(visit, edge)
            if best is None:
                continue
            outputs = outputs or LayerOutputs(visit)
            s, scaled, plain = best
            if outputs.error(scaled) < outputs.error(plain):
                folded.append((edge, s))
        for edge, s in folded:
            visit.fold(edge, s)
        visit.extra["awq"] = [f"{edge.rule} {edge.producer}" for edge, _ in folded]

    def _best(self, visit: Visit, edge: ScaleMapping) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]] | None:
        """The best scales, and the consumers' weights in effect with and without them; None if 1 is best."""
        first = visit.matrices[edge.consumers[0]].inputs
        if importance_of(first) is None:
            return None
        mean = visit.shared(edge, first.mean).mean(1)
        tried: dict[int, tuple[float, Tensor, dict[str, Tensor]]] = {}

        def attempt(power: int) -> float:
            if power not in tried:
                s = mean.clamp_min(LEAST) ** (power / POWERS)
                s = s / (s.max() * s.min()).sqrt()
                weights = {
                    name: rounded_scaled(visit.matrices[name], visit.columns(edge, s), self._threads) for name in edge.consumers
                }
                error = sum(matrix_error(visit.matrices[name], weights[name]) for name in edge.consumers)
                tried[power] = error, s, weights
                for other in set(tried) - {0, min(tried, key=lambda one: tried[one][0])}:
                    tried[other] = (*tried[other][:2], {})
            return tried[power][0]

        best = min(range(0, POWERS, 2), key=attempt)
        best = min((one for one in (best, best - 1, best + 1) if 0 <= one < POWERS), key=attempt)
        return (*tried[best][1:], tried[0][2]) if best else None


def matrix_error(matrix: Matrix, weights: Tensor) -> float:
    """Mean squared change of the outputs of a matrix, summed over them, with other weights [n, k]."""
    change = weights - matrix.linear.weight
    return float(((change @ matrix.inputs.hessian) * change).sum(dtype=torch.float64))


class SmoothQuant:
    """Splits the range between inputs and weight columns, both by their maxima: s = |x|^alpha / |w|^(1-alpha).

    alpha 1 makes the largest input 1 and leaves the range to the columns; 0 is the opposite; 0.5 gives both the same maximum.
    None: of ALPHAS the one with the least error of the layer's output, inputs rounded to 8 bits and weights to their formats.
    static: one scale for all inputs of a matrix, otherwise one for each token.
    """

    def __init__(self, alpha: float | None = ALPHA, static: bool = False, threads: int = 1) -> None:
        self._alpha, self._static, self._threads = alpha, static, threads

    def visit(self, visit: Visit) -> None:
        alpha = self._best(visit) if self._alpha is None else self._alpha
        if self._alpha is None:
            visit.extra["alpha"] = alpha
        for edge in visit.edges:
            visit.fold(edge, self._scales(visit, edge, alpha))

    def _scales(self, visit: Visit, edge: ScaleMapping, alpha: float) -> Tensor:
        columns = torch.stack([visit.matrices[name].linear.weight.abs().amax(0) for name in edge.consumers]).amax(0)
        largest = visit.matrices[edge.consumers[0]].inputs.largest
        x, w = (visit.shared(edge, one).amax(1).clamp_min(TINY) for one in (largest, columns))
        return x**alpha / w ** (1 - alpha)

    def _best(self, visit: Visit) -> float:
        outputs = LayerOutputs(visit)
        return min(ALPHAS, key=lambda alpha: self._error(visit, outputs, alpha))

    def _error(self, visit: Visit, outputs: LayerOutputs, alpha: float) -> float:
        scales = {name: torch.ones(matrix.linear.n_in) for name, matrix in visit.matrices.items()}
        for edge in visit.edges:
            s = visit.columns(edge, self._scales(visit, edge, alpha))
            scales |= dict.fromkeys(edge.consumers, s)
        weights = {name: rounded_scaled(visit.matrices[name], s, self._threads) for name, s in scales.items()}
        methods = {name: RoundedInput(s, self._range(visit.matrices[name], s)) for name, s in scales.items()}
        return outputs.error(weights, methods)

    def _range(self, matrix: Matrix, s: Tensor) -> float:
        return float((matrix.inputs.largest / s).max()) if self._static else 0.0


class RoundedInput(InputObserver):
    """LinearMethod that divides inputs by scales s [k], rounds them to 8 bits and multiplies them by s again.

    largest: end of the range; 0: the largest absolute value of each row.
    """

    def __init__(self, s: Tensor, largest: float) -> None:
        super().__init__(lambda x: None)
        self._s, self._largest = s, largest

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        y = x / self._s
        step = (torch.full_like(y[:, :1], self._largest) if self._largest else y.abs().amax(-1, keepdim=True)) / 127
        step = step.clamp_min(torch.finfo(step.dtype).tiny)
        rounded = (y / step).round().clamp(-127, 127) * step
        return linear(rounded * self._s, layer.weight, bias)
