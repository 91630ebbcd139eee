"""Where the values of a segment are while it is lowered, and which buffers are free again."""

from headrace.backends.native.buffers import HEAD_ROWS, Buffers, Floats, Input, Normed
from headrace.runner.last_use import Uses
from headrace.runner.record import RecordError


class Values:
    """The place of each value, by its number; a buffer is given back once nobody reads what is in it."""

    def __init__(self, buffers: Buffers, uses: Uses) -> None:
        self.places: dict[int, Floats | Normed | Input] = {}
        self._buffers = buffers
        self._uses = uses
        self._held: dict[int, set[int]] = {}  # buffer -> values in it

    def put(self, value: int, place: Floats | Normed | Input) -> None:
        self.places[value] = place
        if isinstance(place, Floats | Input):
            self.hold(place.buffer, value)

    def hold(self, buffer: int, *values: int) -> None:
        """These values are in the buffer, too."""
        self._held.setdefault(buffer, set()).update(values)

    def rows(self, value: int) -> Floats:
        """A value as rows of floats. Raises RecordError where it was not kept so."""
        place = self.places[value]
        if not isinstance(place, Floats):
            raise RecordError("an op reads what the native core did not keep as rows")
        return place

    def fresh(self, value: int, width: int) -> Floats:
        """Rows for a value that is to be made."""
        rows = Floats(self._buffers.take("float", width), 0, width)
        self.put(value, rows)
        return rows

    def retire(self, index: int) -> None:
        """Give back buffers whose values nobody reads after this node."""
        for buffer, values in list(self._held.items()):
            if buffer > HEAD_ROWS and all(self._uses.last.get(value, -1) <= index for value in values):
                self._buffers.give(buffer)
                del self._held[buffer]
