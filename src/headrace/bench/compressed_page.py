"""Report on compressed models: tables, and one HTML page with plots of size, speed and losses."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from headrace.bench.figures import Column, Line, Table, percent
from headrace.bench.plots import Axis, Point, about, document, html_table, scatter

# The axis of perplexities is logarithmic if the largest exceeds this many times the smallest.
LOG_SCALE_RANGE = 8
CURVE_POINTS = 40


def tables(result: dict[str, Any]) -> tuple[Table, Table]:
    """Tables of the quality and of the speed of all models, one row a model."""
    models = result["models"]
    first = next(iter(models.values()))
    rows = [{"number": number, "name": name, **figures} for number, (name, figures) in enumerate(models.items(), 1)]
    return Table(_quality_columns(first), rows), Table(_speed_columns(first), rows)


def _quality_columns(first: dict[str, Any]) -> list[Column]:
    """Columns of size and losses. KL and equal choices compare with the first model in float32, so they show the loss of the
    weights alone; the first model has neither."""

    def kl(row: dict[str, Any]) -> str | None:
        loss = row.get("float32")
        return loss and f"{loss['kl']:.4f}" + ("" if loss["kl_error"] is None else f" ± {loss['kl_error']:.4f}")

    def of_first(row: dict[str, Any]) -> str:
        return f"{row['of_first'] - 1:+.2%}" + (_plus_minus(row["of_first_error"], ".2%") if row["number"] > 1 else "")

    return [
        Column("#", "{number}"),
        Column("model", "{name}"),
        Column("how", "{how}"),
        Column("MB", lambda row: f"{row['bytes'] / 1e6:.1f}"),
        Column("bits", "{bits:.2f}"),
        Column("perplexity", lambda row: f"{row['perplexity']:.3f}" + _plus_minus(row["perplexity_error"], ".3f")),
        Column("of the first", of_first),
        Column("KL", kl),
        Column("same choice", lambda row: percent(row.get("float32", {}).get("same_choice"))),
        *(Column(task, partial(_task_cell, task)) for task in first.get("tasks", {})),
    ]


def _plus_minus(error: float | None, form: str) -> str:
    """A standard error after its value; empty if there is none."""
    return "" if error is None else f" ± {error:{form}}"


def _task_cell(task: str, row: dict[str, Any]) -> str:
    """Share of right answers; of a model that is not the first, also the shares lost and gained."""
    figures = row["tasks"][task]
    right = f"{figures['right']:.1%} ± {figures['error']:.1%} of {figures['questions']}"
    changed = f"(−{figures['lost']:.1%} +{figures['gained']:.1%}, p {figures['p']:.2g})"
    return f"{right} {changed}" if row["number"] > 1 else right


def _speed_columns(first: dict[str, Any]) -> list[Column]:
    """Columns of tokens/s of each cell, their ratio to the first model in the same rounds, and memory."""
    return [
        Column("#", "{number}"),
        Column("model", "{name}"),
        *(column for cell in first.get("cells", {}) for column in _cell_columns(cell)),
        Column("memory MiB", "{peak_rss_mb:.0f}"),
        Column("loaded in s", "{load_s:.1f}"),
    ]


def _cell_columns(cell: str) -> tuple[Column, Column]:
    speed, ratio = "{tokens_per_s:.1f} ({least:.1f}–{most:.1f})", "{ratio:.2f} ({ratio_least:.2f}–{ratio_most:.2f})"
    return (
        Column(f"{cell} tokens/s", lambda row: speed.format_map(row["cells"][cell])),
        Column("of the first", lambda row: ratio.format_map(row["cells"][cell])),
    )


def pictures(result: dict[str, Any]) -> list[str]:
    """Plots: perplexity over size, tokens/s over size, KL over tokens/s; the last two with the ceiling of memory bandwidth."""
    models = list(result["models"].values())
    sizes = [model["bytes"] / 1e6 for model in models]
    values = [model["perplexity"] for model in models]
    size = Axis.of("MB", sizes)
    logarithmic = max(values) > LOG_SCALE_RANGE * min(values)
    drawn = [scatter("Size and perplexity", size, Axis.of("perplexity", values, logarithmic), _points(sizes, values))]
    cell = "b1" if "b1" in models[0]["cells"] else next(iter(models[0]["cells"]), None)
    if cell is None:
        return drawn
    speeds = [model["cells"][cell]["tokens_per_s"] for model in models]
    read = [model["read_bytes"] / 1e6 for model in models]
    bandwidth = 1e3 * result["bandwidth_gb_s"]  # MB/s
    ceilings = [bandwidth / size for size in read] if cell == "b1" else []
    name = f"tokens/s ({cell})"
    rate_axis = Axis.of(name, [*speeds, *ceilings])
    largest = max(read)
    curve = [largest * (1 + step / CURVE_POINTS) / 2 for step in range(CURVE_POINTS + 1)] if ceilings else []
    curve = [size for size in curve if bandwidth / size <= rate_axis.high] or curve[-1:]
    at_most = [Line("memory read", curve, [bandwidth / size for size in curve], True)] if ceilings else []
    read_axis = Axis.of("MB of weights that a step reads", read)
    drawn.append(scatter("Size and speed", read_axis, rate_axis, _points(read, speeds), at_most))
    lost = [model.get("float32", {"kl": 0.0})["kl"] for model in models]
    reach = [Line("", [speeds[at], ceiling], [lost[at]] * 2, True) for at, ceiling in enumerate(ceilings)]
    reach_axis = Axis(f"{name}; dashed: as far as memory allows" if reach else name, rate_axis.low, rate_axis.high)
    drawn.append(scatter("Speed and what is lost", reach_axis, Axis.of("KL, nats", lost), _points(speeds, lost), reach))
    return drawn


def _points(x: Sequence[float], y: Sequence[float]) -> list[Point]:
    return [Point(number, *place) for number, place in enumerate(zip(x, y, strict=True), 1)]


def summary(result: dict[str, Any]) -> list[str]:
    """Lines with the model, machine and date, and an explanation of the tables."""
    others = f", other processes at {result['others_cpu']:.0%} of the cores" if "others_cpu" in result else ""
    return [
        about(result["model"]),
        f"Every model is held to the first. {result['tokens']:,} tokens of {result['text']}, of which the second half of each "
        "text is scored: perplexity as the engine runs the model; KL of its next tokens from the first's, and how often both "
        "choose the same, in float32, which is what the weights alone lose.",
        f"Speeds are medians of {result['rounds']} rounds in turns with the same prompts, {result['threads']} threads{others}; "
        "in brackets the least and the greatest. Questions: right ± standard error, and of them lost (−) and gained (+), "
        "with the p-value of equal chances of both (McNemar). Errors of perplexities are over texts, and "
        "paired next to the first model.",
    ]


def page(result: dict[str, Any]) -> str:
    """The HTML page."""
    html = [html_table(table.cells()) for table in tables(result)]
    return document(f"{result['model']} compressed", summary(result), html, pictures(result), result)
