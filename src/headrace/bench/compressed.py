"""Models that were compressed beside each other and the first: size, what each lost, speed in turns, memory."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.bandwidth import BandwidthProbe
from headrace.bench.cells import Cell
from headrace.bench.choices import answer, compare_answers
from headrace.bench.competitors import Competitors, fitting, heading, kv_bytes
from headrace.bench.interleave import Variant, measure
from headrace.bench.machine import Say
from headrace.bench.questions import ChoiceQuestion
from headrace.compress.format_cost import format_costs
from headrace.compress.judge import judge
from headrace.compress.report import report_path
from headrace.compress.texts import Texts, check_apart, draw_texts
from headrace.data.progress import Progress
from headrace.host import cores
from headrace.llm import LLM
from headrace.startup.loading import Opened, open_model
from headrace.stats.perplexity import perplexity
from headrace.weights.describe import describe

CELLS = "b1,b8,pp512"
TOKENS = 8192  # of the text, half of which are scored
BATCH = 4  # texts that are scored together
Results = dict[str, Any]


def open_all(models: Sequence[str]) -> dict[str, Opened]:
    """The models by name, the first being the one that others are held to. Raises ValueError for one that is named twice, and
    for other tokens than the first one's, besides what opening raises."""
    found: dict[str, Opened] = {}
    for model in models:
        opened = open_model(model)
        if any(one.path.samefile(opened.path) for one in found.values()):
            raise ValueError(f"{model} is named twice; leave one out")
        name = opened.path.name if opened.path.name not in found else str(opened.path)
        first = next(iter(found.values()), opened)
        if difference := opened.tokenizer.differs(first.tokenizer):
            raise ValueError(
                f"{model} has other tokens than {first.name} ({difference}): perplexities compare only with the same"
            )
        if opened.config.vocab_size != first.config.vocab_size:
            raise ValueError(
                f"{model} has a table of {opened.config.vocab_size} tokens and {first.name} one of others; leave it out"
            )
        if opened.config.encoder or opened.config.source is not None:
            raise ValueError(f"{model} is no decoder, and only these are measured here")
        found[name] = opened
    return found


def measure_compressed(
    models: dict[str, Opened],
    text: Path,
    tasks: Mapping[str, Sequence[ChoiceQuestion]],
    cells: Sequence[Cell],
    *,
    tell: Progress,
    say: Say,
    rounds: int = 5,
    tokens: int = TOKENS,
    threads: int | None = None,
    seed: int = 0,
    done: Callable[[Results], None] = lambda result: None,
) -> Results:
    """The figures as they stand in the JSON; `done` gets what there is after each model, and after each cell.

    Raises ValueError where a model was measured on passages of the text, as its report says, or the text is too short.
    """
    first = next(iter(models.values()))
    texts = draw_texts(first, str(text), tokens, seed, tell, judging=True)
    for name, opened in models.items():
        check_apart(_measured_on(opened.path), texts, name)
    result: Results = {**heading(first, rounds), "text": text.name, "tokens": sum(map(len, texts))}
    result["threads"] = threads or cores()
    result["models"] = {name: _size(opened) for name, opened in models.items()}
    right: dict[str, list[bool | None]] = {}
    for number, (name, opened) in enumerate(models.items()):
        say(f"{name}: what it says of the text" + (", and of questions" if tasks else ""))
        figures, own = _quality(opened, texts, tasks, threads, tell)
        right = right or own
        figures["tasks"] = {task: compare_answers(own[task], right[task]) for task in tasks}
        if number:
            tell.start(f"{name} beside {first.path.name}")
            figures["float32"] = asdict(judge(first.source, opened.source, texts, text.name))
            tell.finish()
        result["models"][name] |= figures
        done(result)
    _speeds(models, fitting(cells, first.config, say), result, tell, say, done)
    return result


def _measured_on(path: Path) -> list[str]:
    """Hashes of the passages that a model was compressed by, where its report lies beside it."""
    try:
        found = json.loads(report_path(path).read_text("utf-8")).get("passages", [])
    except (OSError, ValueError, AttributeError):
        return []
    return [one for one in found if isinstance(one, str)] if isinstance(found, list) else []


def _size(opened: Opened) -> Results:
    """Bytes and bits as the file has them, and the bytes of weights that a step reads."""
    file = describe(opened.path)
    (cost,) = (one.cost for one in format_costs(opened.path, [], errors=False))
    return {
        "path": str(opened.path),
        "how": file["compress"] or file["quantised"] or ", ".join(f"{count} {kind}" for kind, count in file["types"].items()),
        "bytes": file["bytes"],
        "bits": file["bits"],
        "parameters": file["parameters"],
        "read_bytes": cost.read_bytes,
    }


def _quality(
    opened: Opened, texts: Texts, tasks: Mapping[str, Sequence[ChoiceQuestion]], threads: int | None, tell: Progress
) -> tuple[Results, dict[str, list[bool | None]]]:
    """Perplexity as the engine runs it, of the second half of each text; and which questions are answered right."""
    llm = LLM(opened.path, speculate=None, threads=threads, max_num_seqs=BATCH * 4)
    logs: list[float] = []
    tell.start(f"{opened.path.name}: perplexity", len(texts), unit="texts")
    for at in range(0, len(texts), BATCH):
        some = texts[at : at + BATCH]
        for one, score in zip(some, llm.score(some), strict=True):
            logs += score.logprobs[-(len(one) // 2) :]
        tell.advance(len(some))
    tell.finish()
    right = {}
    for task, questions in tasks.items():
        tell.start(f"{opened.path.name}: {task}", len(questions), unit="questions")
        right[task] = answer(llm, questions, tell.advance)
        tell.finish()
    llm.close()
    value, error = perplexity(logs)
    return {"perplexity": value, "perplexity_error": error or 0.0, "scored": len(logs)}, right


def _speeds(
    models: dict[str, Opened],
    cells: Sequence[Cell],
    result: Results,
    tell: Progress,
    say: Say,
    done: Callable[[Results], None],
) -> None:
    """Every model a process, all of them asked in turns with the same prompts; fills in the result."""
    with ExitStack() as stack:
        competitors = Competitors()
        for name, opened in models.items():
            task = {"threads": result["threads"], "kv_bytes": kv_bytes(cells, opened.config)}
            competitors.load(stack, name, "", opened.path, {}, task, say)
            about = competitors.about[name]
            result["models"][name] |= {"load_s": about["load_s"], "about": about["about"], "cells": {}}
        probe = BandwidthProbe()
        vocabulary = min(opened.tokenizer.vocab_size for opened in models.values())
        seen = []
        tell.start("measuring", len(cells), unit="cells")
        for cell in cells:
            state = measure(competitors.variants, cell, result["rounds"], vocabulary, probe.gb_per_s)
            seen.append(median(state.bandwidth))
            for variant in competitors.variants:
                made = result["models"][variant.engine]
                made["cells"][cell.name] = _cell(variant, competitors.variants[0], cell)
                made["peak_rss_mb"] = variant.peak_rss_mb
            result |= {"bandwidth_gb_s": median(seen), "others_cpu": median(state.others_cpu)}
            done(result)
            tell.advance(1)
        tell.finish()


def _cell(variant: Variant, first: Variant, cell: Cell) -> Results:
    """Tokens/s, and the ratio to the first model's of the same round: medians, and the least and the greatest."""
    speeds = variant.samples[cell.name]
    ratios = [mine / theirs for mine, theirs in zip(speeds, first.samples[cell.name], strict=True)]
    return {
        "tokens_per_s": median(speeds),
        "least": min(speeds),
        "most": max(speeds),
        "ratio": median(ratios),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
    }
