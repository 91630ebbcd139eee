"""Progress of a long operation: the protocol that libraries report to, and sizes and counts as text."""

from typing import Protocol

BYTES = "B"


class Progress(Protocol):
    """Receives the progress of one operation at a time: start, advance (repeated), finish. `note` adds a line at any time."""

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


class Silent:
    """Progress that ignores every call."""

    def start(self, what: str, total: int | None = None, done: int = 0, unit: str = BYTES) -> None:
        pass

    def advance(self, count: int, remark: str = "") -> None:
        pass

    def finish(self) -> None:
        pass

    def note(self, line: str) -> None:
        pass


def amount(count: int, unit: str) -> str:
    """A count with its unit: "98.4 MB", "1 token", "1,024 tokens"."""
    return human_size(count) if unit == BYTES else counted(count, unit)


def counted(count: int, plural: str) -> str:
    """A count with its noun in singular or plural: "1 token", "2 tokens", "1 query"."""
    singular = f"{plural[:-3]}y" if plural.endswith("ies") else plural.removesuffix("s")
    return f"{count:,} {singular if count == 1 else plural}"


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
