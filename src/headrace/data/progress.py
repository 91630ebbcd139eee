"""Progress of a long operation: the protocol that libraries report to, and sizes and counts as text."""

from typing import Protocol

BYTES = "B"


class Progress(Protocol):
    """Told of one thing after another: start, advance … advance, finish; `note` is a line for the person."""

    def start(self, what: str, total: int | None = None, done: int = 0, unit: str = BYTES) -> None:
        """Something of `total` bytes, or of another unit in the plural (None: unknown), begins, `done` of them already here. It
        takes the place of what was before."""

    def advance(self, count: int, remark: str = "") -> None:
        """That many more are here (negative: that many are lost again). `remark` stands behind them."""

    def finish(self) -> None:
        """It is over, for better or worse."""

    def note(self, line: str) -> None:
        """A line worth reading: a source that failed, a wait."""


class Silent:
    """Tells nothing."""

    def start(self, what: str, total: int | None = None, done: int = 0, unit: str = BYTES) -> None:
        pass

    def advance(self, count: int, remark: str = "") -> None:
        pass

    def finish(self) -> None:
        pass

    def note(self, line: str) -> None:
        pass


def amount(count: int, unit: str) -> str:
    """A size in bytes, or so many of something: 1 token, 1,024 tokens."""
    return human_size(count) if unit == BYTES else counted(count, unit)


def counted(count: int, plural: str) -> str:
    """A number with its noun: 1 token, 2 tokens, 1 query."""
    singular = f"{plural[:-3]}y" if plural.endswith("ies") else plural.removesuffix("s")
    return f"{count:,} {singular if count == 1 else plural}"


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
