"""Progress of a long operation: the protocol that libraries report to, its displays, and sizes and counts as text."""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

BYTES = "B"
EVERY = 0.1  # seconds between two drawings
PATIENCE = 10.0  # least seconds between two plain lines, unless the unit is bytes
WIDTH = 24  # of a bar, characters
SPINNER, FULL, EMPTY = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "━", "─"
PLAIN_SPINNER, PLAIN_FULL, PLAIN_EMPTY = "|/-\\", "#", "."  # if the terminal's encoding lacks the above


class Progress:
    """Receives the progress of one operation at a time: start, advance (repeated), finish. `note` adds a line at any time.

    This class ignores every call; the displays derive from it.
    """

    def start(self, what: str, total: int | None = None, done: int = 0, unit: str = BYTES) -> None:
        """Begin an operation named `what`; it replaces the one before.

        total: units of work, None if unknown. done: units finished by an earlier run. unit: BYTES, or a plural noun ("layers").
        """

    def advance(self, count: int, remark: str = "") -> None:
        """Add `count` finished units (negative: units to do again) and show `remark` next to them."""

    def finish(self) -> None:
        """End the operation, also after an error."""

    def note(self, line: str) -> None:
        """Print one line, such as a failed source or a wait."""


def amount(count: int, unit: str) -> str:
    """A count with its unit: "98.4 MB", "1 token", "1,024 tokens"."""
    return human_size(count) if unit == BYTES else counted(count, unit)


def counted(count: int, plural: str) -> str:
    """A count with its noun in singular or plural: "1 token", "2 tokens", "1 query"."""
    singular = f"{plural[:-3]}y" if plural.endswith("ies") else plural.removesuffix("s")
    return f"{count:,} {singular if count == 1 else plural}"


def threshold_text(value: float | tuple[float, ...]) -> str:
    """A threshold with four significant digits, or as many as distinguish it from 1. Several are joined by commas."""
    if isinstance(value, tuple):
        return ",".join(map(threshold_text, value))
    texts = (f"{value:.{digits}g}" for digits in (4, 6, 9, 17))
    return next(text for text in texts if value == 1 or float(text) != 1)


def human_size(nbytes: int | None) -> str:
    """Bytes in decimal units, as disks and the model hub count them: "98.4 MB"."""
    if nbytes is None:
        return "unknown size"
    if nbytes < 1000:
        return f"{nbytes} B"
    value = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        value /= 1000
        if value < 999.95:
            return f"{value:.1f} {unit}"
    return f"{value / 1000:.1f} TB"


class Lines(Progress):
    """Progress as plain lines: one at the start, one after each quarter (at most one in PATIENCE seconds, unless in bytes)."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._what, self._unit, self._total, self._done, self._reported = "", BYTES, 0, 0, 0
        self._when = 0.0

    def start(self, what: str, total: int | None = None, done: int = 0, unit: str = BYTES) -> None:
        again, self._what = what == self._what and not total, what
        self._unit, self._total, self._done, self._when = unit, total or 0, done, time.monotonic()
        self._reported = self._quarter()
        if not again:
            size = f" ({amount(total, unit)})" if total else ""
            self.note(f"{what}{size}" + (f", {amount(done, unit)} already here" if done else ""))

    def advance(self, count: int, remark: str = "") -> None:
        self._done += count
        if self._quarter() > self._reported and (self._unit == BYTES or time.monotonic() - self._when > PATIENCE):
            self._reported, self._when = self._quarter(), time.monotonic()
            self.note(f"{self._what}: {self._reported * 25} %" + (f", {remark}" if remark else ""))

    def finish(self) -> None:
        pass

    def note(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def _quarter(self) -> int:
        return 4 * self._done // self._total if self._total else 0


class Moving(Progress):
    """Progress as one line that is redrawn in place and erased at the end.

    A bar with the remaining time if the total is known, otherwise a spinner, which a daemon thread turns.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.RLock()
        self._what, self._unit, self._total, self._done, self._remark = "", BYTES, 0, 0, ""
        self._before = self._began = self._drawn = 0.0
        self._shown = False
        self._ended: threading.Event | None = None  # of the thread that turns the spinner
        self._signs = _signs(out)

    def start(self, what: str, total: int | None = None, done: int = 0, unit: str = BYTES) -> None:
        with self._lock:
            same = self._shown and not self._total and not total
            # A spinner that only changes its text keeps counting the same wait.
            self._began = self._began if same else time.monotonic()
            self._what, self._unit, self._total, self._done, self._before = what, unit, total or 0, done, done
            self._shown, self._remark = True, ""
            self._draw()
            if self._total:
                self._stop()
            elif self._ended is None:
                self._ended = threading.Event()
                threading.Thread(target=self._turn, args=(self._ended,), name="status", daemon=True).start()

    def advance(self, count: int, remark: str = "") -> None:
        with self._lock:
            self._done += count
            self._remark = remark
            if self._shown and time.monotonic() - self._drawn >= EVERY:
                self._draw()

    def finish(self) -> None:
        if not self._shown:
            return
        with self._lock:
            self._stop()
            self._shown = False
            self._write("")

    def note(self, line: str) -> None:
        with self._lock:
            self._write(line + "\n")
            if self._shown:
                self._draw()

    def _turn(self, ended: threading.Event) -> None:
        while not ended.wait(EVERY):
            with self._lock:
                if not ended.is_set():
                    self._draw()

    def _stop(self) -> None:
        if self._ended is not None:
            self._ended.set()
            self._ended = None

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        room = _columns(self._out) - 1
        self._write(self._line(self._drawn - self._began)[:room])

    def _line(self, seconds: float) -> str:
        spinner, full, empty = self._signs
        if not self._total:
            waited = f", {seconds:.0f} s" if seconds >= 1 else ""
            return f"{spinner[int(seconds / EVERY) % len(spinner)]} {self._what}{waited}"
        share = min(max(self._done / self._total, 0.0), 1.0)
        filled = int(share * WIDTH)
        parts = [f"{self._what} {full * filled}{empty * (WIDTH - filled)} {share:.0%} of {amount(self._total, self._unit)}"]
        if (made := self._done - self._before) > 0 and seconds >= 1:
            parts += [f"{human_size(int(made / seconds))}/s"] if self._unit == BYTES else []
            parts.append(f"{_clock((self._total - self._done) * seconds / made)} left")
        return ", ".join(parts + ([self._remark] if self._remark else []))

    def _write(self, text: str) -> None:
        self._out.write("\r\x1b[2K" + text)
        self._out.flush()


def for_stream(out: TextIO | None = None) -> Progress:
    """`Moving` if the stream (default: stderr) is a terminal, otherwise `Lines`."""
    out = out or sys.stderr
    return Moving(out) if out.isatty() else Lines(out)


def on_terminal() -> Progress:
    """`Moving` if stderr is a terminal, otherwise `Progress`, which shows nothing: the default of library calls."""
    return Moving(sys.stderr) if sys.stderr is not None and sys.stderr.isatty() else Progress()


@contextmanager
def waiting(progress: Progress, what: str) -> Iterator[None]:
    """Show `what` while the block runs."""
    progress.start(what)
    try:
        yield
    finally:
        progress.finish()


def _columns(out: TextIO) -> int:
    try:
        return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(out.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _signs(out: TextIO) -> tuple[str, str, str]:
    try:
        (SPINNER + FULL + EMPTY).encode(getattr(out, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return PLAIN_SPINNER, PLAIN_FULL, PLAIN_EMPTY
    return SPINNER, FULL, EMPTY


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}" if minutes >= 60 else f"{minutes}:{rest:02d}"
