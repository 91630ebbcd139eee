"""The output of `generate`: a file that grows by whole lines, and what is needed to go on with it after a kill.

Beside OUT lies OUT.state with what OUT is made from: the input's SHA-256, the model, the settings. OUT itself says which
lines are done.
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
from headrace.cli.batch_lines import Id

STATE = ".state"


class OutputError(ValueError):
    """The output cannot be begun, or not be gone on with; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Input:
    """What an input file was when it was read: hash and number of lines that are not blank."""

    sha256: str
    lines: int


def survey(path: Path) -> Input:
    """Read the whole file once. Raises OutputError for what cannot be read twice."""
    if not path.is_file():
        raise OutputError(f"{path} is no file; the input is read more than once, so it cannot be a pipe")
    digest, lines = hashlib.sha256(), 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            lines += bool(line.strip())
    return Input(digest.hexdigest(), lines)


@dataclass(slots=True)
class BatchOutput:
    """The file and what is in it. `done`: ids of the lines that are answered; `failed`: how many of them with an error."""

    path: Path
    made_from: Mapping[str, Any]
    done: set[Id] = field(default_factory=set)
    failed: int = 0
    _size: int = 0  # bytes of whole lines
    _seen: int = 0  # bytes there were when we looked
    _file: int = -1

    def look(self, overwrite: bool = False) -> None:
        """Read what is there, changing nothing. Raises OutputError where it belongs to something else."""
        if self.path.exists() and not self.path.is_file():
            raise OutputError(f"{self.path} is no file; name one for the output")
        if not self.path.parent.is_dir():
            raise OutputError(f"there is no folder {self.path.parent} for the output; make it first")
        self._seen = self.path.stat().st_size if self.path.exists() else 0
        if overwrite or not self._seen:
            return
        self._compare()
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):  # torn by a kill; it is done again
                    break
                self._take_in(line, number)
                self._size += len(line)

    def claim(self) -> None:
        """Open the file for the lines to come, for this process alone; nothing in it changes. Raises OutputError."""
        if not os.access(self._state if self._state.exists() else self.path.parent, os.W_OK):
            raise OutputError(f"{self._state} cannot be written; name an output elsewhere")
        try:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise self._clear(error) from None
        try:
            busy = not host.lock(self._file) or os.fstat(self._file).st_size != self._seen
        except OSError:
            busy = True
        if busy:
            self.close()
            raise OutputError(f"another process is writing {self.path}; wait for it, or name another output")

    def begin(self) -> None:
        """Make the file ready for the lines to come: a torn last line goes. Raises OutputError."""
        try:
            os.ftruncate(self._file, self._size)
            self._write_state()
        except OSError as error:
            self.close()
            if not self._size:
                self.path.unlink(missing_ok=True)
            raise self._clear(error) from None

    def drop_unused(self) -> None:
        """A file that was not there before and has no line goes, with its state."""
        if self._file >= 0 and not self._size and not self._seen:
            self.path.unlink(missing_ok=True)
            self._state.unlink(missing_ok=True)

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line, whole or not at all. Raises OutputError when the disk is full."""
        data = json.dumps(record, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
        try:
            written = 0
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            os.ftruncate(self._file, self._size)
            raise self._clear(error) from None
        self._size += len(data)
        self.done.add(record["id"])
        self.failed += record["error"] is not None

    def close(self) -> None:
        """Let the file go. Raises nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    @property
    def _state(self) -> Path:
        return self.path.with_name(self.path.name + STATE)

    def _compare(self) -> None:
        """Raises OutputError unless the file there was begun from the same input, model and settings."""
        try:
            before = json.loads(self._state.read_text("utf-8"))
        except FileNotFoundError:
            raise OutputError(f"{self.path} is there and not from this command; remove it, or name another output") from None
        except (OSError, ValueError) as error:
            raise OutputError(f"{self._state} cannot be read ({error}); --overwrite begins anew") from None
        changed = [name for name, value in self.made_from.items() if before.get(name) != value]
        if changed:
            raise OutputError(
                f"{self.path} was begun with different {' and '.join(changed)}; name another, or begin anew with --overwrite"
            )

    def _take_in(self, line: bytes, number: int) -> None:
        try:
            record = json.loads(line)
            self.done.add(record["id"])
            self.failed += record["error"] is not None
        except (ValueError, KeyError, TypeError):
            raise OutputError(f"line {number} of {self.path} is not from this command; --overwrite begins anew") from None

    def _write_state(self) -> None:
        """Atomic: the state there is always a whole one."""
        draft = self._state.with_name(self._state.name + ".new")
        try:
            draft.write_text(json.dumps(dict(self.made_from), ensure_ascii=False, indent=2) + "\n", "utf-8")
            draft.replace(self._state)
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _clear(self, error: OSError) -> OutputError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return OutputError(f"the disk of {self.path.parent} is full; free some space, then the same command goes on")
        return OutputError(f"{self.path} cannot be written ({error.strerror or error})")
