"""Speculation of Headrace and of other engines: `python -m benchmarks.peers.speculation`.

Two kinds: with a draft model, and by prompt lookup.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.command import run
from benchmarks.peers import llamacpp_programs
from benchmarks.peers.engines import ENGINES, WORKERS, PeerEngine, PeerError
from headrace.bench.competitors import KV_ELEMENT, OURS, SOURCE, SPARE_TOKENS, heading, start_worker, worker_command
from headrace.bench.interleave import Cell, Engine, Variant, judge, measure
from headrace.bench.machine import BandwidthProbe, Say
from headrace.bench.worker import EngineProcess
from headrace.cli.options import writable
from headrace.cli.output import print_table, say, status
from headrace.host import cores
from headrace.kv.layout import all_kv_shapes
from headrace.startup.loading import Opened, open_model
from headrace.weights.store import home
from headrace.workflows.prompts import Prompt, read_prompts

KINDS = ("draft", "lookup")
LLAMA, OPENVINO = "llama.cpp", "openvino"
REWRITER = PeerEngine("gguf", "requantize.py", ("gguf==0.19.0",), {})
# Settings by kind and name; the fastest counts in each cell.
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
    """Prompts of one task; each round runs the next one."""

    ids: tuple[tuple[int, ...], ...] = ()

    def prompts(self, vocab_size: int, seed: object) -> list[list[int]]:
        return [list(self.ids[int(str(seed)) % len(self.ids)])]


@dataclass(slots=True)
class EngineWithOptions:
    """A worker that receives `options` with each measurement, and texts in place of tokens if `texts` has them by prompt.

    First tokens that it returns as texts are encoded.
    """

    worker: Engine
    options: dict[str, Any] = field(default_factory=dict)
    texts: dict[tuple[int, ...], str] = field(default_factory=dict)
    encode: Callable[[str], list[int]] = lambda text: []

    def ask(self, **question: Any) -> dict[str, Any]:
        if self.texts:
            question["prompts"] = [self.texts[tuple(prompt)] for prompt in question["prompts"]]
        answer = self.worker.ask(**question, options=self.options)
        answer["first"] = [(self.encode(token) or [-1])[0] if isinstance(token, str) else token for token in answer["first"]]
        return answer


@dataclass(slots=True)
class Lineup:
    """The variants by kind of speculation, ours first, and what their workers are started with."""

    opened: Opened
    draft: Path
    texts: dict[tuple[int, ...], str]
    load: Callable[..., EngineProcess]
    say: Say
    context: int
    variants: dict[str, list[Variant]] = field(default_factory=lambda: {kind: [] for kind in KINDS})

    def add_ours(self, kinds: Sequence[str]) -> None:
        command = worker_command(WORKERS / "ours_speculation.py")
        for kind in kinds:
            setting = {"draft": str(self.draft)} if kind == "draft" else {}
            worker = self.load(f"{OURS} {kind}", command, setting, SOURCE)
            self.variants[kind].append(Variant(OURS, "", EngineWithOptions(worker)))

    def add_llama(self, kinds: Sequence[str]) -> None:
        """Add all settings of llama.cpp with one worker: it starts a process for each measurement."""
        command = worker_command(WORKERS / "llamacpp_programs.py")
        worker = self.load(f"{LLAMA} speculation", command, {"context": self.context}, {})
        encode = partial(self.opened.tokenizer.encode, add_special=False)
        for kind in kinds:
            name, draft = (llamacpp_programs.DRAFT, str(self.draft)) if kind == "draft" else (llamacpp_programs.LOOKUP, "")
            for setting, most in LLAMA_SETTINGS[kind].items():
                options = {"program": str(llamacpp_programs.program(name)), "draft": draft, "most": most}
                self.variants[kind].append(Variant(LLAMA, setting, EngineWithOptions(worker, options, self.texts, encode)))

    def add_openvino(self, kinds: Sequence[str]) -> None:
        engine = ENGINES[OPENVINO]
        command = worker_command(WORKERS / "openvino_speculation.py", engine.python)
        for kind in kinds:
            draft = str(openvino_draft(self.draft, self.say)) if kind == "draft" else ""
            worker = self.load(f"{OPENVINO} {kind}", command, {"draft": draft}, {})
            for setting, options in OPENVINO_SETTINGS[kind].items():
                self.variants[kind].append(Variant(OPENVINO, setting, EngineWithOptions(worker, options)))


def make_ready(engines: Sequence[str], install: bool, say: Say) -> None:
    """Install and build what the engines need if `install`. Raises PeerError if something is missing otherwise."""
    if unknown := [name for name in engines if name not in (LLAMA, OPENVINO)]:
        raise PeerError(f"{unknown[0]!r} has no speculation to compare with; choose from {LLAMA}, {OPENVINO}")
    if LLAMA in engines:
        llamacpp_programs.make_ready(install, say)
    for engine in (ENGINES[OPENVINO], REWRITER) if OPENVINO in engines else ():
        if not engine.installed:
            if not install:
                raise PeerError(f"{engine.name} is not installed under {engine.folder}; install it with --install")
            engine.install(say)


def openvino_draft(path: Path, say: Say) -> Path:
    """Folder of the draft model in OpenVINO's format, converted once through Q8_0, as OpenVINO does not read every GGUF type.

    Raises PeerError.
    """
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
    """Measure every task with each kind of speculation: batch 1, greedy, tokens/s after the first token, a prompt a round.

    The result is that of `comparison.compare`, with a cell for each task and kind. done: called after each cell with the
    result so far. Raises PeerError and ValueError if an engine cannot be loaded or fails.
    """
    opened, small = open_model(model), open_model(draft)
    opened.source.close()
    small.source.close()
    texts: dict[tuple[int, ...], str] = {}
    cells = {task: _cell(opened, task, prompts, new_tokens, texts) for task, prompts in tasks.items()}
    longest = max(cell.prompt for cell in cells.values()) + new_tokens
    shapes = [shape for one in (opened, small) for shape in all_kv_shapes(one.config)]
    kv_bytes = sum(shape.block_bytes(longest + SPARE_TOKENS, KV_ELEMENT) for shape in shapes)
    task_of_all = {"threads": threads or cores(), "kv_bytes": kv_bytes}
    begin = heading(opened, rounds)
    result: dict[str, Any] = {"model": begin.pop("model"), "draft": small.path.name, **begin}
    result |= {"new_tokens": new_tokens, "engines": {}, "cells": {}, **task_of_all}
    with ExitStack() as stack:

        def load(name: str, command: Sequence[str], setting: dict[str, Any], env: dict[str, str]) -> EngineProcess:
            worker = start_worker(stack, name, command, env)
            about = worker.ask(model=str(opened.path), setting=setting, **task_of_all)
            result["engines"][name] = {key: about[key] for key in ("about", "load_s", "peak_rss_mb")}
            say(f"{name}: {about['about']}, loaded in {about['load_s']:.1f} s")
            return worker

        lineup = Lineup(opened, small.path, texts, load, say, context=longest + 256)
        lineup.add_ours(kinds)
        for engine in engines:
            (lineup.add_llama if engine == LLAMA else lineup.add_openvino)(kinds)
        probe = BandwidthProbe()
        for kind in kinds:
            for task, cell in cells.items():
                ours, *others = lineup.variants[kind]
                state = measure([ours, *others], cell, rounds, opened.tokenizer.vocab_size, probe.gb_per_s)
                result["cells"][f"{task} {kind}"] = judge(ours, others, cell, state)
                done(result)
    return result


def _cell(opened: Opened, task: str, prompts: Sequence[Prompt], new_tokens: int, texts: dict[tuple[int, ...], str]) -> TaskCell:
    """Cell of a task's prompts, rendered with the chat template. Adds each rendered text to `texts`, by its tokens."""
    rendered = [opened.template.render(_messages(prompt), add_generation_prompt=True) for prompt in prompts]
    ids = tuple(tuple(opened.tokenizer.encode(text, add_special=False)) for text in rendered)
    texts |= dict(zip(ids, rendered, strict=True))
    return TaskCell(task, 1, max(map(len, ids)), new_tokens, ids=ids)


