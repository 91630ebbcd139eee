"""Compare the speed of this build of Headrace with another build, in alternation and in one run."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import headrace
from headrace.bench.bandwidth import BandwidthProbe
from headrace.bench.cells import Cell
from headrace.bench.competitors import OURS, Build, fitting, heading, kv_bytes, load_competitors
from headrace.bench.interleave import judge, measure
from headrace.bench.machine import Say, commit
from headrace.host import cores
from headrace.startup.loading import open_model

OTHER = "other"
PAIRS = 9  # the fewest of a cell: their interval leaves out an outlier at each end
FLOOR = 0.99  # of the other build's speed


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
    """Both builds in turns, as it stands in the JSON: `builds` with version, commit and file of each, and per cell our
    tokens_per_s, the other's, the `ratio` of ours to it with its `interval`; `verdict` over all cells so far.

    `other`: a virtual environment in which the other build is installed. Each is a process, stopped while the other measures.
    `done` gets what there is after every cell. Raises ValueError for fewer than PAIRS pairs, for an environment without
    Python, without Headrace or with this very build, and WorkerError where a build fails.
    """
    if pairs < PAIRS:
        raise ValueError(f"{pairs} pairs of a cell say too little; measure {PAIRS} or more")
    theirs = Build(OTHER, {"": setting or {}}, other.expanduser().absolute() / "bin" / "python")
    if not theirs.python.exists():
        raise ValueError(f"{other} is no virtual environment: it has no bin/python; name one with another build of Headrace")
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
    """Raises ValueError where one of the processes has imported the build that the other should have, or had."""
    if builds[OURS]["file"] != headrace.__file__:
        raise ValueError(f"{builds[OURS]['file']} is imported in place of {headrace.__file__}: run the command of that build")
    if builds[OTHER]["file"] == builds[OURS]["file"]:
        raise ValueError(f"{other} imports {headrace.__file__}, which is this build; name an environment with another one")


def verdict(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Not slower: no cell's interval lies wholly below FLOOR, and the geometric mean of the cells' ratios is no less."""
    ratios = [figures["ratio"] for figures in cells.values()]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    below = [name for name, figures in cells.items() if figures["interval"][1] < FLOOR]
    return {"geometric_mean": mean, "below": below, "not_slower": mean >= FLOOR and not below}


def _why(other: Path, error: str) -> str:
    if "No module named 'headrace'" in error:
        return f"{other} has no Headrace; install the other build there: {other}/bin/python -m pip install FOLDER"
    return f"the build in {other} does not run: {error}"
