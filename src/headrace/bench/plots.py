"""Small SVG plots: lines over axes from 0, with markers, in both colour schemes, and with where and when they were measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

import numpy as np

import headrace
from headrace.bench.machine import commit, machine

WIDTH, HEIGHT = 640, 380
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 52, 62
LIGHT = ("#0b7285", "#6741a8", "#b35c00", "#2b8a3e", "#c02b37", "#566067")
DARK = ("#4cc2d4", "#b197fc", "#ffa94d", "#69db7c", "#ff8787", "#adb5bd")
POINTS = 200  # of a distribution
MARKED = 20  # points up to which each is marked


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
class Line:
    """A name, and points in the order of x. `dashed`: what was predicted."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    dashed: bool = False


def about(model: str) -> str:
    """What was measured, where, when and by which version: the line that every plot carries."""
    here = machine()
    version = f"Headrace {headrace.__version__}" + (f" ({found})" if (found := commit()) else "")
    day = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return f"{model} · {here['cpu']}, {here['cores']} cores · {day} · {version}"


def distribution(values: dict[str, Sequence[float]]) -> list[Line]:
    """The share of values (percent) up to each value, in milliseconds."""
    shares = np.linspace(0, 100, POINTS)
    return [Line(name, (np.percentile(one, shares) * 1000).tolist(), shares.tolist()) for name, one in values.items() if one]


def draw(title: str, x_name: str, y_name: str, lines: Sequence[Line], remark: str = "") -> str:
    """Lines as an SVG with axes from 0, those of one name in one colour. `remark`: what `about` says."""
    x_top = _round_up(max((max(line.x) for line in lines), default=1))
    y_top = _round_up(max((max(line.y) for line in lines), default=1))

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + x / x_top * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y / y_top * (HEIGHT - TOP - BOTTOM)

    names = list(dict.fromkeys(line.name for line in lines))
    parts = [_frame(title, x_name, y_name, remark, x_top, y_top)]
    for line in lines:
        hue = names.index(line.name) % len(LIGHT)
        points = [at(x, y) for x, y in zip(line.x, line.y, strict=True)]
        dashes = ' stroke-dasharray="5 4"' if line.dashed else ""
        parts.append(f'<path class="line h{hue}"{dashes} d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}"/>')
        if len(points) <= MARKED and not line.dashed:
            parts += [f'<circle class="h{hue}" cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in points]
    for number, name in enumerate(names):
        place = LEFT + number * (WIDTH - LEFT) / max(len(names), 4)
        parts.append(f'<rect class="h{number % len(LIGHT)}" x="{place:.0f}" y="{HEIGHT - 16}" width="12" height="4"/>')
        parts.append(f'<text x="{place + 17:.0f}" y="{HEIGHT - 10}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(title: str, x_name: str, y_name: str, remark: str, x_top: float, y_top: float) -> str:
    """The ground, the title, the axes with their numbers, and the grid."""
    middle, height = (LEFT + WIDTH - RIGHT) / 2, HEIGHT / 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>',
        f'<title>{escape(title)}</title><rect class="ground" width="100%" height="100%"/>',
        f'<text x="{LEFT}" y="20" font-weight="600">{escape(title)}</text>',
        f'<text class="about" x="{LEFT}" y="37">{escape(remark)}</text>',
        f'<text x="{middle:.0f}" y="{HEIGHT - BOTTOM + 36}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text x="16" y="{height:.0f}" text-anchor="middle" transform="rotate(-90 16 {height:.0f})">{escape(y_name)}</text>',
    ]
    for step in range(6):
        share = step / 5
        x, y = LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share * y_top:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{share * x_top:g}</text>')
    return "\n".join(parts)


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    power = 10 ** np.floor(np.log10(value))
    return float(next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.9999))
