"""Compare the speed of this build of Headrace with another build, in alternation and in one run."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import headrace
from headrace.bench.competitors import OURS, Build, fitting, heading, kv_bytes, load_competitors
from headrace.bench.figures import Column, Table, named
from headrace.bench.interleave import Cell, judge, measure
from headrace.bench.machine import BandwidthProbe, Say, commit
from headrace.host import cores
from headrace.startup.loading import open_model

OTHER = "other"
# Fewest pairs of a cell: their interval leaves out one outlier at each end.
PAIRS = 9
# Least ratio to the other build's speed that is not called slower.
FLOOR = 0.99
COLUMNS = (
    Column("cell", "{cell}"),
    Column("this build", "{tokens_per_s:.1f}"),
    Column("other build", "{peers[other][tokens_per_s]:.1f}"),
    Column("ratio", "{ratio:.3f}"),
    Column("interval", "{interval[0]:.3f} to {interval[1]:.3f}"),
    Column("GB/s", "{bandwidth_gb_s:.1f}"),
    Column("other load", "{others_cpu:.0%}"),
)


def compare_builds(
    model: str,
    other: Path,
    cells: list[Cell],
    *,
    pairs: int = PAIRS,
    threads: int | None = None,
    setting: dict[str, Any] | None = None,
    say: Say = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure both builds in alternation; returns the content of the JSON file.

    pairs: measurements of a cell by each build; an odd number gains one, so that each build comes first equally often.
    other: virtual environment of the other build. Each build is a process that is stopped while the other measures.
    The result has `builds` (version, commit, file), per cell both speeds and the `ratio` with its `interval`, and a `verdict`
    over all cells so far. done: called with it after each cell.
    Raises ValueError for fewer than PAIRS pairs, or if `other` has no Python, no Headrace or this build, and if a build
    fails.
    """
    if pairs < PAIRS:
        raise ValueError(f"{pairs} pairs of a cell say too little; measure {PAIRS} or more")
    pairs += pairs % 2
    theirs = Build(OTHER, {"": setting or {}}, other.expanduser().absolute() / "bin" / "python")
    if not theirs.python.exists():
        raise ValueError(f"{other} is not a virtual environment, it has no bin/python; name one with another build of Headrace")
    opened = open_model(model)
    opened.source.close()
    cells = fitting(cells, opened.config, say)
    task = {"threads": threads or cores(), "kv_bytes": kv_bytes(cells, opened.config)}
    result = {**heading(opened, pairs), **task}
    with ExitStack() as stack:
        competitors = load_competitors(stack, opened.path, [theirs], setting or {}, task, say)
        if competitors.left_out:
            raise ValueError(_why(other, next(iter(competitors.left_out.values()))))
        builds = {name: about["build"] for name, about in competitors.about.items()}
        check(builds, other)
        for build in builds.values():
            build["commit"] = commit(Path(build["file"]).parent)
        result |= {"engines": competitors.about, "builds": builds, "cells": {}}
        mine, *others = competitors.variants
        probe = BandwidthProbe()
        for cell in cells:
            state = measure(competitors.variants, cell, pairs, opened.tokenizer.vocab_size, probe.gb_per_s)
            result["cells"][cell.name] = judge(mine, others, cell, state)
            result["verdict"] = verdict(result["cells"])
            done(result)
    return result


def check(builds: dict[str, dict[str, str]], other: Path) -> None:
    """Raise ValueError if a process has imported the wrong build."""
    if builds[OURS]["file"] != headrace.__file__:
        raise ValueError(f"{builds[OURS]['file']} is imported in place of {headrace.__file__}: run the command of that build")
    if builds[OTHER]["file"] == builds[OURS]["file"]:
        raise ValueError(f"{other} imports {headrace.__file__}, which is this build; name an environment with another one")


def verdict(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Not slower: no interval lies below FLOOR, and the geometric mean of the ratios is at least FLOOR."""
    ratios = [figures["ratio"] for figures in cells.values()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    below = [name for name, figures in cells.items() if figures["interval"][1] < FLOOR]
    return {"geometric_mean": mean, "below": below, "not_slower": mean >= FLOOR and not below}


def _why(other: Path, error: str) -> str:
    if "No module named 'headrace'" in error:
        return f"{other} has no Headrace; install the other build there: {other}/bin/python -m pip install FOLDER"
    return f"the build in {other} does not run: {error}"


def printed(result: dict[str, Any]) -> list[Table | str]:
    """Table and lines of the terminal."""
    lines = [
        f"{name}: {build['version']}, {'commit ' + build['commit'] if build['commit'] else 'no commit'}, {build['file']}"
        for name, build in zip(("this build", "other build"), result["builds"].values(), strict=True)
    ]
    verdict = result["verdict"]
    below = f"the intervals of {', '.join(verdict['below'])} lie" if verdict["below"] else "no cell's interval lies"
    lines.append(
        f"{'not slower' if verdict['not_slower'] else 'slower'}: "
        f"{below} wholly below {FLOOR}, the geometric mean of the ratios is {verdict['geometric_mean']:.3f}"
    )
    return [Table(COLUMNS, named(result["cells"], "cell")), "", *lines]
