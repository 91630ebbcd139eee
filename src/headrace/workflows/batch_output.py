"""Output file of an offline batch: grows by whole lines and can be continued after a kill.

OUT.state next to OUT records the origin of the output: the input's SHA-256, the model, the settings. The records in OUT name
the requests that are done.
"""

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace import host

STATE_SUFFIX = ".state"
RequestId = str | int


@dataclass(slots=True)
class BatchOutput:
    """The output file of one batch, written by one process at a time.

    origin: what OUT.state records. total: requests of the input. done: ids of the requests with a record; `failed` of them
    have an error. Call `read_existing`, `lock` and `start` in this order, then `append`.
    """

    path: Path
    origin: Mapping[str, Any]
    total: int = 0
    done: set[RequestId] = field(default_factory=set)
    failed: int = 0
    _size: int = 0  # bytes of the whole lines that are kept
    _seen: int = 0  # bytes of the file when it was read
    _file: int = -1  # file descriptor

    @classmethod
    def of(cls, source: Path, target: Path, model: Path, settings: Mapping[str, Any]) -> "BatchOutput":
        """Return the output of the requests in `source`, which is read once. Raises ValueError if it cannot be read again."""
        if not source.is_file():
            raise ValueError(f"{source} is not a file; the input is read more than once, so it cannot be a pipe")
        digest, lines = hashlib.sha256(), 0
        with source.open("rb") as file:
            for line in file:
                digest.update(line)
                lines += bool(line.strip())
        return cls(target, {"input": digest.hexdigest(), "model": str(model.resolve()), "settings": settings}, lines)

    @property
    def complete(self) -> bool:
        return len(self.done) >= self.total

    def read_existing(self, overwrite: bool = False) -> None:
        """Read the records that exist, or with `overwrite` none, so that `start` empties the file; changes nothing yet.

        Raises ValueError if the file has another origin.
        """
        if self.path.exists() and not self.path.is_file():
            raise ValueError(f"{self.path} is not a file; name a file for the output")
        if not self.path.parent.is_dir():
            raise ValueError(f"the folder {self.path.parent} of the output does not exist; create it first")
        self._seen = self.path.stat().st_size if self.path.exists() else 0
        if overwrite or not self._seen:
            return
        self._check_origin()
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                # A kill can tear the last line; its request is done again.
                if not line.endswith(b"\n"):
                    break
                self._read_record(line, number)
                self._size += len(line)

    def lock(self) -> None:
        """Open the file for appending, for this process alone, and create it if missing; changes nothing in it. Raises
        ValueError."""
        if not os.access(self._state if self._state.exists() else self.path.parent, os.W_OK):
            raise ValueError(f"{self._state} cannot be written; name an output elsewhere")
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._write_error(error) from None
        try:
            busy = not host.lock(self._file) or os.fstat(self._file).st_size != self._seen
        except OSError:
            busy = True
        if busy:
            self.close()
            raise ValueError(f"another process is writing {self.path}; wait for it, or name another output")

    def start(self) -> None:
        """Truncate the file to the lines that were read, and write OUT.state. Raises ValueError.

        This drops a line that a kill has torn, and with `overwrite` all lines.
        """
        try:
            os.ftruncate(self._file, self._size)
            self._write_state()
        except OSError as error:
            self.close()
            if not self._size:
                self.path.unlink(missing_ok=True)
            raise self._write_error(error) from None

    def remove_if_empty(self) -> None:
        """Remove a file that this process created and that has no line, with its OUT.state."""
        if self._file >= 0 and not self._size and not self._seen:
            self.path.unlink(missing_ok=True)
            self._state.unlink(missing_ok=True)

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one record, whole or not at all. Raises ValueError if the disk is full."""
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise self._write_error(error) from None
        self._size += len(data)
        self.done.add(record["id"])
        self.failed += record["error"] is not None

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    @property
    def _state(self) -> Path:
        return self.path.with_name(self.path.name + STATE_SUFFIX)

    def _check_origin(self) -> None:
        """Raises ValueError unless the file has the same input, model and settings."""
        try:
            before = json.loads(self._state.read_text("utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} exists and was not written by this command; remove it, or name another output"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{self._state} cannot be read ({error}); --overwrite starts again") from None
        changed = [name for name, value in self.origin.items() if before.get(name) != value]
        if changed:
            raise ValueError(
                f"{self.path} was started with different {' and '.join(changed)}; "
                "name another file, or start again with --overwrite"
            )

    def _read_record(self, line: bytes, number: int) -> None:
        try:
            record = json.loads(line)
            self.done.add(record["id"])
            self.failed += record["error"] is not None
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"line {number} of {self.path} is not from this command; --overwrite starts again") from None

    def _write_state(self) -> None:
        """Replace OUT.state atomically."""
        draft = self._state.with_name(self._state.name + ".new")
        try:
            draft.write_text(json.dumps(dict(self.origin), ensure_ascii=False, indent=2) + "\n", "utf-8")
            draft.replace(self._state)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _write_error(self, error: OSError) -> ValueError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return ValueError(f"the disk of {self.path.parent} is full; free some space, then the same command continues")
        return ValueError(f"{self.path} cannot be written ({error.strerror or error})")
