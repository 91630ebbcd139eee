"""Small SVG plots of a load: how times are distributed, and how they grow with the load."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

import numpy as np

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 70, 16, 34, 62
HUES = ("#0b7285", "#6741a8", "#b35c00", "#2b8a3e", "#c02b37", "#566067")
POINTS = 200  # of a distribution
STYLE = (
    "text { font: 12px system-ui, sans-serif; fill: #1c2327 } .grid { stroke: #d9dedb } path { fill: none; stroke-width: 2 }"
)

Line = tuple[str, Sequence[float], Sequence[float]]  # name, x, y


def distribution(values: dict[str, Sequence[float]]) -> list[Line]:
    """The share of values (percent) up to each value, in milliseconds."""
    shares = np.linspace(0, 100, POINTS)
    return [(name, (np.percentile(one, shares) * 1000).tolist(), shares.tolist()) for name, one in values.items() if one]


def plot(path: Path, title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> None:
    """Write lines as a picture with axes from 0."""
    x_top = _round_up(max((max(x) for _, x, _ in lines), default=1))
    y_top = _round_up(max((max(y) for _, _, y in lines), default=1))
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>']
    parts += [
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-weight="600">{escape(title)}</text>',
    ]
    for step in range(6):
        share = step / 5
        x, y = LEFT + share * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share * y_top:g}</text>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{share * x_top:g}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - BOTTOM + 36}" text-anchor="middle">{escape(x_name)}</text>')
    turned = f'transform="rotate(-90 16 {HEIGHT / 2:.0f})"'
    parts.append(f'<text x="16" y="{HEIGHT / 2:.0f}" text-anchor="middle" {turned}>{escape(y_name)}</text>')
    for number, (name, x_values, y_values) in enumerate(lines):
        hue = HUES[number % len(HUES)]
        points = [
            f"{LEFT + x / x_top * (WIDTH - LEFT - RIGHT):.1f} {HEIGHT - BOTTOM - y / y_top * (HEIGHT - TOP - BOTTOM):.1f}"
            for x, y in zip(x_values, y_values, strict=True)
        ]
        parts.append(f'<path stroke="{hue}" d="M{"L".join(points)}"/>')
        place = LEFT + number * (WIDTH - LEFT) / max(len(lines), 4)
        parts.append(f'<rect x="{place:.0f}" y="{HEIGHT - 16}" width="12" height="4" fill="{hue}"/>')
        parts.append(f'<text x="{place + 17:.0f}" y="{HEIGHT - 10}">{escape(name)}</text>')
    path.write_text("\n".join([*parts, "</svg>"]) + "\n", "utf-8")


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    power = 10 ** np.floor(np.log10(value))
    return float(next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10) if step * power >= value * 0.9999))
