"""Mixed bits: which matrix gets which kind, so that all tensors fit into a number of bytes and the outputs change least.

On a walk through the unchanged model each part of a matrix is rounded to every kind of a ladder, and the error of its outputs
is measured. Then, from the fewest bits up, the step that takes most error away for its bytes is taken, while there is room.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from headrace.compress.base import Visit
from headrace.compress.rounding import importance_of
from headrace.quant.encode import encode
from headrace.quant.hessian import output_error
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import KINDS
from headrace.weights.source import TensorInfo

LADDERS = (
    ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"),
    ("Q4_0", "Q5_0", "Q8_0"),
)  # for rows of whole super-blocks, and others
ROWS = 64  # of each part that are rounded, evenly spread


def ladder(width: int) -> tuple[str, ...]:
    """Kinds for rows of `width` numbers, with ever more bits; none where rows are no whole blocks."""
    return next((kinds for kinds in LADDERS if width % KINDS[kinds[0]].block == 0), ())


class Sensitivity:
    """A method that changes nothing: what rounding to each kind of its ladder does to a part's outputs, over their squares."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads

    def visit(self, visit: Visit) -> None:
        errors: dict[str, dict[str, float]] = {}  # by target
        for matrix in visit.matrices.values():
            importance = importance_of(matrix.inputs)
            for part, whole in matrix.parts.items():
                w = whole[:: max(1, len(whole) // ROWS)].contiguous()
                squares = output_error(w, matrix.inputs.hessian) or 1.0
                for kind in ladder(w.shape[1]):
                    rows = encode(w.numpy(), kind, importance, self._threads)
                    values = torch.from_numpy(dequantize_numpy(rows.reshape(-1), kind).reshape(w.shape))
                    error = output_error(values - w, matrix.inputs.hessian) / squares
                    errors.setdefault(matrix.target(part), {})[kind] = error
        visit.extra["errors"] = errors


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    kind: str
    gain: float
    nbytes: int


def chosen(
    tensors: Sequence[TensorInfo], targets: Mapping[str, Iterable[str]], errors: Mapping[str, Mapping[str, float]], budget: int
) -> list[TensorInfo]:
    """The tensors with the kinds that the budget allows. `targets`: the parts of a tensor.

    A matrix's error counts by its share of what was measured. Raises ValueError where the fewest bits are too many.
    """
    made, rungs = {info.name: info for info in tensors}, {}
    for info in tensors:
        parts = list(targets.get(info.name, ()))
        kinds = ladder(info.shape[-1]) if parts and all(part in errors for part in parts) else ()
        if kinds:
            rungs[info.name] = {kind: sum(errors[part][kind] for part in parts) for kind in kinds}
            made[info.name] = _as(info, kinds[0])
    left = budget - sum(info.nbytes for info in made.values())
    if left < 0:
        raise ValueError(
            f"{budget:,} bytes are too few: with the fewest bits all tensors take {budget - left:,}; give more, "
            "or another --head"
        )
    while steps := [step for info in made.values() if (step := _next(info, rungs.get(info.name, {}), left)) is not None]:
        step = max(steps, key=lambda step: (step.gain / step.nbytes, step.name))
        made[step.name] = _as(made[step.name], step.kind)
        left -= step.nbytes
    return [made[info.name] for info in tensors]


def _next(info: TensorInfo, errors: Mapping[str, float], left: int) -> _Step | None:
    """The way up from a kind that takes most error away for its bytes, among those there is room for."""
    kinds = list(errors)
    higher = kinds[kinds.index(info.kind) + 1 :] if errors else []
    steps = [
        _Step(info.name, kind, errors[info.kind] - errors[kind], nbytes)
        for kind in higher
        if 0 < (nbytes := _as(info, kind).nbytes - info.nbytes) <= left and errors[info.kind] > errors[kind]
    ]
    return max(steps, key=lambda step: step.gain / step.nbytes, default=None)


def _as(info: TensorInfo, kind: str) -> TensorInfo:
    block, nbytes = KINDS[kind]
    return replace(info, kind=kind, nbytes=prod(info.shape) // block * nbytes)
