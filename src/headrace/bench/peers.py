"""Headrace beside what a person could install instead: the same prompts, in turns, in one run; ratios with their spread."""

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.bench.bandwidth import BandwidthProbe
from headrace.bench.cells import Cell
from headrace.bench.engines import WORKERS, Engine, Say
from headrace.bench.machine import commit, machine
from headrace.bench.rounds import Party, judge, measure
from headrace.bench.worker import Worker
from headrace.data.config import ModelConfig
from headrace.host import cores
from headrace.kv.layout import kv_shape
from headrace.startup.loading import Opened, open_model
from headrace.weights.store import home

OURS = "headrace"
HEADRACE = (sys.executable, "-P", str(WORKERS / "serve.py"), str(WORKERS / "ours.py"))  # what starts ours
KV_ELEMENT = 4  # bytes: room for an engine that keeps K and V in float32
ABOUT = ("about", "load_s", "peak_rss_mb", "build")  # what is kept of an engine's first answer
ITS_OWN = {"PYTHONPATH": ""}  # an engine finds the packages of its environment and no others
SPARE = 32 * 256  # tokens: engines round every sequence up


@dataclass(slots=True)
class Lineup:
    """Who takes part, ours first; what each said of itself; who could not be loaded, and why."""

    parties: list[Party] = field(default_factory=list)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def load(
        self,
        stack: ExitStack,
        party: tuple[str, str],
        model: Path,
        setting: dict[str, Any],
        task: dict[str, Any],
        say: Say,
        start: tuple[Sequence[str], dict[str, str]] | None = None,
    ) -> None:
        """A party by its engine and the name of its setting: a process that has loaded the model. `start`: what starts it, and
        in which environment; None: Headrace as it is here. Raises WorkerError."""
        engine, name = party
        command, env = start or (HEADRACE, {"PYTHONPATH": str(WORKERS.parents[2])})
        logs = home() / "peers" / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        worker = Worker(command, logs / (f"{engine} {name}".strip().replace(" ", "-").replace("/", "-") + ".log"), env)
        made = Party(engine, name, worker)
        stack.callback(worker.close)
        about = worker.ask(model=str(model), setting=setting, **task)
        self.about[made.name] = {key: about[key] for key in ABOUT if key in about}
        self.parties.append(made)
        name = "" if made.name == OURS else f"{made.name}: "  # ours names itself
        say(f"{name}{about['about']}, loaded in {about['load_s']:.1f} s")


def compare(
    model: str,
    engines: Sequence[Engine],
    cells: Sequence[Cell],
    *,
    rounds: int = 5,
    threads: int | None = None,
    setting: dict[str, Any] | None = None,
    say: Say = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """The whole comparison, as it stands in the JSON. `setting`: arguments of our LLM. `done` gets what there is
    after every cell.

    An engine that cannot run the model is left out, said and listed. Raises ValueError where the model is no GGUF file,
    and WorkerError where Headrace itself, or an engine in the middle of a run, fails.
    """
    opened = open_model(model)
    opened.source.close()
    if opened.path.suffix != ".gguf":
        raise ValueError(f"{model} is no GGUF file, and the other engines need one; name a model in GGUF")
    cells = fitting(cells, opened.config, say)
    task = {"threads": threads or cores(), "kv_bytes": kv_bytes(cells, opened.config)}
    result = {**heading(opened, rounds), **task}
    with ExitStack() as stack:
        lineup = line_up(stack, opened.path, engines, setting or {}, task, say)
        result |= {"engines": lineup.about, "left_out": lineup.left_out, "cells": {}}
        ours, *others = lineup.parties
        probe = BandwidthProbe()
        for cell in cells:
            around = measure(lineup.parties, cell, rounds, opened.tokenizer.vocab_size, probe.gb_per_s)
            result["cells"][cell.name] = judge(ours, others, cell, around)
            done(result)
    return result


def heading(opened: Opened, rounds: int) -> dict[str, Any]:
    """How the JSON of a measurement begins."""
    return {"model": opened.path.name, "machine": machine(), "commit": commit(), "rounds": rounds}


def line_up(
    stack: ExitStack, path: Path, engines: Sequence[Engine], setting: dict[str, Any], task: dict[str, Any], say: Say
) -> Lineup:
    """Load ours, then every engine with every setting, one after the other; each waits, stopped, until it is asked."""
    lineup = Lineup()
    lineup.load(stack, (OURS, ""), path, setting, task, say)
    for engine in engines:
        for name, options in engine.settings.items():
            try:
                start = engine.command, ITS_OWN
                lineup.load(stack, (engine.name, name), engine.model(path, say), options, task, say, start)
            except ValueError as error:
                lineup.left_out[f"{engine.name} ({name})"] = str(error)
                say(f"{engine.name} ({name}) is left out: {error}")
    return lineup


def fitting(cells: Sequence[Cell], config: ModelConfig, say: Say) -> list[Cell]:
    """The cells whose contexts the model knows; the others are said."""
    fitting = [cell for cell in cells if cell.prompt + cell.new_tokens < config.max_position]
    if not fitting:
        raise ValueError(f"no cell fits the {config.max_position} positions that the model knows")
    for cell in cells:
        if cell not in fitting:
            say(f"{cell.name} is left out: the model knows {config.max_position} positions")
    return fitting


def kv_bytes(cells: Sequence[Cell], config: ModelConfig) -> int:
    return (max(cell.tokens for cell in cells) + SPARE) * kv_shape(config).block_bytes(1, KV_ELEMENT)
