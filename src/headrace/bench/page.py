"""One self-contained HTML page of a measurement: tables, plots and all figures. It loads nothing from other hosts."""

import json
from collections.abc import Sequence
from html import escape
from typing import Any

STYLE = """
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
