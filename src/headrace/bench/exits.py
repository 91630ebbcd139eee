"""What the exits of a classifier save and lose on labelled texts: accuracy, layers, time by batch, and overthinking."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from headrace.bench.machine import machine
from headrace.bench.plots import Line
from headrace.llm import LLM
from headrace.runner.classifier import CRITERIA, leave_at, probabilities
from headrace.startup.exits import Pair
from headrace.stats.calibration import calibration_error
from headrace.training.classifier import LabelledTexts, exit_logits, grid_of

BATCHES = (1, 8, 32)
ROUNDS = 5
TIMED = 256  # texts


@dataclass(frozen=True, slots=True)
class Predictions:
    """What all exits say of texts: `probs` [exits, texts, classes], and which class each is of [texts]."""

    probs: np.ndarray
    classes: np.ndarray
    layers: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """[exits, texts] bool."""
        same: np.ndarray = self.probs.argmax(-1) == self.classes
        return same

    def leaving(self, criterion: str, threshold: float) -> tuple[float, float]:
        """Accuracy, and layers a text."""
        at = leave_at(criterion, threshold, self.probs)
        return float(self.right[at, np.arange(len(at))].mean()), float(self.layers[at].mean())


def ask(llm: LLM, data: LabelledTexts) -> Predictions:
    """All exits about all texts. Raises ValueError for labels that the classifier does not know."""
    assert llm.classifier is not None
    number = {label: at for at, label in enumerate(llm.classifier.exits.labels)}
    if strange := sorted(set(data.labels) - set(number)):
        raise ValueError(f"the classifier knows no label {strange[0]!r}; its labels are {', '.join(number)}"[:400])
    logits = np.swapaxes(np.array(exit_logits(llm, data.texts)), 0, 1)
    classes = np.array([number[label] for label in data.labels])
    return Predictions(probabilities(logits), classes, np.array(llm.classifier.exits.layers))


def overthinking(predictions: Predictions) -> dict[str, float]:
    """Two ways of thinking too long (shallow-deep networks, Kaya et al., 2019): `wasteful`, an earlier exit is right, as is the
    last; `destructive`, an earlier one is right and the last wrong (`of_errors`: its share of what the last has wrong). `best`:
    the accuracy of who knew where to leave; `needed`: layers up to the first right exit, of texts that the last has right."""
    return thought(predictions.right, predictions.layers)


def thought(right: np.ndarray, layers: np.ndarray) -> dict[str, float]:
    """The same of who is right: [exits, texts] bool, after so many layers [exits]; the last is the whole model."""
    early, last = right[:-1].any(0), right[-1]
    needed = layers[right.argmax(0)][last]
    return {
        "wasteful": float((early & last).mean()),
        "destructive": float((early & ~last).mean()),
        "of_errors": float((early & ~last).sum() / max(1, (~last).sum())),
        "best": float(right.any(0).mean()),
        "needed": float(needed.mean()) if len(needed) else float("nan"),
    }


BINS = 15


def calibration_errors(predictions: Predictions) -> list[float]:
    """By exit the expected calibration error, over 15 bins."""
    each = zip(predictions.probs.max(-1), predictions.right, strict=True)
    return [calibration_error(sure, right, BINS) for sure, right in each]


def confusion(predictions: Predictions, criterion: str, threshold: float) -> list[list[int]]:
    """How many texts of each class (rows) were said to be of each (columns), by a rule."""
    at, count = leave_at(criterion, threshold, predictions.probs), predictions.probs.shape[-1]
    chosen = predictions.probs.argmax(-1)[at, np.arange(len(at))]
    counts: list[list[int]] = (
        np.bincount(predictions.classes * count + chosen, minlength=count**2).reshape(count, count).tolist()
    )
    return counts


def curves(predictions: Predictions) -> dict[str, list[dict[str, float]]]:
    """By criterion: accuracy against layers, threshold by threshold."""
    found: dict[str, list[dict[str, float]]] = {}
    for criterion in CRITERIA:
        found[criterion] = []
        for threshold in grid_of(criterion, predictions.probs.shape[-1], len(predictions.layers)):
            accuracy, layers = predictions.leaving(criterion, threshold)
            found[criterion].append({"threshold": threshold, "accuracy": accuracy, "layers": layers})
    return found


def clock(llm: LLM, texts: Sequence[str | Pair], batch: int, rule: tuple[str, float], rounds: int) -> dict[str, float]:
    """Time and CPU time of the whole model divided by those with exits, in alternating rounds: medians."""

    def classified(criterion: str, threshold: float | None) -> None:
        for start in range(0, len(texts), batch):
            llm.classify(texts[start : start + batch], criterion=criterion, threshold=threshold)

    return {"batch": batch} | in_turns(lambda: classified("off", None), lambda: classified(*rule), rounds)


def in_turns(first: Callable[[], object], second: Callable[[], object], rounds: int) -> dict[str, float]:
    """Time, and CPU time of the process, of the first divided by the second's: medians of alternating rounds."""
    walls, works = [], []
    for number in range(rounds + 1):
        each = [_timed(one) for one in (first, second)]
        if number:  # the first warms up
            walls.append(each[0][0] / each[1][0])
            works.append(each[0][1] / each[1][1])
    return {"speedup": median(walls), "cpu": median(works), "least": min(walls), "most": max(walls)}


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and CPU seconds of the process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(
    llm: LLM, data: LabelledTexts, criterion: str | None, threshold: float | None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """The figures of a classifier by one rule (default: as it was calibrated). Raises ValueError."""
    assert llm.classifier is not None
    rule = llm.classifier.rule(criterion, threshold)
    if not rule[0]:
        raise ValueError("this classifier has no calibrated threshold; name a criterion and a threshold")
    predictions = ask(llm, data)
    accuracy, layers = predictions.leaving(*rule)
    depth = float(predictions.layers[-1])
    texts = data.texts[:TIMED]
    return {
        "machine": machine(),
        "backend": llm.backend,
        "n": len(data.texts),
        "criterion": rule[0],
        "threshold": rule[1],
        "full_accuracy": float(predictions.right[-1].mean()),
        "accuracy": accuracy,
        "mean_layers": layers,
        "layers": depth / layers,
        "exit_layers": predictions.layers.tolist(),
        "by_exit": predictions.right.mean(-1).tolist(),
        "calibration_error": calibration_errors(predictions),
        "labels": list(llm.classifier.exits.labels),
        "confusion": confusion(predictions, *rule),
        "batches": [clock(llm, texts[: 32 * batch], batch, rule, rounds) for batch in BATCHES],
        "overthinking": overthinking(predictions),
        "curves": curves(predictions),
    }


def lines(found: dict[str, Any]) -> list[Line]:
    """Accuracy (percent) over layers a text, by criterion."""
    made = []
    for criterion, points in found["curves"].items():
        ordered = sorted(points, key=lambda point: point["layers"])
        made.append(Line(criterion, [one["layers"] for one in ordered], [100 * one["accuracy"] for one in ordered]))
    return made
