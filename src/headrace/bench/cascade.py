"""Measure a cascade of two models on questions with known answers: quality of the score, cost of deferring, a threshold."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.bench.figures import Column
from headrace.bench.questions import Question
from headrace.data.params import SamplingParams
from headrace.data.structured import StructuredOutputs
from headrace.llm import LLM
from headrace.stats.calibration import Calibration, calibrate
from headrace.stats.confidence import auroc, deferrals, losses_against
from headrace.workflows.cascade import Score, confidence, text_of, tokens_used
from headrace.workflows.consistency import last_number
from headrace.workflows.prompts import tokens_of

# Thresholds, the safest first: 1 defers every answer that is not certain.
GRID = tuple(1.0 - i / 50 for i in range(51))
RESAMPLES = 2000
# Share of deferred prompts at which deferring by score is compared with deferring at random.
SHARE = 0.2
COLUMNS = (
    Column("deferred", "{share:.3f}"),
    Column("right", "{accuracy:.3f}"),
    Column("by chance", "{by_chance:.3f}"),
    Column("cost a question", "{cost:.3f}"),
)
MATCHES: dict[str, Callable[[str, str], bool]] = {
    "exact": lambda text, known: text.strip().casefold() == known.strip().casefold(),
    "number": lambda text, known: last_number(text) == last_number(known),
    "within": lambda text, known: known.strip().casefold() in text.casefold(),
}


@dataclass(frozen=True, slots=True)
class ModelAnswers:
    """Answers of one model: which are right, the confidence of each, tokens per question, seconds for all."""

    right: list[bool]
    scores: list[float]
    tokens: float
    seconds: float


def answer(llm: LLM, questions: Sequence[Question], score: Score, params: SamplingParams, match: str) -> ModelAnswers:
    """Run all questions in one batch through the model's chat template, and rate the answers."""
    by_question = [_params(question, score, params) for question in questions]
    start = time.perf_counter()
    outputs = llm.generate([tokens_of(llm, question.prompt, chat=True) for question in questions], by_question)
    seconds = time.perf_counter() - start
    right = [
        output.error is None and MATCHES["exact" if question.choices else match](text_of(output, score), question.answers[0])
        for output, question in zip(outputs, questions, strict=True)
    ]
    tokens = sum(map(tokens_used, outputs)) / len(outputs)
    return ModelAnswers(right, [confidence(output, score) for output in outputs], tokens, seconds)


def _params(question: Question, score: Score, params: SamplingParams) -> SamplingParams:
    """Parameters of one question. The logprobs of a choice are those after masking, among its choices."""
    form = StructuredOutputs(choice=question.choices) if question.choices else None
    if score == "vote":
        return params.replace(structured_outputs=form)
    return params.replace(structured_outputs=form, logprobs=0, logprobs_mode="processed" if form else "raw")


def judge(
    small: ModelAnswers, large: ModelAnswers, *, score: Score, price: float, delta: float, epsilon: float, seed: int = 0
) -> dict[str, Any]:
    """Figures of the cascade. price: cost of a token of the small model in tokens of the large one.

    The threshold is chosen on one half of the questions and tested on the other.
    delta, epsilon: bound on the loss, and the probability that it does not hold.
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
        "curve": [asdict(point) for point in deferrals(small.scores, small.right, large.right, costs)],
        "at_20": _against_chance(small, large, costs, seed),
        "calibration": asdict(chosen),
        "held_out": _held_out(chosen, half[1], small, large, costs),
        "seconds": {"small": small.seconds, "large": large.seconds},
    }


def _of(which: Sequence[int], small: ModelAnswers, large: ModelAnswers) -> tuple[list[float], list[bool], list[bool]]:
    return [small.scores[i] for i in which], [small.right[i] for i in which], [large.right[i] for i in which]


def _share(right: Sequence[bool]) -> float:
    return sum(right) / len(right)


def _against_chance(small: ModelAnswers, large: ModelAnswers, costs: tuple[float, float], seed: int) -> dict[str, float]:
    """Gain in accuracy over random deferral when a fifth is deferred, and the share of bootstrap samples without a gain."""
    rng, gains = random.Random(seed), []
    everything = range(len(small.right))
    for number in range(RESAMPLES + 1):
        which = everything if number == 0 else [rng.choice(everything) for _ in everything]
        (point,) = deferrals(*_of(which, small, large), costs, (SHARE,))
        gains.append(point.accuracy - point.by_chance)
    return {"gain": gains[0], "p": sum(gain <= 0 for gain in gains[1:]) / RESAMPLES}


def _held_out(
    chosen: Calibration, which: Sequence[int], small: ModelAnswers, large: ModelAnswers, costs: tuple[float, float]
) -> dict[str, float]:
    """Figures on the questions that the threshold was not chosen on. Without a threshold everything is deferred."""
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


def summary(result: dict[str, Any]) -> list[str]:
    """Lines below the table: the score's quality, and the threshold with its guarantee, if there is one."""
    chosen, held, at = result["calibration"], result["held_out"], result["at_20"]
    quality = (
        f"AUROC of the score {result['auroc']:.2f}; 20% deferred: {at['gain']:+.3f} over random deferral (p {at['p']:.3f})"
    )
    pays = f"the cascade is cheaper than LARGE alone if less than {result['break_even']:.0%} is deferred"
    if chosen["threshold"] is None:
        shown = f"no threshold is guaranteed to lose at most {chosen['delta']:g} on {chosen['n']} questions: LARGE answers all"
        return [quality, pays, shown]
    shown = (
        f"threshold {chosen['threshold']:.2f}: loses at most {chosen['delta']:g} with probability {1 - chosen['epsilon']:g}, "
        f"for questions like the {chosen['n']} it was chosen on"
    )
    kept = (
        f"the other half: {held['accuracy']:.3f} right (LARGE alone {held['large']:.3f}), lost {held['loss']:.3f}, "
        f"{held['deferred']:.0%} deferred, cost {held['cost']:.2f} of LARGE alone"
    )
    return [quality, pays, shown, kept]
