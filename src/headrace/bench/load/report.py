"""A load as pictures, and as one page of HTML to send: nothing in it asks another host for anything."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from headrace.bench.plots import Line, about, distribution, draw

TIMES = {"ttft": "Time to first token", "itl": "Time between events", "e2e": "Time to the end"}
STYLE = """
:root { color-scheme: light dark; --text: #1c2327; --ground: #fff; --line: #d9dedb }
@media (prefers-color-scheme: dark) { :root { --text: #e6e9e8; --ground: #16191b; --line: #3a4043 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--ground); max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums } th, td { padding: .2rem .8rem; text-align: right;
  border-bottom: 1px solid var(--line) } th:first-child, td:first-child { text-align: left }
.wide { overflow-x: auto } .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem }
svg { width: 100%; height: auto } pre { overflow-x: auto; font-size: 12px }
"""
POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # of the page: nothing is loaded and nothing runs

Made = dict[str, tuple[dict[str, Any], dict[str, list[float]]]]  # by load: its figures, and all its times


def pictures(model: str, made: Made) -> dict[str, str]:
    """SVGs by name: how times are distributed, and, of several loads, how they grow with the throughput."""
    remark = about(model)
    drawn = {
        name: draw(title, "ms", "% of all", distribution({load: values[name] for load, (_, values) in made.items()}), remark)
        for name, title in TIMES.items()
    }
    loads = sorted(
        (told for told, _ in made.values() if told["ttft"] and told["itl"]), key=lambda one: one["output_tokens_per_s"]
    )
    if len(loads) > 1:
        speed = [one["output_tokens_per_s"] for one in loads]
        for name in ("ttft", "itl"):  # apart: the one is ten to a thousand times the other
            lines = [Line(share, speed, [one[name][share] * 1000 for one in loads]) for share in ("p50", "p99")]
            drawn[f"{name}-load"] = draw(f"{TIMES[name]} against throughput", "answer tokens/s", "ms", lines, remark)
    return drawn


def page(model: str, cut: str, rows: Sequence[Sequence[str]], made: Made) -> str:
    """One page: the table (first row: its heads), the pictures, and all figures as JSON."""
    head, *body = rows
    table = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in head)
    lines = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in body)
    figures = json.dumps({"model": model, "cut": cut, "loads": {name: told for name, (told, _) in made.items()}}, indent=2)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(model)} under load</title><style>{STYLE}</style></head><body>
<h1>{escape(model)} under load</h1>
<p>{escape(about(model))}</p>
<p>{escape(cut)}</p>
<div class="wide"><table><thead><tr>{table}</tr></thead><tbody>
{lines}
</tbody></table></div>
<div class="plots">
{"".join(pictures(model, made).values())}</div>
<details><summary>All figures</summary><pre>{escape(figures)}</pre></details>
</body></html>
"""