def _messages(prompt: Prompt) -> list[dict[str, Any]]:
    return prompt if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]


def speculate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A GGUF file, or a catalog name that has one.")],
    draft: Annotated[str, typer.Option(help="A smaller model of the same vocabulary, in GGUF.")],
    source: Annotated[
        list[Path], typer.Option("--input", "-i", exists=True, dir_okay=False, help="Prompts, one a line: a task each file.")
    ],
    engines: Annotated[str, typer.Option(help="Beside whom: openvino, llama.cpp.")] = "openvino,llama.cpp",
    install: Annotated[bool, typer.Option("--install", help="Install or build what is missing.")] = False,
    kinds: Annotated[str, typer.Option(help="draft, lookup, or both.")] = "draft,lookup",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of every engine in every cell, a prompt each.")] = 5,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=2, help="Tokens of each answer at most.")] = 64,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of every engine; every core where not given.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Speculation with a draft model and by prompt lookup beside OpenVINO GenAI's and llama.cpp's, in turns, in one run.

    Batch 1, greedy, tokens/s after the first token. Other engines are tried with two settings each, and the better one counts.
    """
    others = [name.strip() for name in engines.split(",") if name.strip()]
    wanted = [name.strip() for name in kinds.split(",") if name.strip()]
    if not wanted or set(wanted) - set(KINDS):
        raise typer.BadParameter(f"--kinds takes {' and '.join(KINDS)}, not {kinds!r}")
    make_ready(others, install, say)
    tasks = {file.stem: read_prompts(file, rounds) for file in source}

    def done(result: dict[str, Any]) -> None:
        name, figures = list(result["cells"].items())[-1]
        say(f"{name}: {figures['tokens_per_s']:.1f} tokens/s" + (f", {figures['ratio']:.2f} times the best" if others else ""))
        if json_file is not None:
            json_file.write_text(json.dumps(result, indent=2) + "\n")

    status().start("measuring")
    result = compare(
        model,
        draft,
        tasks,
        engines=others,
        kinds=wanted,
        rounds=rounds,
        new_tokens=max_tokens,
        threads=threads,
        say=say,
        done=done,
    )
    columns = ("task", "headrace", *others, "ratio to the best", "interval", "same first token", "other load")
    print_table(columns, [_row(name, figures, others) for name, figures in result["cells"].items()])


def _row(cell: str, figures: dict[str, Any], engines: list[str]) -> tuple[str, ...]:
    peers = figures["peers"]
    speeds = [f"{peers[name]['tokens_per_s']:.1f} ({peers[name]['setting']})" for name in engines]
    ratio = (f"{figures['ratio']:.2f}", "{:.2f} to {:.2f}".format(*figures["interval"])) if peers else ("-", "-")
    same = " ".join(f"{peers[name]['same_first_token']:.0%}" for name in engines)
    return (cell, f"{figures['tokens_per_s']:.1f}", *speeds, *ratio, same, f"{figures['others_cpu']:.0%}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    examples = (("MODEL --draft SMALLER -i code.txt --install", "Beside two others."),)
    return run(speculate, "peers.speculation", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
