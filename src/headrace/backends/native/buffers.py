"""Storage of a lowered program: reusable buffers, the places of values in them, and tables of rotary angles."""

from dataclasses import dataclass
from typing import Any

from headrace.runner.last_use import ValueUses
from headrace.runner.record import RecordError

# Buffers that every program has.
HIDDEN, HEAD_ROWS = 0, 1


@dataclass(frozen=True, slots=True)
class Floats:
    """A value in float columns of a buffer."""

    buffer: int
    column: int
    width: int

    @property
    def at(self) -> tuple[int, int]:
        return self.buffer, self.column


@dataclass(frozen=True, slots=True)
class Normed:
    """A normed value that is not stored: the phase that quantises it applies the norm to `rows`."""

    rows: Floats
    norm: Any  # _core.NormWeights


@dataclass(frozen=True, slots=True)
class Input:
    """A value that is stored only as the quantised input of linear layers."""

    buffer: int
    form: str


class Buffers:
    """Allocator of a program's buffers by kind and width. A released buffer is reused."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self._free: dict[tuple[Any, ...], list[int]] = {}
        self._keys: dict[int, tuple[Any, ...]] = {}

    def take(self, kind: str, width: int, local: bool = False, **more: bool) -> int:
        """A buffer for rows of `width` values. more: `shared`, for one that all ranks see."""
        key = (kind, width, local, *more)
        free = self._free.setdefault(key, [])
        number: int = free.pop() if free else self._program.buffer(kind, width, local, **more)
        self._keys[number] = key
        return number

    def give(self, number: int) -> None:
        self._free[self._keys.pop(number)].append(number)


class Ropes:
    """Tables of cos and sin for positions below `positions`, one per set of frequencies."""

    def __init__(self, program: Any, positions: int) -> None:
        self._program = program
        self.positions = positions
        self._numbers: dict[tuple[int, bool], int] = {}

    def number(self, rope: Any, grows: bool = False) -> int:
        """The table number of a Rotary in the program, -1 for None. Angles are computed in float64.

        grows: values grow with the position, for queries.
        """
        if rope is None:
            return -1
        key = id(rope), grows
        if key not in self._numbers:
            more = {} if rope.amplitude == 1.0 else {"amplitude": rope.amplitude}
            if grows:
                more |= {"growth": rope.growth, "length": rope.length}
            self._numbers[key] = self._program.rope(rope.frequencies.tolist(), self.positions, rope.interleaved, **more)
        return self._numbers[key]

    def of_queries(self, rope: Any, head_dim: int) -> dict[str, int]:
        """The table of queries that grow with the position, as an argument of attention; empty if it is that of the keys."""
        if rope is None or not rope.growth:
            return {}
        if rope.dim != head_dim:
            raise RecordError("the native core lets queries grow with the position only if rotation covers the whole head")
        return {"q_rope": self.number(rope, grows=True)}


class Values:
    """The place of each value by its number. A buffer is released after the last read of its values."""

    def __init__(self, buffers: Buffers, uses: ValueUses) -> None:
        self.places: dict[int, Floats | Normed | Input] = {}
        self._buffers = buffers
        self._uses = uses
        # Buffer -> its values.
        self._held: dict[int, set[int]] = {}

    def put(self, value: int, place: Floats | Normed | Input) -> None:
        self.places[value] = place
        if isinstance(place, Floats | Input):
            self.hold(place.buffer, value)

    def hold(self, buffer: int, *values: int) -> None:
        """Record that these values are in the buffer."""
        self._held.setdefault(buffer, set()).update(values)

    def rows(self, value: int) -> Floats:
        """The float rows of a value. Raises RecordError if it is not stored as rows."""
        place = self.places[value]
        if not isinstance(place, Floats):
            raise RecordError("an op reads a value that the native core does not keep as rows")
        return place

    def fresh(self, value: int, width: int) -> Floats:
        """Allocate float rows for a value."""
        rows = Floats(self._buffers.take("float", width), 0, width)
        self.put(value, rows)
        return rows

    def retire(self, index: int) -> None:
        """Release buffers whose values are not read after this node."""
        for buffer, values in list(self._held.items()):
            if buffer > HEAD_ROWS and all(self._uses.last.get(value, -1) <= index for value in values):
                self._buffers.give(buffer)
                del self._held[buffer]
