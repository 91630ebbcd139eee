"""Header of a GGUF file, read front to back: numbers, strings and arrays, each checked against the end of the file."""

import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from headrace.weights.source import WeightError

MAX_KEYS = 1 << 14  # real files have dozens
MAX_STRINGS = 1 << 22  # real vocabularies have at most half a million merges
MAX_KEY_BYTES = 65535

# Value types of the metadata.
SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
SCALAR_TYPES = {code: np.dtype(name) for code, name in SCALARS.items()}
BOOL, STRING, ARRAY = 7, 8, 9

_U64 = struct.Struct("<Q")


class StringArray(Sequence[str]):
    """An array of strings in the mapped file: indexing decodes one string, `tolist` all at once.

    Raises WeightError if the bytes are not UTF-8.
    """

    def __init__(self, data: memoryview, starts: "array[int]", where: str) -> None:
        self._data = data
        self._starts = starts  # starts of all strings, and one after the last; 8 bytes of length precede each
        self._where = where

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        try:
            return str(self._data[self._starts[i] : self._starts[i + 1] - 8], "utf-8")
        except UnicodeDecodeError:
            raise self._not_text() from None

    def __iter__(self) -> Iterator[str]:
        return iter(self.tolist())

    def tolist(self) -> list[str]:
        """All strings, about 0.1 µs each."""
        if not len(self):
            return []
        first = self._starts[0] - 8
        data = np.array(self._data[first : self._starts[-1] - 8])
        lengths = np.array(self._starts[:-1], np.int64) - 8 - first
        # The first of the 8 length bytes becomes a separator, the others are dropped.
        data[lengths] = 0
        kept = np.ones(len(data), bool)
        for byte in range(1, 8):
            kept[lengths + byte] = False
        try:
            _, *strings = data[kept].tobytes().decode().split("\0")
        except UnicodeDecodeError:
            raise self._not_text() from None
        # If the counts differ, some string holds zeros.
        return strings if len(strings) == len(self) else [self[i] for i in range(len(self))]

    def _not_text(self) -> WeightError:
        return WeightError(f"{self._where} holds text that is not UTF-8; the file is damaged")


class Cursor:
    """A position in the header. Every read past the end of the file raises WeightError."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data = data
        self.path = path
        self.pos = 0
        self.spans: dict[str, tuple[int, int]] = {}  # key -> first byte of its entry, and the byte after it

    def fail(self, what: str) -> WeightError:
        """A WeightError about this file."""
        return WeightError(f"{self.path}: {what}")

    def damaged(self, what: str) -> WeightError:
        """A WeightError about contents that no writer can have meant."""
        return self.fail(f"{what}; the file is truncated or damaged, download it again")

    def need(self, nbytes: int, what: str) -> None:
        """Raise WeightError unless `nbytes` bytes are left."""
        left = len(self.data) - self.pos
        if nbytes > left:
            raise self.damaged(f"{what} needs {nbytes} bytes and {left} are left")

    def number(self, fmt: str, what: str) -> int:
        """Read one integer of a struct format such as "<I"."""
        size = struct.calcsize(fmt)
        self.need(size, what)
        (value,) = struct.unpack_from(fmt, self.data, self.pos)
        self.pos += size
        return int(value)

    def text(self, what: str, limit: int | None = None) -> str:
        """Read a string: length in bytes, at most `limit`, then UTF-8."""
        size = self.number("<Q", what)
        if limit is not None and size > limit:
            raise self.damaged(f"{what} is {size} bytes long and {limit} is the most")
        self.need(size, what)
        raw = self.data[self.pos : self.pos + size]
        self.pos += size
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8 text") from None

    def metadata(self, count: int) -> dict[str, Any]:
        """Read `count` keys with their values."""
        if count > MAX_KEYS:
            raise self.damaged(f"the header claims {count} metadata keys and {MAX_KEYS} is the most")
        metadata: dict[str, Any] = {}
        for _ in range(count):
            start = self.pos
            key = self.text("a metadata key", MAX_KEY_BYTES)
            what = f"metadata key {quoted(key)}"
            if key in metadata:
                raise self.damaged(f"{what} appears twice")
            metadata[key] = self.value(what)
            self.spans[key] = start, self.pos
        return metadata

    def value(self, what: str) -> Any:
        """Read a typed value: int, float, bool, str, numpy array or StringArray."""
        code = self.number("<I", what)
        if code == STRING:
            return self.text(what)
        if code != ARRAY:
            return self.scalars(code, 1, what)[0].item()
        code = self.number("<I", what)
        count = self.number("<Q", what)
        if code == ARRAY:
            raise self.fail(f"{what} is an array of arrays, which no known model uses; convert the model again")
        return self.strings(count, what) if code == STRING else self.scalars(code, count, what)

    def scalars(self, code: int, count: int, what: str) -> np.ndarray:
        """`count` numbers as a read-only view of the file."""
        dtype = SCALAR_TYPES.get(code)
        if dtype is None:
            raise self.damaged(f"{what} has the unknown value type {code}")
        self.need(count * dtype.itemsize, what)
        values = np.frombuffer(self.data, np.dtype("u1") if code == BOOL else dtype, count, self.pos)
        self.pos += count * dtype.itemsize
        if code == BOOL and count and values.max() > 1:
            raise self.damaged(f"{what} is a boolean that is neither 0 nor 1")
        return values.view(dtype)

    def strings(self, count: int, what: str) -> StringArray:
        """Read string lengths without touching the text. This loop is most of the cost of opening a file."""
        if count > MAX_STRINGS:
            raise self.damaged(f"{what} claims {count} strings and {MAX_STRINGS} is the most")
        self.need(count * 8, what)
        data, pos, unpack = self.data, self.pos, _U64.unpack_from
        starts = array("Q")
        append = starts.append
        try:
            for _ in range(count):
                append(pos + 8)
                # The next unpack fails if this is past the end.
                pos += 8 + unpack(data, pos)[0]
            append(pos + 8)
        except (struct.error, OverflowError):
            pos = len(data) + 1
        if pos > len(data):
            raise self.damaged(f"{what} has a string that leaves the file")
        self.pos = pos
        return StringArray(data, starts, f"{self.path}: {what}")


def quoted(name: str) -> str:
    """A name from a file for use in a message: one line, no control characters, at most 80 characters."""
    return repr(name if len(name) <= 80 else name[:77] + "...")
