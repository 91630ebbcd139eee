"""Compare compressed models with the first model: size, quality, speed measured in alternation, memory."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from headrace.bench.competitors import Competitors, fitting, heading, kv_bytes
from headrace.bench.interleave import Cell, Variant, measure
from headrace.bench.machine import BandwidthProbe, Say
from headrace.bench.questions import ChoiceQuestion, answer, compare_answers
from headrace.compress.format_cost import format_costs
from headrace.compress.judge import judge
from headrace.compress.report import report_path
from headrace.compress.texts import Texts, check_apart, draw_texts
from headrace.data.progress import Progress
from headrace.host import cores
from headrace.llm import LLM
from headrace.startup.loading import Opened, open_model
from headrace.stats.paired_ratio import perplexity_of_texts, perplexity_ratio
from headrace.weights.describe import describe

CELLS = "b1,b8,pp512"
# Tokens of the text, of which half are scored.
TOKENS = 8192
# Texts that are scored together.
BATCH = 4
Results = dict[str, Any]


def open_all(models: Sequence[str]) -> dict[str, Opened]:
    """Open the models, by name; the others are compared with the first.

    Raises ValueError if a model is named twice, is no decoder, has another vocabulary than the first, or cannot be opened.
    """
    models_by_name: dict[str, Opened] = {}
    for model in models:
        opened = open_model(model)
        if any(other.path.samefile(opened.path) for other in models_by_name.values()):
            raise ValueError(f"{model} is named twice; leave one out")
        name = opened.path.name if opened.path.name not in models_by_name else str(opened.path)
        first = next(iter(models_by_name.values()), opened)
        if difference := opened.tokenizer.differs(first.tokenizer):
            raise ValueError(
                f"{model} has other tokens than {first.name} ({difference}): perplexities compare only with the same"
            )
        if opened.config.vocab_size != first.config.vocab_size:
            raise ValueError(
                f"{model} has a table of {opened.config.vocab_size} tokens and {first.name} one of others; leave it out"
            )
        if opened.config.encoder or opened.config.source is not None:
            raise ValueError(f"{model} is not a decoder; only decoders are measured here")
        models_by_name[name] = opened
    return models_by_name


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
    """Content of the JSON file. done: called with the result so far after each model and each cell.

    Raises ValueError if the text is too short, or if a model was calibrated on passages of it, as its report shows.
    """
    first = next(iter(models.values()))
    texts = draw_texts(first, str(text), tokens, seed, tell, judging=True)
    for name, opened in models.items():
        check_apart(_calibration_passages(opened.path), texts, name)
    result: Results = {**heading(first, rounds), "text": text.name, "tokens": sum(map(len, texts))}
    result["threads"] = threads or cores()
    result["models"] = {name: _size(opened) for name, opened in models.items()}
    right: dict[str, list[bool | None]] = {}
    before: list[list[float]] = []
    for number, (name, opened) in enumerate(models.items()):
        say(f"{name}: scoring the text" + (" and questions" if tasks else ""))
        figures, own, logprobs = _quality(opened, texts, tasks, threads, tell)
        right, before = right or own, before or logprobs
        figures["of_first"], figures["of_first_error"] = perplexity_ratio(logprobs, before)
        figures["tasks"] = {task: compare_answers(own[task], right[task]) for task in tasks}
        if number:
            tell.start(f"{name} compared with {first.path.name}")
            figures["float32"] = asdict(judge(first.source, opened.source, texts, text.name))
            tell.finish()
        result["models"][name] |= figures
        done(result)
    _speeds(models, fitting(cells, first.config, say), result, tell, say, done)
    return result


def _calibration_passages(path: Path) -> list[str]:
    """Hashes of the passages that a model was calibrated on, from the report next to it; empty without a report."""
    try:
        passages = json.loads(report_path(path).read_text("utf-8")).get("passages", [])
    except (OSError, ValueError, AttributeError):
        return []
    return [passage for passage in passages if isinstance(passage, str)] if isinstance(passages, list) else []


def _size(opened: Opened) -> Results:
    """Size figures of a model's file, and the bytes of weights that a step reads."""
    file = describe(opened.path)
    (cost,) = (row.cost for row in format_costs(opened.path, [], errors=False))
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
) -> tuple[Results, dict[str, list[bool | None]], list[list[float]]]:
    """Perplexity of the second half of each text, which questions of each task are answered right, and the log-probabilities
    of each text; in the engine."""
    llm = LLM(opened.path, speculate=None, threads=threads, max_num_seqs=BATCH * 4)
    logs: list[list[float]] = []
    tell.start(f"{opened.path.name}: perplexity", len(texts), unit="texts")
    for at in range(0, len(texts), BATCH):
        some = texts[at : at + BATCH]
        for one, score in zip(some, llm.score(some), strict=True):
            logs.append(score.logprobs[-(len(one) // 2) :])
        tell.advance(len(some))
    tell.finish()
    right = {}
    for task, questions in tasks.items():
        tell.start(f"{opened.path.name}: {task}", len(questions), unit="questions")
        right[task] = answer(llm, questions, tell.advance)
        tell.finish()
    llm.close()
    value, error = perplexity_of_texts(logs)
    return {"perplexity": value, "perplexity_error": error, "scored": sum(map(len, logs))}, right, logs


def _speeds(
    models: dict[str, Opened],
    cells: Sequence[Cell],
    result: Results,
    tell: Progress,
    say: Say,
    done: Callable[[Results], None],
) -> None:
    """Add speed and memory to `result`: one process a model, the same prompts for all, in alternation."""
    with ExitStack() as stack:
        competitors = Competitors()
        for name, opened in models.items():
            task = {"threads": result["threads"], "kv_bytes": kv_bytes(cells, opened.config)}
            competitors.load(stack, name, "", opened.path, {}, task, say)
            about = competitors.about[name]
            result["models"][name] |= {"load_s": about["load_s"], "about": about["about"], "cells": {}}
        probe = BandwidthProbe()
        vocabulary = min(opened.tokenizer.vocab_size for opened in models.values())
        bandwidths = []
        tell.start("measuring", len(cells), unit="cells")
        for cell in cells:
            state = measure(competitors.variants, cell, result["rounds"], vocabulary, probe.gb_per_s)
            bandwidths.append(median(state.bandwidth))
            for variant in competitors.variants:
                figures = result["models"][variant.engine]
                figures["cells"][cell.name] = _cell(variant, competitors.variants[0], cell)
                figures["peak_rss_mb"] = variant.peak_rss_mb
            result |= {"bandwidth_gb_s": median(bandwidths), "others_cpu": median(state.others_cpu)}
            done(result)
            tell.advance(1)
        tell.finish()


def _cell(variant: Variant, first: Variant, cell: Cell) -> Results:
    """Tokens/s, and the ratio to the first model in the same round: median, least and greatest."""
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
