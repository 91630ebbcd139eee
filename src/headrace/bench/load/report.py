"""Report on loads: table, plots, and one self-contained HTML page."""

from typing import Any

from headrace.bench.figures import Column, Line, Table, named
from headrace.bench.plots import about, distribution, document, draw, html_table

TIMES = {"ttft": "Time to first token", "itl": "Time between events", "e2e": "Time to the end"}
# Figures and latencies of each load, by name.
LoadFigures = dict[str, tuple[dict[str, Any], dict[str, list[float]]]]


def pictures(model: str, results: LoadFigures) -> dict[str, str]:
    """SVG plots by name: distributions of latencies, and for several loads latencies over throughput."""
    remark = about(model)
    drawn = {
        name: draw(title, "ms", "% of all", distribution({load: values[name] for load, (_, values) in results.items()}), remark)
        for name, title in TIMES.items()
    }
    loads = sorted(
        (summary for summary, _ in results.values() if summary["ttft"] and summary["itl"]),
        key=lambda summary: summary["output_tokens_per_s"],
    )
    if len(loads) > 1:
        speed = [summary["output_tokens_per_s"] for summary in loads]
        for name in ("ttft", "itl"):
            lines = [Line(share, speed, [summary[name][share] * 1000 for summary in loads]) for share in ("p50", "p99")]
            drawn[f"{name}-load"] = draw(f"{TIMES[name]} against throughput", "answer tokens/s", "ms", lines, remark)
    return drawn


def page(model: str, cut: str, results: LoadFigures) -> str:
    """One HTML page: table, plots, and all figures as JSON."""
    figures = {"model": model, "cut": cut, "loads": {name: summary for name, (summary, _) in results.items()}}
    return document(
        f"{model} under load",
        [about(model), cut],
        [html_table(table(results).cells())],
        list(pictures(model, results).values()),
        figures,
    )


def table(results: LoadFigures) -> Table:
    """One column for each load, one row for each figure."""
    summaries = {name: figures for name, (figures, _) in results.items()}
    first = next(iter(summaries.values()))
    columns = [
        Column("", "{load}"),
        Column("requests", "{requests}"),
        Column("failed", "{failed}"),
        Column("answer tokens", "{output_tokens}"),
        Column("prompt tokens cached", "{cached_tokens} of {prompt_tokens}"),
        Column("requests/s", "{requests_per_s:.2f}"),
        Column("tokens/s", "{output_tokens_per_s:.2f}"),
        Column("seconds", "{seconds:.2f}"),
        *(_latency(name, share) for name in ("ttft", "itl", "tpot", "e2e") for share in ("p50", "p90", "p99")),
    ]
    if any("slo" in figures for figures in summaries.values()):
        columns.append(Column("goodput, requests/s", "{slo[goodput_requests_per_s]:.2f}"))
        columns.append(Column("within the limits", "{slo[share]:.1%}"))
    columns.append(Column("sent late by at most, ms", lambda row: f"{row['sent_late_max'] * 1000:.2f}"))
    columns.append(Column("CPU of this client, s", "{client_cpu_s:.2f}"))
    columns += [_cpu(pid) for pid in first["cpu_us_per_token"]]
    return Table(columns, named(summaries, "load"), transposed=True)


def _latency(name: str, share: str) -> Column:
    return Column(f"{name} {share} ms", lambda row: f"{row[name][share] * 1000:.2f}" if row[name] else "-")


def _cpu(pid: str) -> Column:
    return Column(f"CPU of {pid}, us a token", lambda row: f"{row['cpu_us_per_token'][pid]:.1f}")
