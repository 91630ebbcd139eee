"""What compressing cost and gained, as tables and as one page with pictures: what is lost is drawn like what is gained."""

from collections.abc import Sequence
from typing import Any

from headrace.bench.page import document, table
from headrace.bench.plots import Axis, Line, Point, about, scatter

Rows = list[tuple[str, ...]]
WIDE = 8  # times the least perplexity from which the axis has powers of ten
POINTS = 40  # of a curve


def quality(result: dict[str, Any]) -> Rows:
    """Size and what is lost: a row a model under the heads."""
    models = result["models"]
    tasks = list(next(iter(models.values())).get("tasks", {}))
    heads = ("#", "model", "how", "MB", "bits", "perplexity", "of the first", "KL", "same choice", *tasks)
    return [heads, *(_quality(number, name, models, tasks) for number, name in enumerate(models, 1))]


def _quality(number: int, name: str, models: dict[str, Any], tasks: Sequence[str]) -> tuple[str, ...]:
    one, first = models[name], next(iter(models.values()))
    beside, kl = one.get("float32"), ""
    if beside is not None:
        kl = f"{beside['kl']:.4f}" + ("" if beside["kl_error"] is None else f" ± {beside['kl_error']:.4f}")
    return (
        *(str(number), name, one["how"], f"{one['bytes'] / 1e6:.1f}", f"{one['bits']:.2f}"),
        f"{one['perplexity']:.3f} ± {one['perplexity_error']:.3f}",
        f"{one['perplexity'] / first['perplexity'] - 1:+.2%}",
        *(kl, "" if beside is None else f"{beside['same_choice']:.1%}"),
        *(_task(one["tasks"][task], number > 1) for task in tasks),
    )


def _task(found: dict[str, Any], beside: bool) -> str:
    """The share that is right; beside the first model, how many of its right answers are lost, and its wrong ones gained."""
    right = f"{found['right']:.1%} ± {found['error']:.1%} of {found['questions']}"
    return f"{right} (−{found['lost']:.1%} +{found['gained']:.1%})" if beside else right


def speed(result: dict[str, Any]) -> Rows:
    """Tokens/s of each cell, beside the first model in the same rounds, and memory."""
    models = result["models"]
    cells = list(next(iter(models.values())).get("cells", {}))
    each_cell = (part for cell in cells for part in (f"{cell} tokens/s", "of the first"))
    heads = ("#", "model", *each_cell, "memory MiB", "loaded in s")
    rows: Rows = [heads]
    for number, (name, one) in enumerate(models.items(), 1):
        each = [one["cells"][cell] for cell in cells]
        found = [
            part
            for cell in each
            for part in (
                f"{cell['tokens_per_s']:.1f} ({cell['least']:.1f}–{cell['most']:.1f})",
                f"{cell['ratio']:.2f} ({cell['ratio_least']:.2f}–{cell['ratio_most']:.2f})",
            )
        ]
        rows.append((str(number), name, *found, f"{one['peak_rss_mb']:.0f}", f"{one['load_s']:.1f}"))
    return rows


def pictures(result: dict[str, Any]) -> list[str]:
    """Size and perplexity; size and tokens/s; tokens/s and KL: the latter with what memory allows."""
    models = list(result["models"].values())
    sizes = [one["bytes"] / 1e6 for one in models]
    values = [one["perplexity"] for one in models]
    size = Axis.of("MB", sizes)
    high = max(values) > WIDE * min(values)
    drawn = [scatter("Size and perplexity", size, Axis.of("perplexity", values, high), _points(sizes, values))]
    cell = "b1" if "b1" in models[0]["cells"] else next(iter(models[0]["cells"]), None)
    if cell is None:
        return drawn
    speeds = [one["cells"][cell]["tokens_per_s"] for one in models]
    read = [one["read_bytes"] / 1e6 for one in models]
    bandwidth = 1e3 * result["bandwidth_gb_s"]  # MB/s
    ceilings = [bandwidth / one for one in read] if cell == "b1" else []
    name = f"tokens/s ({cell})"
    rate = Axis.of(name, [*speeds, *ceilings])
    largest = max(read)
    curve = [largest * (1 + step / POINTS) / 2 for step in range(POINTS + 1)] if ceilings else []
    curve = [one for one in curve if bandwidth / one <= rate.high] or curve[-1:]
    at_most = [Line("memory read", curve, [bandwidth / one for one in curve], True)] if ceilings else []
    width = Axis.of("MB of weights that a step reads", read)
    drawn.append(scatter("Size and speed", width, rate, _points(read, speeds), at_most))
    lost = [one.get("float32", {"kl": 0.0})["kl"] for one in models]
    reach = [Line("", [speeds[at], ceiling], [lost[at]] * 2, True) for at, ceiling in enumerate(ceilings)]
    further = Axis(f"{name}; dashed: as far as memory allows" if reach else name, rate.low, rate.high)
    drawn.append(scatter("Speed and what is lost", further, Axis.of("KL, nats", lost), _points(speeds, lost), reach))
    return drawn


def _points(x: Sequence[float], y: Sequence[float]) -> list[Point]:
    return [Point(number, *place) for number, place in enumerate(zip(x, y, strict=True), 1)]


def summary(result: dict[str, Any]) -> list[str]:
    """What was measured, and how to read it."""
    others = f", other processes at {result['others_cpu']:.0%} of the cores" if "others_cpu" in result else ""
    return [
        about(result["model"]),
        f"Every model is held to the first. {result['tokens']:,} tokens of {result['text']}, of which the second half of each "
        "text is scored: perplexity as the engine runs the model; KL of its next tokens from the first's, and how often both "
        "choose the same, in float32, which is what the weights alone lose.",
        f"Speeds are medians of {result['rounds']} rounds in turns with the same prompts, {result['threads']} threads{others}; "
        "in brackets the least and the greatest. Questions: right ± standard error, and of them lost (−) and gained (+).",
    ]


def page(result: dict[str, Any]) -> str:
    """One page of HTML."""
    tables = [table(quality(result)), table(speed(result))]
    return document(f"{result['model']} compressed", summary(result), tables, pictures(result), result)
