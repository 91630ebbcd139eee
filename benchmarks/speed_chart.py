"""Chart of the README: speed next to the fastest other engine, from the tables of docs/en/understand/speed.md.

`python -m benchmarks.speed_chart` writes docs/images/speed.svg and speed-zh.svg.
"""

import re
from html import escape
from pathlib import Path

from headrace.bench.plots import STYLE

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/en/understand/speed.md"
MACHINES = ("Zen 5", "Zen 5 held to AVX2", "Zen 4", "Emerald Rapids, AMX")
MODELS = {"SmolLM2-135M Q4_1": "SmolLM2-135M", "Qwen2.5-Coder-1.5B Q4_K_M": "Qwen2.5-Coder-1.5B"}
CELLS = ("prompt of 512", "batch 1", "batch 8")
WORDS = {
    "en": {
        "title": "Tokens per second, fastest other engine = 1",
        "about": "two cores each · 2026-11-22 to 2026-11-24 · llama.cpp, ONNX Runtime GenAI, OpenVINO GenAI",
        "one": "fastest other engine",
    },
    "zh": {
        "title": "每秒词元数，最快的其他引擎 = 1",
        "about": "各用两个核 · 2026-11-22 至 2026-11-24 · llama.cpp、ONNX Runtime GenAI、OpenVINO GenAI",
        "one": "最快的其他引擎",
        "prompt of 512": "512 词元提示",
        "batch 1": "批 1",
        "batch 8": "批 8",
        "Zen 5 held to AVX2": "Zen 5，限 AVX2",
    },
}
WIDTH, HEIGHT = 760, 360
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 76, 62
HIGHEST = 3.5
BAR, GAP = 22, 3

Ratios = dict[tuple[str, str, str], tuple[float, float]]


def read_ratios(page: str) -> Ratios:
    """Least and greatest ratio by (model, cell, machine) from the tables above "By machine", whose columns are tokens/s and
    MACHINES; cells without a run are left out."""
    ratios: Ratios = {}
    model = ""
    for line in page.partition("## By machine")[0].splitlines():
        if not line.startswith("|"):
            continue
        first, _, *cells = (cell.strip(" *") for cell in line.strip("|").split("|"))
        model = MODELS.get(first, model)
        for machine, text in zip(MACHINES, cells, strict=True):
            found = [float(number) for number in re.findall(r"\d+\.\d+", text)]
            if found and first in CELLS:
                ratios[model, first, machine] = (found[0], found[-1])
    return ratios


def draw_chart(ratios: Ratios, language: str = "en") -> str:
    """SVG of bars in groups by model and cell, one bar per machine, from 0 to the least ratio, with a line to the greatest."""
    words = WORDS[language]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><style>{STYLE}</style>',
        f'<title>{escape(words["title"])}</title><rect class="ground" width="100%" height="100%"/>',
        f'<text x="{LEFT}" y="20" font-weight="600">{escape(words["title"])}</text>',
        f'<text class="about" x="{LEFT}" y="37">{escape(words["about"])}</text>',
    ]
    for hue, machine in enumerate(MACHINES):
        left = LEFT + hue * (WIDTH - LEFT) / len(MACHINES)
        parts.append(f'<rect class="h{hue}" x="{left:.0f}" y="49" width="12" height="10"/>')
        parts.append(f'<text x="{left + 17:.0f}" y="59">{escape(words.get(machine, machine))}</text>')
    for step in range(int(HIGHEST) + 1):
        top = _top(step)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{top + 4:.1f}" text-anchor="end">{step}</text>')
    group = (WIDTH - LEFT - RIGHT) / (len(MODELS) * len(CELLS))
    for number, (model, cell) in enumerate((model, cell) for model in MODELS.values() for cell in CELLS):
        middle = LEFT + (number + 0.5) * group
        start = middle - (len(MACHINES) * (BAR + GAP) - GAP) / 2
        for hue, machine in enumerate(MACHINES):
            if (model, cell, machine) in ratios:
                parts += _bar(start + hue * (BAR + GAP), hue, *ratios[model, cell, machine])
        parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{words.get(cell, cell)}</text>')
    for number, model in enumerate(MODELS.values()):
        middle = LEFT + (number + 0.5) * group * len(CELLS)
        parts.append(f'<text x="{middle:.0f}" y="{HEIGHT - 20}" text-anchor="middle" font-weight="600">{model}</text>')
    one = _top(1)
    parts.append(f'<path class="line h5" stroke-dasharray="5 4" d="M{LEFT} {one:.1f}L{WIDTH - RIGHT} {one:.1f}"/>')
    parts.append(f'<text class="about" x="{LEFT + 4}" y="{HEIGHT - 4}">- - - {words["one"]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _top(value: float) -> float:
    return HEIGHT - BOTTOM - value / HIGHEST * (HEIGHT - TOP - BOTTOM)


def _bar(left: float, hue: int, least: float, most: float) -> list[str]:
    top, middle = _top(least), left + BAR / 2
    parts = [f'<rect class="h{hue}" x="{left:.1f}" y="{top:.1f}" width="{BAR}" height="{_top(0) - top:.1f}"/>']
    if most > least:
        parts.append(f'<path class="line h{hue}" d="M{middle:.1f} {top:.1f}L{middle:.1f} {_top(most):.1f}"/>')
    label = f"{least:.2f}"
    parts.append(f'<text class="about" x="{middle:.1f}" y="{_top(most) - 4:.1f}" text-anchor="middle">{label}</text>')
    return parts


def chart_path(language: str) -> Path:
    return ROOT / "docs/images" / ("speed.svg" if language == "en" else f"speed-{language}.svg")


def main() -> None:
    ratios = read_ratios(PAGE.read_text("utf-8"))
    for language in WORDS:
        chart_path(language).write_text(draw_chart(ratios, language), "utf-8")


if __name__ == "__main__":
    main()
