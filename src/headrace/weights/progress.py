"""What a download tells the person who waits for it: a bar on a terminal, a few plain lines elsewhere, or nothing."""

import sys
from typing import Protocol, TextIO

from rich import progress
from rich.console import Console


class Progress(Protocol):
    """Told of one file after another: start, advance … advance, finish; `note` is a line for the person."""

    def start(self, what: str, total: int | None, done: int = 0) -> None:
        """A file of `total` bytes (None: unknown) begins, `done` of them already here."""

    def advance(self, nbytes: int) -> None:
        """That many more bytes are here (negative: that many are lost again)."""

    def finish(self) -> None:
        """The file is over, for better or worse."""

    def note(self, line: str) -> None:
        """A line worth reading: a source that failed, a wait."""


class Silent:
    """Tells nothing."""

    def start(self, what: str, total: int | None, done: int = 0) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def note(self, line: str) -> None:
        pass


class Lines:
    """Plain lines: one when a file begins, one every quarter."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._what, self._total, self._done, self._said = "", 0, 0, 0

    def start(self, what: str, total: int | None, done: int = 0) -> None:
        self._what, self._total, self._done = what, total or 0, done
        self._said = self._quarter()
        size = f" ({human_size(total)})" if total else ""
        self.note(f"{what}{size}" + (f", {human_size(done)} already here" if done else ""))

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._quarter() > self._said:
            self._said = self._quarter()
            self.note(f"{self._what}: {self._said * 25} %")

    def finish(self) -> None:
        pass

    def note(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def _quarter(self) -> int:
        return 4 * self._done // self._total if self._total else 0


class Bar:
    """A bar with size, speed and time left, through rich."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out)
        self._bar: progress.Progress | None = None

    def start(self, what: str, total: int | None, done: int = 0) -> None:
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(bar_width=None),
            progress.DownloadColumn(),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )
        self._bar.add_task(what, total=total, completed=done)
        self._bar.start()

    def advance(self, nbytes: int) -> None:
        if self._bar:
            self._bar.advance(self._bar.task_ids[0], nbytes)

    def finish(self) -> None:
        if self._bar:
            self._bar.stop()
        self._bar = None

    def note(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def for_stream(out: TextIO | None = None) -> Progress:
    """The progress that suits the stream (default: stderr): a bar on a terminal, plain lines elsewhere."""
    out = out or sys.stderr
    return Bar(out) if out.isatty() else Lines(out)


def human_size(nbytes: int | None) -> str:
    """Bytes in decimal units, as disks and hubs count them: 98.4 MB."""
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
