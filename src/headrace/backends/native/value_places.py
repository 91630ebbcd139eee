"""Places of the values of a segment while it is lowered, and the buffers that become free."""

from headrace.backends.native.buffers import HEAD_ROWS, Buffers, Floats, Input, Normed
from headrace.runner.last_use import ValueUses
from headrace.runner.record import RecordError


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
            raise RecordError("an op reads what the native core did not keep as rows")
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
