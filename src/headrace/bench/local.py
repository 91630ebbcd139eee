"""Measure Headrace on this machine: prefill, decoding by batch size and context length, verification."""

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

from headrace.bench.competitors import fitting, heading, kv_bytes, load_competitors
from headrace.bench.figures import Column, Table, named
from headrace.bench.interleave import CELLS, Cell, measure
from headrace.bench.machine import BandwidthProbe, Say
from headrace.host import cores
from headrace.startup.loading import open_model

LOCAL = {
    **{name: cell for name, cell in CELLS.items() if name != "b1_4k"},
    "b1_512": Cell("b1_512", 1, 512, 64),
    "b1_1k": Cell("b1_1k", 1, 1000, 64),
    "b1_2k": Cell("b1_2k", 1, 2000, 64),
    "b1_4k": CELLS["b1_4k"],
    "b1_8k": Cell("b1_8k", 1, 8000, 64),
    "v5": Cell("v5", 1, 128, 64, fed=5),
    "v8": Cell("v8", 1, 128, 64, fed=8),
}
COLUMNS = (
    Column("cell", "{cell}"),
    Column("tokens/s", "{tokens_per_s:.1f}"),
    Column("least", "{least:.1f}"),
    Column("most", "{most:.1f}"),
    Column("GB/s", "{bandwidth_gb_s:.1f}"),
    Column("other load", "{others_cpu:.0%}"),
)


def pick(names: str) -> list[Cell]:
    """Cells of a comma-separated list of names, all if it is empty. Raises ValueError for an unknown name."""
    wanted = [name.strip() for name in names.split(",") if name.strip()] or list(LOCAL)
    if unknown := [name for name in wanted if name not in LOCAL]:
        raise ValueError(f"there is no cell {unknown[0]!r}; choose from {', '.join(LOCAL)}")
    return [LOCAL[name] for name in dict.fromkeys(wanted)]


def measure_local(
    model: str,
    cells: list[Cell],
    *,
    rounds: int = 5,
    threads: int | None = None,
    setting: dict[str, Any] | None = None,
    say: Say = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Content of the JSON file: load_s, peak_rss_mb, bandwidth_gb_s, machine, commit, and the figures of each cell.

    A cell has tokens_per_s (median of `rounds`), least, most, bandwidth_gb_s and others_cpu. v5 and v8 also have `cost`: time
    of their step of 5 or 8 tokens divided by that of a step of one token, if b1 was measured before.
    The model runs in a process of its own, so peak_rss_mb is its memory. done: called after each cell with the result so far.
    """
    opened = open_model(model)
    opened.source.close()
    cells = fitting(cells, opened.config, say)
    task = {"threads": threads or cores(), "kv_bytes": kv_bytes(cells, opened.config)}
    result = {**heading(opened, rounds), **task}
    with ExitStack() as stack:
        competitors = load_competitors(stack, opened.path, [], setting or {}, task, say)
        (variant,), (about,) = competitors.variants, competitors.about.values()
        result |= {"about": about["about"], "load_s": about["load_s"], "cells": {}}
        probe = BandwidthProbe()
        for cell in cells:
            state = measure([variant], cell, rounds, opened.tokenizer.vocab_size, probe.gb_per_s)
            speeds = variant.samples[cell.name]
            result["cells"][cell.name] = {
                "tokens_per_s": median(speeds),
                "least": min(speeds),
                "most": max(speeds),
                "bandwidth_gb_s": median(state.bandwidth),
                "others_cpu": median(state.others_cpu),
            }
            single = result["cells"].get("b1")
            if cell.fed > 1 and single:
                result["cells"][cell.name]["cost"] = cell.fed * single["tokens_per_s"] / median(speeds)
            result["bandwidth_gb_s"] = median(figures["bandwidth_gb_s"] for figures in result["cells"].values())
            result["peak_rss_mb"] = variant.peak_rss_mb
            done(result)
    return result


def printed(result: dict[str, Any]) -> list[Table | str]:
    """Table and lines of the terminal."""
    costs = {name[1:]: figures["cost"] for name, figures in result["cells"].items() if "cost" in figures}
    return [
        Table(COLUMNS, named(result["cells"], "cell")),
        "",
        *(f"a step of {count} tokens to verify costs {cost:.2f} of a step of one" for count, cost in costs.items()),
        f"{result['about']}, {result['threads']} threads: loaded in {result['load_s']:.1f} s, "
        f"peak memory {result['peak_rss_mb']:.0f} MiB, memory read at {result['bandwidth_gb_s']:.1f} GB/s",
    ]
