"""A load as pictures, and as one page of HTML to send: nothing in it asks another host for anything."""

from collections.abc import Sequence
from typing import Any

from headrace.bench.page import document, html_table
from headrace.bench.plots import Line, about, distribution, draw

TIMES = {"ttft": "Time to first token", "itl": "Time between events", "e2e": "Time to the end"}
Made = dict[str, tuple[dict[str, Any], dict[str, list[float]]]]  # by load: its figures, and all its times


def pictures(model: str, made: Made) -> dict[str, str]:
    """SVGs by name: how times are distributed, and, of several loads, how they grow with the throughput."""
    remark = about(model)
    drawn = {
        name: draw(title, "ms", "% of all", distribution({load: values[name] for load, (_, values) in made.items()}), remark)
        for name, title in TIMES.items()
    }
    loads = sorted(
        (summary for summary, _ in made.values() if summary["ttft"] and summary["itl"]),
        key=lambda one: one["output_tokens_per_s"],
    )
    if len(loads) > 1:
        speed = [one["output_tokens_per_s"] for one in loads]
        for name in ("ttft", "itl"):  # apart: the one is ten to a thousand times the other
            lines = [Line(share, speed, [one[name][share] * 1000 for one in loads]) for share in ("p50", "p99")]
            drawn[f"{name}-load"] = draw(f"{TIMES[name]} against throughput", "answer tokens/s", "ms", lines, remark)
    return drawn


def page(model: str, cut: str, rows: Sequence[Sequence[str]], made: Made) -> str:
    """One page: the table (first row: its heads), the pictures, and all figures as JSON."""
    figures = {"model": model, "cut": cut, "loads": {name: summary for name, (summary, _) in made.items()}}
    return document(
        f"{model} under load", [about(model), cut], [html_table(rows)], list(pictures(model, made).values()), figures
    )
