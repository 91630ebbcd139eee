"""Mixed precision: choose a format for each matrix so that all tensors fit a byte budget and outputs change least.

A pass over the unchanged model measures the output error of each part in each format of a ladder. Then, starting from the
fewest bits, the greedy step with the largest error reduction per byte is taken while the budget allows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headrace.compress.base import Visit
from headrace.compress.grids.spec import integers_named
from headrace.compress.grids.targets import nearest, target
from headrace.compress.least_squares import output_error
from headrace.compress.rounding import importance_of
from headrace.weights.kinds import KINDS
from headrace.weights.schemes.small_floats import GROUPS

LADDERS = (
    ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q8_0"),
    ("Q4_0", "Q5_0", "Q8_0"),
)  # for rows of whole super-blocks, and for others
ROWS = 64  # sampled rows of each part, evenly spread
Ladder = Callable[[int], Sequence[str]]  # row width -> formats with increasing bits


def gguf_ladder(width: int) -> tuple[str, ...]:
    """GGUF kinds for rows of `width` numbers; empty if rows are not whole blocks."""
    return next((kinds for kinds in LADDERS if width % KINDS[kinds[0]].block == 0), ())


def integer_ladder(name: str) -> Ladder:
    """Integer formats of folders from `name` up: finer groups, then 8 bits. Raises ValueError if there is none above."""
    if name in GROUPS:
        raise ValueError(f"--budget chooses between integers of 4 and 8 bits, and {name} has none: start with int4-g128")
    first = integers_named(name)
    if first.bits == 8:
        raise ValueError(f"--budget chooses between 4 and 8 bits, and {name} has 8: begin with int4-g128, or leave it out")
    finer = () if first.group == 32 else ("int4-g32-sym" if first.symmetric else "int4-g32",)
    steps = [(one, integers_named(one)) for one in (name, *finer, "int8")]
    return lambda width: [one for one, integers in steps if integers.fits(width)]


class Sensitivity:
    """A method that changes nothing: measures the relative output error of each part in each format of a ladder."""

    def __init__(self, ladder: Ladder, threads: int = 1) -> None:
        self._ladder, self._threads = ladder, threads

    def visit(self, visit: Visit) -> None:
        errors: dict[str, dict[str, float]] = {}  # by target
        for matrix in visit.matrices.values():
            importance = importance_of(matrix.inputs)
            for part, whole in matrix.parts.items():
                w = whole[:: max(1, len(whole) // ROWS)].contiguous()
                squares = output_error(w, matrix.inputs.hessian) or 1.0
                for name in self._ladder(w.shape[1]):
                    _, values = nearest(w, target(name), importance, self._threads)
                    error = output_error(values - w, matrix.inputs.hessian) / squares
                    errors.setdefault(matrix.target(part), {})[name] = error
        visit.extra["errors"] = errors


@dataclass(frozen=True, slots=True)
class Rung:
    """A format of a matrix: its relative output error and its bytes."""

    name: str
    error: float
    nbytes: int


def choose_formats(ladders: Mapping[str, Sequence[Rung]], fixed: int, budget: int) -> dict[str, str]:
    """Format of each matrix, within `budget` bytes of which all other tensors take `fixed`. ladders: formats with increasing
    bits.

    Raises ValueError if the smallest formats exceed the budget.
    """
    place_of = dict.fromkeys(ladders, 0)
    fewest = fixed + sum(rungs[0].nbytes for rungs in ladders.values())
    check_budget(fewest, budget)
    left = budget - fewest
    while steps := [step for name, rungs in ladders.items() if (step := _next(name, rungs, place_of[name], left)) is not None]:
        step = max(steps, key=lambda step: (step.gain / step.nbytes, step.name))
        place_of[step.name] = step.to
        left -= step.nbytes
    return {name: ladders[name][place].name for name, place in place_of.items()}


def check_budget(fewest: int, budget: int) -> None:
    """Raise ValueError if the smallest size exceeds the budget."""
    if fewest > budget:
        raise ValueError(
            f"{budget:,} bytes are too few: with the fewest bits all tensors take {fewest:,}; give more, or another --head"
        )


@dataclass(frozen=True, slots=True)
class _Step:
    name: str
    to: int
    gain: float
    nbytes: int


def _next(name: str, rungs: Sequence[Rung], at: int, left: int) -> _Step | None:
    """The step up with the largest error reduction per byte that fits into `left` bytes."""
    now = rungs[at]
    steps = [
        _Step(name, to, now.error - rung.error, rung.nbytes - now.nbytes)
        for to, rung in enumerate(rungs)
        if to > at and 0 < rung.nbytes - now.nbytes <= left and now.error > rung.error
    ]
    return max(steps, key=lambda step: step.gain / step.nbytes, default=None)
