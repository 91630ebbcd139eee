"""Speed of Headrace and of other engines: the same prompts, in alternation, in one run."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.peers.engines import PeerEngine
from benchmarks.peers.limits import limit_of, share_of, work_of
from headrace.bench.competitors import fitting, heading, kv_bytes, load_competitors
from headrace.bench.interleave import Cell, judge, measure
from headrace.bench.machine import BandwidthProbe, Say
from headrace.bench.profile import limits
from headrace.host import cores
from headrace.startup.loading import open_model


def compare(
    model: str,
    engines: Sequence[PeerEngine],
    cells: Sequence[Cell],
    *,
    rounds: int = 5,
    threads: int | None = None,
    setting: dict[str, Any] | None = None,
    say: Say = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure every engine in every cell; returns the content of the JSON file.

    setting: arguments of our LLM. done: called after each cell with the result so far.
    `limits` has the machine's limits; in each cell `limit` names the one that is reached first, and `share` is the part of it
    that our speed reaches. An engine that cannot run the model is left out, reported and listed. Raises ValueError if the model
    is not a GGUF file, and ValueError if Headrace itself, or an engine that has started, fails.
    """
    opened = open_model(model)
    if opened.path.suffix != ".gguf":
        raise ValueError(f"{model} is no GGUF file, and the other engines need one; name a model in GGUF")
    cells = fitting(cells, opened.config, say)
    work = work_of(opened)
    opened.source.close()
    task = {"threads": threads or cores(), "kv_bytes": kv_bytes(cells, opened.config)}
    machine = limits(task["threads"])
    result = {**heading(opened, rounds), **task, "limits": machine}
    with ExitStack() as stack:
        competitors = load_competitors(stack, opened.path, engines, setting or {}, task, say)
        result |= {"engines": competitors.about, "left_out": competitors.left_out, "cells": {}}
        ours, *others = competitors.variants
        probe = BandwidthProbe()
        for cell in cells:
            state = measure(competitors.variants, cell, rounds, opened.tokenizer.vocab_size, probe.gb_per_s)
            figures = judge(ours, others, cell, state)
            limit = limit_of(cell, work, opened.config, {**machine, "bandwidth_gb_s": figures["bandwidth_gb_s"]})
            share = share_of(cell, figures["tokens_per_s"], limit)
            result["cells"][cell.name] = {**figures, "limit": limit.name, "share": share}
            done(result)
    return result
