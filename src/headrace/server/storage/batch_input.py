"""Input file of a batch: one request per line. All lines are checked before the first row is inserted."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.server.http.batch_lines import BOM, LineError, read_batch_line, read_object, strip_line
from headrace.server.settings import Limits
from headrace.server.storage import files
from headrace.server.storage.store import Store
from headrace.server.storage.store_schema import ROW_OVERHEAD

# Errors in the report of a failed batch.
MAX_ERRORS = 20


class _Line(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


@dataclass(slots=True)
class InputCheck:
    """Check of one input file, piece by piece. Afterwards either `errors` is the report of a failed batch, or the batch has
    `count` rows that count for `size` bytes."""

    file: files.StoredFile
    endpoint: str
    limits: Limits
    size: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)
    _chunk: int = 0  # number of the last chunk that was read
    _partial_line: bytes = b""
    _line: int = 0  # number of the last line that was checked
    _custom_ids: set[str] = field(default_factory=set)

    @property
    def count(self) -> int:
        return len(self._custom_ids)

    async def run(self, store: Store) -> None:
        """Check all lines. Each piece has its own read transaction, so that other readers wait for one piece at most."""
        while not await store.read(self._step):
            pass
        if not self._custom_ids and not self.errors:
            self.errors = [_error("empty_file", "the file has no lines", None)]

    def _step(self, db: sqlite3.Connection) -> bool:
        """Check the lines that end in the next piece. Returns True after the last one, or if the report is full."""
        piece = files.read_piece(db, self.file, self._chunk)
        if piece is None:
            self._check(self._partial_line)
            return True
        self._chunk, data = piece
        *whole, rest = (self._partial_line + data).split(b"\n")
        # One byte more than allowed is enough to refuse a longer line.
        self._partial_line = rest[: self.limits.body + len(BOM) + 1]
        return any(self._check(line) for line in whole)

    def _check(self, line: bytes) -> bool:
        """Check one line. Returns whether the report is full."""
        self._line += 1
        if not (text := strip_line(line, self._line)):
            return False
        problem, custom_id, size = "", "", 0
        try:
            custom_id, size = _read(text, self.endpoint, self.limits.body)
        except LineError as error:
            problem = str(error)
        if not problem and custom_id in self._custom_ids:
            problem = f"custom_id {custom_id[:60]!r} is used twice"
        self._custom_ids.add(custom_id)
        if len(self._custom_ids) > self.limits.batch_lines:
            message = f"there are more than {self.limits.batch_lines} lines; split the file"
            self.errors = [_error("too_many_requests", message, None)]
            return True
        if problem:
            self.errors.append(_error("invalid_line", problem, self._line))
        self.size += size + ROW_OVERHEAD
        return len(self.errors) == MAX_ERRORS


def add_rows(db: sqlite3.Connection, batch: int, file: files.StoredFile, limits: Limits) -> None:
    """Insert one pending row for each line of a file that passed `InputCheck`."""
    query = "INSERT INTO rows (batch, custom_id, state, body) VALUES (?, ?, 'pending', ?)"
    db.executemany(query, ((batch, line.custom_id, bytes(line.body)) for line in _lines(db, file, limits)))


def _lines(db: sqlite3.Connection, file: files.StoredFile, limits: Limits) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    for number, line in enumerate(files.lines(db, file, limits.body + len(BOM)), 1):
        if text := strip_line(line, number):
            yield decoder.decode(text)


def _read(line: bytes, endpoint: str, longest: int) -> tuple[str, int]:
    """The custom_id of a line, and the size of its body in bytes. Raises LineError."""
    if len(line) > longest:
        raise LineError(f"it has more than {longest} bytes")
    read = read_batch_line(read_object(line), (endpoint,))
    if read.body.get("stream"):
        raise LineError("stream has no meaning in a batch; leave it out")
    return read.custom_id, len(msgspec.json.decode(line, type=_Line).body)


def _error(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "line": line, "param": None}
