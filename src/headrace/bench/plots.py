"""Small SVG plots of lines and numbered points, for light and dark colour schemes, with machine and date.

`document` puts tables, plots and all figures in one HTML page, which loads nothing from other hosts.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from typing import Any

import numpy as np

import headrace
from headrace.bench.figures import Line
from headrace.bench.machine import commit, machine

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 52, 62
LIGHT = ("#0b7285", "#6741a8", "#b35c00", "#2b8a3e", "#c02b37", "#566067")
DARK = ("#4cc2d4", "#b197fc", "#ffa94d", "#69db7c", "#ff8787", "#adb5bd")
# Points of a distribution curve.
POINTS = 200
# Lines with at most this many points get a mark on each.
MARKED = 20
PAGE_STYLE = """
:root { color-scheme: light dark; --text: #1c2327; --ground: #fff; --line: #d9dedb }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9e8; --ground: #16191b; --line: #3a4043 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); max-width: 75rem; margin: 2rem auto;
  padding: 0 1rem }
table { border-collapse: collapse; font-size: .85em; margin-bottom: 1rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .5rem; text-align: right;
  white-space: nowrap; border-bottom: 1px solid var(--line) } th:first-child, td:first-child { text-align: left }
.wide { overflow-x: auto } .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(28rem, 1fr)); gap: 1rem }
svg { width: 100%; height: auto } pre { overflow-x: auto; font-size: 12px }
"""
# Content security policy: the page loads and runs nothing.
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def _style(hues: Sequence[str], ground: str, text: str, grid: str) -> str:
    lines = "".join(f" .h{number} {{ stroke: {hue}; fill: {hue} }}" for number, hue in enumerate(hues))
    return f".ground {{ fill: {ground} }} text {{ fill: {text} }} .grid {{ stroke: {grid} }}{lines}"


STYLE = (
    "text { font: 12px system-ui, sans-serif } .about { font-size: 10px } path { stroke-width: 2 } path.line { fill: none } "
    + _style(LIGHT, "#fff", "#1c2327", "#d9dedb")
    + " @media (prefers-color-scheme: dark) { "
    + _style(DARK, "#16191b", "#e6e9e8", "#3a4043")
    + " }"
)


@dataclass(frozen=True, slots=True)
class Axis:
    """Axis from `low` to `high`, linear or logarithmic."""

    name: str
    low: float
    high: float
    log: bool = False

    @classmethod
    def of(cls, name: str, values: Sequence[float], log: bool = False) -> "Axis":
        """Axis of these values: from 0 to a round number, or for `log` from the least to the greatest with a margin."""
        if log:
            return cls(name, min(values) / 1.3, max(values) * 1.3, True)
        return cls(name, 0.0, _round_up(max(values, default=1.0)))

    def at(self, value: float) -> float:
        """Position of a value on the axis, 0 to 1."""
        if self.log:
            return float(np.log(value / self.low) / np.log(self.high / self.low))
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[tuple[float, str]]:
        """Positions (0 to 1) and texts of the axis labels."""
        if not self.log:
            return [(step / 5, f"{step / 5 * self.high:g}") for step in range(6)]
        first, last = (int(np.floor(np.log10(value))) for value in (self.low, self.high))
        values = [digit * 10.0**power for power in range(first, last + 1) for digit in (1, 2, 5)]
        return [(self.at(value), f"{value:g}") for value in values if self.low <= value <= self.high]


@dataclass(frozen=True, slots=True)
class Point:
    """A numbered mark."""

    number: int
    x: float
    y: float


def about(model: str) -> str:
    """Subtitle of a plot: model, machine, date, version."""
    here = machine()
    version = f"Headrace {headrace.__version__}" + (f" ({revision})" if (revision := commit()) else "")
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{model} · {here['cpu']}, {here['cores']} cores · {day} · {version}"


def distribution(values: dict[str, Sequence[float]]) -> list[Line]:
    """Cumulative distributions: share of values (percent) over the value in ms, from values in seconds."""
    shares = np.linspace(0, 100, POINTS)
    return [
        Line(name, (np.percentile(seconds, shares) * 1000).tolist(), shares.tolist())
        for name, seconds in values.items()
        if seconds
    ]


def draw(title: str, x_name: str, y_name: str, lines: Sequence[Line], remark: str = "") -> str:
    """SVG of lines over axes from 0; lines of the same name share a colour. remark: subtitle (`about`)."""
    x = Axis.of(x_name, [max(line.x) for line in lines])
    y = Axis.of(y_name, [max(line.y) for line in lines])
    names = list(dict.fromkeys(line.name for line in lines))
    parts = [_frame(title, x, y, remark)]
    for line in lines:
        parts += _drawn(line, names.index(line.name) % len(LIGHT), x, y)
    for number, name in enumerate(names):
        place = LEFT + number * (WIDTH - LEFT) / max(len(names), 4)
        parts.append(f'<rect class="h{number % len(LIGHT)}" x="{place:.0f}" y="{HEIGHT - 16}" width="12" height="4"/>')
        parts.append(f'<text x="{place + 17:.0f}" y="{HEIGHT - 10}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def scatter(title: str, x: Axis, y: Axis, points: Sequence[Point], lines: Sequence[Line] = (), remark: str = "") -> str:
    """SVG of numbered points and of lines, which carry their name in the middle."""
    parts = [_frame(title, x, y, remark)]
    for line in lines:
        parts += _drawn(line, len(LIGHT) - 1, x, y)
        middle = len(line.x) // 2
        left, top = _place(line.x[middle], line.y[middle], x, y)
        if line.name:
            parts.append(f'<text x="{left + 8:.1f}" y="{top - 4:.1f}">{escape(line.name)}</text>')
    for point in points:
        hue = (point.number - 1) % len(LIGHT)
        left, top = _place(point.x, point.y, x, y)
        parts.append(f'<circle class="h{hue}" cx="{left:.1f}" cy="{top:.1f}" r="4"/>')
        parts.append(f'<text x="{left + 6:.1f}" y="{top - 5:.1f}" font-weight="600">{point.number}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _place(x_value: float, y_value: float, x: Axis, y: Axis) -> tuple[float, float]:
    return LEFT + x.at(x_value) * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y.at(y_value) * (HEIGHT - TOP - BOTTOM)


def _drawn(line: Line, hue: int, x: Axis, y: Axis) -> list[str]:
    """SVG elements of a line, with marks if it has few points."""
    points = [_place(*point, x, y) for point in zip(line.x, line.y, strict=True)]
    dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts = [f'<path class="line h{hue}"{dashes} d="M{"L".join(f"{left:.1f} {top:.1f}" for left, top in points)}"/>']
    if len(points) <= MARKED and not line.dashed:
        parts += [f'<circle class="h{hue}" cx="{left:.1f}" cy="{top:.1f}" r="3.5"/>' for left, top in points]
    return parts


def _frame(title: str, x: Axis, y: Axis, remark: str) -> str:
    """Beginning of the SVG: background, title, axes with labels, grid."""
    middle, height = (LEFT + WIDTH - RIGHT) / 2, HEIGHT / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>',
        f'<title>{escape(title)}</title><rect class="ground" width="100%" height="100%"/>',
        f'<text x="{LEFT}" y="20" font-weight="600">{escape(title)}</text>',
        f'<text class="about" x="{LEFT}" y="37">{escape(remark)}</text>',
        f'<text x="{middle:.0f}" y="{HEIGHT - BOTTOM + 36}" text-anchor="middle">{escape(x.name)}</text>',
        f'<text x="16" y="{height:.0f}" text-anchor="middle" transform="rotate(-90 16 {height:.0f})">{escape(y.name)}</text>',
    ]
    for share, label in y.ticks():
        top = HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{label}</text>')
    for share, label in x.ticks():
        left = LEFT + share * (WIDTH - LEFT - RIGHT)
        parts.append(f'<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    return "\n".join(parts)


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    power = 10 ** np.floor(np.log10(value))
    return float(next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.9999))


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """HTML of a table; the first row has the heads."""
    head, *body = rows
    cells = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in head)
    lines = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    return f"""<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>
{lines}
</tbody></table></div>"""


def document(
    title: str, sentences: Sequence[str], tables: Sequence[str], pictures: Sequence[str], figures: dict[str, Any]
) -> str:
    """The page: sentences, tables of `html_table`, SVG plots side by side, and the figures as JSON."""
    lines = "\n".join(f"<p>{escape(line)}</p>" for line in sentences)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title><style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{lines}
{"".join(tables)}
<div class="plots">
{"".join(pictures)}</div>
<details><summary>All figures</summary><pre>{escape(json.dumps(figures, indent=2))}</pre></details>
</body></html>
"""
