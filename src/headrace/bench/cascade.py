"""A cascade of two models on questions with known answers: what a score tells, what deferring costs and gives, a threshold."""

import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.data.params import SamplingParams
from headrace.data.structured import StructuredOutputs
from headrace.llm import LLM
from headrace.stats.calibration import Calibration, calibrate
from headrace.stats.confidence import auroc, deferrals, losses_against
from headrace.workflows.cascade import Score, surety, text_of, tokens_used
from headrace.workflows.consistency import last_number
from headrace.workflows.prompts import Prompt, lines_of, read_prompts, tokens_of

GRID = tuple(1.0 - i / 50 for i in range(51))  # thresholds, the safest first: 1 defers what is not certain
RESAMPLES = 2000
SHARE = 0.2  # of the prompts, at which deferring is held against chance
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda text, known: text.strip().casefold() == known.strip().casefold(),
    "number": lambda text, known: last_number(text) == last_number(known),
    "within": lambda text, known: known.strip().casefold() in text.casefold(),
}


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, its known answer, and the texts that it is chosen from, where there are such."""

    prompt: Prompt
    answer: str
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """What a model said to the questions: which are right, how sure it was, tokens a question and seconds."""

    right: list[bool]
    scores: list[float]
    tokens: float
    seconds: float


def read_questions(path: Path, most: int | None = None) -> list[Question]:
    """JSON lines with "prompt" (or "messages"), "answer", and perhaps "choices". Raises ValueError, naming the line."""
    prompts = read_prompts(path, most)
    lines = [line for line in lines_of(path) if line.strip()]
    found = []
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=False), 1):
        fields = json.loads(line)
        known, choices = fields.get("answer"), fields.get("choices") or ()
        if not isinstance(known, str | int) or (choices and str(known) not in choices):
            raise ValueError(f'question {number} has no "answer" that is a text' + (", one of its choices" if choices else ""))
        found.append(Question(prompt, str(known), tuple(choices)))
    return found


def ask(llm: LLM, questions: Sequence[Question], score: Score, params: SamplingParams, match: str) -> Answered:
    """All questions of one model, in one batch, through its chat template."""
    each = [_params(question, score, params) for question in questions]
    start = time.perf_counter()
    outputs = llm.generate([tokens_of(llm, question.prompt, chat=True) for question in questions], each)
    seconds = time.perf_counter() - start
    right = [
        output.error is None and MATCHES["exact" if question.choices else match](text_of(output, score), question.answer)
        for output, question in zip(outputs, questions, strict=True)
    ]
    tokens = sum(map(tokens_used, outputs)) / len(outputs)
    return Answered(right, [surety(output, score) for output in outputs], tokens, seconds)


def _params(question: Question, score: Score, params: SamplingParams) -> SamplingParams:
    """A choice is scored among the choices, as its mask leaves them."""
    form = StructuredOutputs(choice=question.choices) if question.choices else None
    if score == "vote":
        return params.replace(structured_outputs=form)
    return params.replace(structured_outputs=form, logprobs=0, logprobs_mode="processed" if form else "raw")


def judge(
    small: Answered, large: Answered, *, score: Score, price: float, delta: float, epsilon: float, seed: int = 0
) -> dict[str, Any]:
    """The figures of the cascade. `price`: what a token of the small model costs where one of the large costs 1.

    The threshold is chosen on one half of the questions, and read on the other.
    """
    costs = price * small.tokens, large.tokens
    order = list(range(len(small.right)))
    random.Random(seed).shuffle(order)
    half = order[: len(order) // 2], order[len(order) // 2 :]
    chosen = calibrate(losses_against(*_of(half[0], small, large)), GRID, delta=delta, epsilon=epsilon)
    return {
        "n": len(order),
        "score": score,
        "small": _share(small.right),
        "large": _share(large.right),
        "auroc": auroc(small.scores, small.right),
        "break_even": 1 - costs[0] / costs[1],
        "curve": [asdict(one) for one in deferrals(small.scores, small.right, large.right, costs)],
        "at_20": _against_chance(small, large, costs, seed),
        "calibration": asdict(chosen),
        "held_out": _held_out(chosen, half[1], small, large, costs),
        "seconds": {"small": small.seconds, "large": large.seconds},
    }


def _of(which: Sequence[int], small: Answered, large: Answered) -> tuple[list[float], list[bool], list[bool]]:
    return [small.scores[i] for i in which], [small.right[i] for i in which], [large.right[i] for i in which]


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)


def _against_chance(small: Answered, large: Answered, costs: tuple[float, float], seed: int) -> dict[str, float]:
    """Accuracy above a choice by chance where a fifth is deferred, and the share of resamples of the questions in which it is
    not above it."""
    rng, gains = random.Random(seed), []
    everything = range(len(small.right))
    for number in range(RESAMPLES + 1):
        which = everything if number == 0 else [rng.choice(everything) for _ in everything]
        (one,) = deferrals(*_of(which, small, large), costs, (SHARE,))
        gains.append(one.accuracy - one.by_chance)
    return {"gain": gains[0], "p": sum(gain <= 0 for gain in gains[1:]) / RESAMPLES}


def _held_out(
    chosen: Calibration, which: Sequence[int], small: Answered, large: Answered, costs: tuple[float, float]
) -> dict[str, float]:
    """Of the questions that did not choose the threshold; without one everything is deferred."""
    scores, mine, theirs = _of(which, small, large)
    keeps = [chosen.threshold is not None and score >= chosen.threshold for score in scores]
    right = [a if keep else b for keep, a, b in zip(keeps, mine, theirs, strict=True)]
    lost = [keep and not a and b for keep, a, b in zip(keeps, mine, theirs, strict=True)]
    deferred = 1 - _share(keeps)
    return {
        "accuracy": _share(right),
        "large": _share(theirs),
        "loss": _share(lost),
        "deferred": deferred,
        "cost": costs[0] / costs[1] + deferred,
    }
