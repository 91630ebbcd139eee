"""Recorded speeds next to other engines, by machine, and the tables of the pages that show them."""

import json
from datetime import UTC, datetime
from pathlib import Path
from textwrap import wrap
from typing import Any

from headrace.bench.competitors import OURS

RECORD = Path(__file__).parents[2] / "docs/data/speed.json"
# Columns of the short table.
CELLS = ("pp512", "pp2048", "b1", "b4", "b8", "b16", "b32", "b1_4k")
TITLES = {"pp512": "prompt of 512", "pp2048": "prompt of 2,048", "b1_4k": "batch 1, 4,000 tokens in"}

# Figures by cell, by model, by machine and instruction set.
Run = dict[str, Any]


def keep(file: Path, name: str, result: dict[str, Any]) -> None:
    """Record the cells of a measurement (`comparison.compare`) under the name of its machine.

    They replace the cells of the same machine, instruction set and model. Cells without another engine are not recorded.
    """
    runs = read(file) if file.exists() else []
    isa, model = result["limits"]["isa"], result["model"]
    mine = next((run for run in runs if (run["machine"], run["isa"], run["model"]) == (name, isa, model)), None)
    if mine is None:
        mine = {"machine": name, "isa": isa, "model": model, "cpu": result["machine"]["cpu"], "engines": {}, "cells": {}}
        runs.append(mine)
    mine["threads"] = result["threads"]
    mine["engines"] |= {engine: about["about"] for engine, about in result["engines"].items()}
    stamp = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": result["commit"], "rounds": result["rounds"]}
    for cell, figures in result["cells"].items():
        if not figures["peers"]:
            continue
        best = figures["best_peer"]
        mine["cells"][cell] = stamp | {
            "tokens_per_s": round(figures["tokens_per_s"], 1),
            "peer": best,
            "setting": figures["peers"][best]["setting"],
            "peer_tokens_per_s": round(figures["peers"][best]["tokens_per_s"], 1),
            "ratio": round(figures["ratio"], 3),
            "interval": [round(bound, 3) for bound in figures["interval"]],
            "bandwidth_gb_s": round(figures["bandwidth_gb_s"], 1),
            "others_cpu": round(figures["others_cpu"], 3),
            "limit": figures["limit"],
            "share": round(figures["share"], 3),
        }
    file.write_text(json.dumps(runs, indent=1) + "\n")


def read(file: Path = RECORD) -> list[Run]:
    """All runs. Raises ValueError for an invalid file."""
    runs: list[Run] = json.loads(file.read_text())
    return runs


def title(cell: str) -> str:
    return TITLES.get(cell, f"batch {cell.removeprefix('b')}")


def _machine(run: Run) -> str:
    return f"{run['machine']}, {run['isa']}"


def _model(run: Run) -> str:
    return str(run["model"]).removesuffix(".gguf")


def tables(runs: list[Run] | None = None) -> str:
    """One table for each machine and model: speed, the fastest other engine with its setting, ratio and share of the limit."""
    parts = []
    for run in read() if runs is None else runs:
        cells = {cell: run["cells"][cell] for cell in (*CELLS, *run["cells"]) if cell in run["cells"]}
        dates = sorted({figures["date"] for figures in cells.values()})
        commits = sorted({figures["commit"] for figures in cells.values()})
        engines = dict.fromkeys(about.split(" (")[0] for name, about in run["engines"].items() if name != OURS)
        head = (
            f"**{_model(run)}, {_machine(run)}**: {run['cpu']}, {run['threads']} threads, {' and '.join(dates)}, "
            f"commit {' and '.join(commits)}. Engines: {', '.join(engines)}."
        )
        lines = [
            *wrap(head, 100),
            "",
            "| cell | tokens/s | fastest other engine | tokens/s | times | interval | of the limit |",
            "|---|---|---|---|---|---|---|",
        ]
        for cell, each in cells.items():
            setting = f"{each['peer']} ({each['setting'].removesuffix(' precision')})" if each["setting"] else each["peer"]
            ratio = f"**{each['ratio']:.2f}**" if each["ratio"] < 1 else f"{each['ratio']:.2f}"
            low, high = each["interval"]
            lines.append(
                f"| {title(cell)} | {each['tokens_per_s']:.1f} | {setting} | {each['peer_tokens_per_s']:.1f} "
                f"| {ratio} | {low:.2f}–{high:.2f} | {each['share']:.0%} {each['limit']} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def chinese_short_table() -> str:
    return short_table("机器、模型")


def short_table(head: str = "machine, model", runs: list[Run] | None = None) -> str:
    """One row for each machine and model: times the fastest other engine, by cell."""
    lines = [f"| {head} | {' | '.join(CELLS)} |", "|---" * (len(CELLS) + 1) + "|"]
    for run in read() if runs is None else runs:
        ratios = [f"{run['cells'][name]['ratio']:.2f}" if name in run["cells"] else "–" for name in CELLS]
        lines.append(f"| {_machine(run)}, {_model(run).split('-Instruct')[0]} | {' | '.join(ratios)} |")
    return "\n".join(lines)
