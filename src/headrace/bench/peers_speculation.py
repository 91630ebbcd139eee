"""Speculation beside what a person could install instead: a draft model and prompt lookup, the same prompts, in turns."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from headrace.bench import programs
from headrace.bench.bandwidth import BandwidthProbe
from headrace.bench.cells import Cell
from headrace.bench.engines import ENGINES, WORKERS, Engine, PeerError, Say
from headrace.bench.machine import commit, machine
from headrace.bench.peers import KV_ELEMENT, OURS, SPARE
from headrace.bench.rounds import Asked, Party, judge, measure
from headrace.bench.worker import Worker
from headrace.host import cores
from headrace.kv.layout import kv_shape
from headrace.startup.loading import Opened, open_model
from headrace.weights.store import home
from headrace.workflows.prompts import Prompt

KINDS = ("draft", "lookup")
LLAMA, OPENVINO = "llama.cpp", "openvino"
REWRITER = Engine("gguf", "requantize.py", ("gguf==0.19.0",), {})
# What is tried, by kind and name; the best counts in each cell.
LLAMA_SETTINGS = {"draft": {"3 tokens": 3, "8 tokens": 8}, "lookup": {"3 tokens": 3, "8 tokens": 8}}
OPENVINO_SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "draft": {"3 tokens": {"num_assistant_tokens": 3}, "5 tokens": {"num_assistant_tokens": 5}},
    "lookup": {
        "5 tokens": {"num_assistant_tokens": 5, "max_ngram_size": 3},
        "10 tokens": {"num_assistant_tokens": 10, "max_ngram_size": 3},
    },
}


@dataclass(frozen=True, slots=True)
class TaskCell(Cell):
    """Prompts of one task, one a round."""

    ids: tuple[tuple[int, ...], ...] = ()

    def prompts(self, vocab_size: int, seed: object) -> list[list[int]]:
        return [list(self.ids[int(str(seed)) % len(self.ids)])]


@dataclass(slots=True)
class Asking:
    """A worker that is asked with options of its own; with `texts`, by prompt, in texts. Answered texts become tokens."""

    worker: Asked
    options: dict[str, Any] = field(default_factory=dict)
    texts: dict[tuple[int, ...], str] = field(default_factory=dict)
    encode: Callable[[str], list[int]] = lambda text: []

    def ask(self, **question: Any) -> dict[str, Any]:
        if self.texts:
            question["prompts"] = [self.texts[tuple(prompt)] for prompt in question["prompts"]]
        answer = self.worker.ask(**question, options=self.options)
        answer["first"] = [(self.encode(one) or [-1])[0] if isinstance(one, str) else one for one in answer["first"]]
        return answer


@dataclass(slots=True)
class Bench:
    """What all parties are given, and who takes part, by kind; ours first."""

    opened: Opened
    draft: Path
    texts: dict[tuple[int, ...], str]
    load: Callable[..., Worker]
    say: Say
    context: int
    parties: dict[str, list[Party]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def add_ours(self, kinds: Sequence[str]) -> None:
        command = [sys.executable, "-P", str(WORKERS / "serve.py"), str(WORKERS / "ours_speculation.py")]
        for kind in kinds:
            setting = {"draft": str(self.draft)} if kind == "draft" else {}
            worker = self.load(f"{OURS} {kind}", command, setting, {"PYTHONPATH": str(WORKERS.parents[2])})
            self.parties[kind].append(Party(OURS, "", Asking(worker)))

    def add_llama(self, kinds: Sequence[str]) -> None:
        """One worker for all: each question is a process."""
        command = [sys.executable, "-P", str(WORKERS / "serve.py"), str(WORKERS / "llamacpp_programs.py")]
        worker = self.load(f"{LLAMA} speculation", command, {"context": self.context}, {})
        encode = partial(self.opened.tokenizer.encode, add_special=False)
        for kind in kinds:
            name, draft = (programs.DRAFT, str(self.draft)) if kind == "draft" else (programs.LOOKUP, "")
            for setting, most in LLAMA_SETTINGS[kind].items():
                options = {"program": str(programs.program(name)), "draft": draft, "most": most}
                self.parties[kind].append(Party(LLAMA, setting, Asking(worker, options, self.texts, encode)))

    def add_openvino(self, kinds: Sequence[str]) -> None:
        engine = ENGINES[OPENVINO]
        command = [str(engine.python), "-P", str(WORKERS / "serve.py"), str(WORKERS / "openvino_speculation.py")]
        for kind in kinds:
            draft = str(openvino_draft(self.draft, self.say)) if kind == "draft" else ""
            worker = self.load(f"{OPENVINO} {kind}", command, {"draft": draft}, {})
            for setting, options in OPENVINO_SETTINGS[kind].items():
                self.parties[kind].append(Party(OPENVINO, setting, Asking(worker, options)))


def make_ready(engines: Sequence[str], install: bool, say: Say) -> None:
    """Install and build what these engines need, or raise PeerError."""
    if unknown := [name for name in engines if name not in (LLAMA, OPENVINO)]:
        raise PeerError(f"{unknown[0]!r} has no speculation to compare with; choose from {LLAMA}, {OPENVINO}")
    if LLAMA in engines:
        programs.make_ready(install, say)
    for engine in (ENGINES[OPENVINO], REWRITER) if OPENVINO in engines else ():
        if not engine.installed:
            if not install:
                raise PeerError(f"{engine.name} is not installed under {engine.folder}; install it with --install")
            engine.install(say)


def openvino_draft(path: Path, say: Say) -> Path:
    """The draft model in OpenVINO's form, made once: it does not read every type of a GGUF file, but Q8_0. Raises PeerError."""
    folder = home() / "peers" / "models" / f"{path.stem}-{path.stat().st_size}" / "openvino-q8_0"
    if folder.exists():
        return folder
    say(f"making {folder} for {OPENVINO}")
    staging, log = folder.with_name(f".{folder.name}.partial"), ENGINES[OPENVINO].folder / "convert.log"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    rewritten = staging / "draft.gguf"
    steps = (
        [str(REWRITER.python), "-P", str(WORKERS / "requantize.py"), str(path), str(rewritten)],
        [str(ENGINES[OPENVINO].python), "-P", str(WORKERS / "openvino_convert.py"), str(rewritten)],
    )
    with log.open("wb") as lines:
        for step in steps:
            if subprocess.run(step, stdout=lines, stderr=lines, check=False).returncode:
                raise PeerError(f"the draft model of {OPENVINO} cannot be made; {log} says why")
    rewritten.unlink()
    staging.rename(folder)
    return folder


