"""Result of a measurement: figures for a JSON file, tables for the terminal, curves for an SVG file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a printed table.

    value: format string of the row's keys, or of the row itself as {0}; or a function of the row, whose None is an empty cell.
    """

    head: str
    value: str | Callable[[Any], Any]

    def cell(self, row: Any) -> str:
        """Text of a row's cell."""
        if isinstance(self.value, str):
            return self.value.format(row, **(row if isinstance(row, Mapping) else {}))
        value = self.value(row)
        return "" if value is None else str(value)


def percent(share: float | None) -> str:
    """Text of a share, 0 to 1; empty if it is None."""
    return "" if share is None else f"{share:.1%}"


@dataclass(frozen=True, slots=True)
class Table:
    """Columns and the rows that they read. A `transposed` table prints each column as a row."""

    columns: Sequence[Column]
    rows: Iterable[Any]
    transposed: bool = False

    def cells(self) -> list[list[str]]:
        """Text of all rows, the heads first."""
        body = [[column.cell(row) for column in self.columns] for row in self.rows]
        cells = [[column.head for column in self.columns], *body]
        return [list(column) for column in zip(*cells, strict=True)] if self.transposed else cells


@dataclass(frozen=True, slots=True)
class Line:
    """A curve: its name, and points in ascending x. Predictions are `dashed`."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """Curves over two axes. `subject`: the model that was measured."""

    title: str
    x_name: str
    y_name: str
    lines: Sequence[Line]
    subject: str


@dataclass(frozen=True, slots=True)
class Measurement:
    """Return value of a measuring command.

    figures: content of the JSON file. printed: tables and lines in the order of the output.
    """

    figures: Any
    printed: Sequence[Table | str] = ()
    plot: Plot | None = None
    exit_code: int = 0


def named(figures: Mapping[str, Mapping[str, Any]], head: str = "name") -> list[dict[str, Any]]:
    """Rows of a table from figures by name; the name is the value of `head`."""
    return [{head: name, **values} for name, values in figures.items()]