def compare(
    model: str,
    draft: str,
    tasks: Mapping[str, Sequence[Prompt]],
    *,
    engines: Sequence[str] = (OPENVINO, LLAMA),
    kinds: Sequence[str] = KINDS,
    rounds: int = 5,
    new_tokens: int = 64,
    threads: int | None = None,
    say: Say = lambda line: None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Every task with a draft model and by prompt lookup: batch 1, greedy, tokens/s after the first token, a prompt a round.

    The figures are those of `bench peers`, a cell for each task and kind. `done` gets what there is after every cell.

    Raises PeerError and WorkerError where an engine cannot take part.
    """
    opened, small = open_model(model), open_model(draft)
    opened.source.close()
    small.source.close()
    texts: dict[tuple[int, ...], str] = {}
    cells = {task: _cell(opened, task, prompts, new_tokens, texts) for task, prompts in tasks.items()}
    longest = max(cell.prompt for cell in cells.values()) + new_tokens
    kv_bytes = sum(kv_shape(each.config).block_bytes(longest + SPARE, KV_ELEMENT) for each in (opened, small))
    task_of_all = {"threads": threads or cores(), "kv_bytes": kv_bytes}
    result: dict[str, Any] = {"model": opened.path.name, "draft": small.path.name, "machine": machine(), "commit": commit()}
    result |= {"rounds": rounds, "new_tokens": new_tokens, "engines": {}, "cells": {}, **task_of_all}
    with ExitStack() as stack:

        def load(name: str, command: Sequence[str], setting: dict[str, Any], env: dict[str, str]) -> Worker:
            logs = home() / "peers" / "logs"
            logs.mkdir(parents=True, exist_ok=True)
            worker = Worker(command, logs / f"{name.replace(' ', '-')}.log", env)
            stack.callback(worker.close)
            about = worker.ask(model=str(opened.path), setting=setting, **task_of_all)
            result["engines"][name] = {key: about[key] for key in ("about", "load_s", "peak_rss_mb")}
            say(f"{name}: {about['about']}, loaded in {about['load_s']:.1f} s")
            return worker

        bench = Bench(opened, small.path, texts, load, say, context=longest + 256)
        bench.add_ours(kinds)
        for engine in engines:
            (bench.add_llama if engine == LLAMA else bench.add_openvino)(kinds)
        probe = BandwidthProbe()
        for kind in kinds:
            for task, cell in cells.items():
                ours, *others = bench.parties[kind]
                around = measure([ours, *others], cell, rounds, opened.tokenizer.vocab_size, probe.gb_per_s)
                result["cells"][f"{task} {kind}"] = judge(ours, others, cell, around)
                done(result)
    return result


def _cell(opened: Opened, task: str, prompts: Sequence[Prompt], new_tokens: int, texts: dict[tuple[int, ...], str]) -> TaskCell:
    """A task's prompts through the chat template; `texts` gets them as texts, by their tokens."""
    rendered = [opened.template.render(_messages(prompt), add_generation_prompt=True) for prompt in prompts]
    ids = tuple(tuple(opened.tokenizer.encode(text, add_special=False)) for text in rendered)
    texts |= dict(zip(ids, rendered, strict=True))
    return TaskCell(task, 1, max(map(len, ids)), new_tokens, ids=ids)


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    return prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
