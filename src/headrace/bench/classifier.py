"""Measure the exits of a classifier on labelled texts: accuracy, layers, speed by batch size, overthinking."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any

import numpy as np

from headrace.bench.figures import Column, Line, Table
from headrace.bench.machine import machine
from headrace.data.plan import Threshold
from headrace.data.progress import threshold_text
from headrace.llm import LLM
from headrace.runner.classifier import CRITERIA, first_exit, probabilities
from headrace.startup.classifier import Pair
from headrace.stats.calibration import calibration_error
from headrace.training.classifier import LabelledTexts, exit_logits, grid_of

BATCHES = (1, 8, 32)
ROUNDS = 5
# Texts that are timed at most.
TIMED_TEXTS = 256
BINS = 15
# Confusions of more labels than this are not printed.
PRINTED_LABELS = 10
BATCH_COLUMNS = (
    Column("batch", "{batch}"),
    Column("speed-up", "{speedup:.2f}"),
    Column("rounds", "{least:.2f}..{most:.2f}"),
)
EXIT_COLUMNS = (
    Column("after layer", "{0[0]}"),
    Column("right", "{0[1]:.3f}"),
    Column("calibration error", "{0[2]:.3f}"),
)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Outputs of all exits: `probs` [exits, texts, classes], the right `classes` [texts], `layers` of the exits [exits]."""

    probs: np.ndarray
    classes: np.ndarray
    layers: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """Whether an exit's class is right: [exits, texts] bool."""
        same: np.ndarray = self.probs.argmax(-1) == self.classes
        return same

    def under_rule(self, criterion: str, threshold: Threshold) -> tuple[float, float]:
        """Accuracy and mean layers per text under a rule."""
        at = first_exit(criterion, threshold, self.probs)
        return float(self.right[at, np.arange(len(at))].mean()), float(self.layers[at].mean())


def predict(llm: LLM, data: LabelledTexts) -> Predictions:
    """Run all exits on all texts. Raises ValueError for a label that the classifier does not have."""
    assert llm.classifier is not None
    if llm.classifier.exits.tolerance is not None:
        raise ValueError("these exits predict numbers, and bench exits measures classes; give a classifier of classes")
    number = {label: at for at, label in enumerate(llm.classifier.exits.labels)}
    if strange := sorted(set(data.labels) - set(number)):
        raise ValueError(f"the classifier has no label {strange[0]!r}; its labels are {', '.join(number)}"[:400])
    logits = np.swapaxes(np.array(exit_logits(llm, data.texts)), 0, 1)
    classes = np.array([number[label] for label in data.labels])
    return Predictions(probabilities(logits), classes, np.array(llm.classifier.exits.layers))


def overthinking(predictions: Predictions) -> dict[str, float]:
    """Overthinking of a classifier: see `overthinking_of`."""
    return overthinking_of(predictions.right, predictions.layers)


def overthinking_of(right: np.ndarray, layers: np.ndarray) -> dict[str, float]:
    """Shares of overthinking (Kaya et al., "Shallow-Deep Networks", 2019), of which exits are right [exits, texts] bool.

    `wasteful`: an earlier exit and the last one are right. `destructive`: an earlier exit is right and the last one wrong;
    `of_errors`: its share of the last exit's errors. `best`: accuracy of an ideal choice of the exit. `needed`: mean layers up
    to the first right exit, of the texts on which the last exit is right. layers: [exits]; the last is the full model.
    """
    early, last = right[:-1].any(0), right[-1]
    needed = layers[right.argmax(0)][last]
    return {
        "wasteful": float((early & last).mean()),
        "destructive": float((early & ~last).mean()),
        "of_errors": float((early & ~last).sum() / max(1, (~last).sum())),
        "best": float(right.any(0).mean()),
        "needed": float(needed.mean()) if len(needed) else float("nan"),
    }


def confusion_scores(probs: np.ndarray) -> np.ndarray:
    """Confusion of each text [texts]: the L1 distances of the earlier exits' probabilities from the last one's, summed.

    probs: [exits, texts, classes]. From 0, if all exits agree in full, to 2 for each earlier exit. The paper subtracts the mean
    of the training texts and divides by their deviation, which changes no order.

    Source: Kaya et al., "Shallow-Deep Networks", arXiv 1810.07052.
    """
    scores: np.ndarray = np.abs(probs[:-1] - probs[-1]).sum((0, 2))
    return scores


def separation(scores: np.ndarray, wrong: np.ndarray) -> float:
    """Probability that a wrong text [texts] bool has a higher score than a right one, ties as half (area under the ROC curve).

    NaN if all texts are right, or all wrong.
    """
    high, low = scores[wrong], np.sort(scores[~wrong])
    if not len(high) or not len(low):
        return float("nan")
    below = np.searchsorted(low, high, "left") + np.searchsorted(low, high, "right")
    return float(below.mean() / 2 / len(low))


def doubt(predictions: Predictions) -> dict[str, float]:
    """How well two scores separate the full model's errors: the confusion of the exits, and the last exit's probability.

    `confusion`, `probability`: `separation` of wrong texts from right ones. `error`: standard error of `confusion` (Hanley and
    McNeil, 1982). `wrong`, `right`: mean confusion of such texts.
    """
    scores, wrong = confusion_scores(predictions.probs), ~predictions.right[-1]
    area, bad = separation(scores, wrong), int(wrong.sum())
    good, twice, squared = len(wrong) - bad, area / (2 - area), 2 * area * area / (1 + area)
    spread = area * (1 - area) + (bad - 1) * (twice - area * area) + (good - 1) * (squared - area * area)
    return {
        "confusion": area,
        "error": float(np.sqrt(max(0.0, spread) / max(1, bad * good))),
        "probability": separation(-predictions.probs[-1].max(-1), wrong),
        "wrong": float(scores[wrong].mean()) if bad else float("nan"),
        "right": float(scores[~wrong].mean()) if good else float("nan"),
    }


def calibration_errors(predictions: Predictions) -> list[float]:
    """Expected calibration error of each exit, over BINS bins."""
    pairs = zip(predictions.probs.max(-1), predictions.right, strict=True)
    return [calibration_error(confidence, right, BINS) for confidence, right in pairs]


def confusion(predictions: Predictions, criterion: str, threshold: Threshold) -> list[list[int]]:
    """Confusion matrix under a rule: number of texts by right class (rows) and predicted class (columns)."""
    at, count = first_exit(criterion, threshold, predictions.probs), predictions.probs.shape[-1]
    chosen = predictions.probs.argmax(-1)[at, np.arange(len(at))]
    counts: list[list[int]] = (
        np.bincount(predictions.classes * count + chosen, minlength=count**2).reshape(count, count).tolist()
    )
    return counts


def curves(predictions: Predictions) -> dict[str, list[dict[str, float]]]:
    """Accuracy and mean layers at each threshold, by criterion."""
    by_criterion: dict[str, list[dict[str, float]]] = {}
    for criterion in CRITERIA:
        by_criterion[criterion] = []
        for threshold in grid_of(criterion, predictions.probs.shape[-1], len(predictions.layers)):
            accuracy, layers = predictions.under_rule(criterion, threshold)
            by_criterion[criterion].append({"threshold": threshold, "accuracy": accuracy, "layers": layers})
    return by_criterion


def speedup(llm: LLM, texts: Sequence[str | Pair], batch: int, rule: tuple[str, Threshold], rounds: int) -> dict[str, float]:
    """Speed-up of early exit over the full model at one batch size: see `interleaved_speedup`."""

    def classified(criterion: str, threshold: Threshold | None) -> None:
        for start in range(0, len(texts), batch):
            llm.classify(texts[start : start + batch], criterion=criterion, threshold=threshold)

    return {"batch": batch} | interleaved_speedup(lambda: classified("off", None), lambda: classified(*rule), rounds)


def interleaved_speedup(first: Callable[[], object], second: Callable[[], object], rounds: int) -> dict[str, float]:
    """Ratios of the first call's wall time and CPU time to the second's: medians over alternating rounds, after a warm-up."""
    walls, cpus = [], []
    for number in range(rounds + 1):
        (wall, cpu), (other_wall, other_cpu) = _timed(first), _timed(second)
        if number:
            walls.append(wall / other_wall)
            cpus.append(cpu / other_cpu)
    return {"speedup": median(walls), "cpu": median(cpus), "least": min(walls), "most": max(walls)}


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall seconds, and CPU seconds of the process."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(
    llm: LLM, data: LabelledTexts, criterion: str | None, threshold: float | None, rounds: int = ROUNDS
) -> dict[str, Any]:
    """Content of the JSON file: figures under a rule, by default the calibrated one. Raises ValueError without a rule."""
    assert llm.classifier is not None
    rule = llm.classifier.rule(criterion, threshold)
    if not rule[0]:
        raise ValueError("this classifier has no calibrated threshold; name a criterion and a threshold")
    predictions = predict(llm, data)
    accuracy, layers = predictions.under_rule(*rule)
    depth = float(predictions.layers[-1])
    texts = data.texts[:TIMED_TEXTS]
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
        "batches": [speedup(llm, texts[: 32 * batch], batch, rule, rounds) for batch in BATCHES],
        "overthinking": overthinking(predictions),
        "doubt": doubt(predictions),
        "curves": curves(predictions),
    }


def curve_lines(result: dict[str, Any]) -> list[Line]:
    """Curves of accuracy (percent) over layers per text, by criterion."""
    lines = []
    for criterion, points in result["curves"].items():
        ordered = sorted(points, key=lambda point: point["layers"])
        lines.append(Line(criterion, [point["layers"] for point in ordered], [100 * point["accuracy"] for point in ordered]))
    return lines


def printed(result: dict[str, Any]) -> list[Table | str]:
    """Tables and lines of the terminal."""
    exits = zip(result["exit_layers"], result["by_exit"], result["calibration_error"], strict=True)
    parts: list[Table | str] = [Table(BATCH_COLUMNS, result["batches"]), Table(EXIT_COLUMNS, list(exits))]
    labels = result["labels"]
    if len(labels) <= PRINTED_LABELS:
        columns = [Column("class, predicted", "{label}"), *(Column(label, itemgetter(label)) for label in labels)]
        rows = [
            {"label": label, **dict(zip(labels, row, strict=True))}
            for label, row in zip(labels, result["confusion"], strict=True)
        ]
        parts.append(Table(columns, rows))
    return [*parts, *_summary(result)]


def _summary(result: dict[str, Any]) -> list[str]:
    lost = 100 * (result["full_accuracy"] - result["accuracy"])
    thought, doubt = result["overthinking"], result["doubt"]
    return [
        f"{result['criterion']} {threshold_text(result['threshold'])}: {result['accuracy']:.3f} right of {result['n']} "
        f"(full model {result['full_accuracy']:.3f}, {lost:+.1f} points lost), "
        f"{result['mean_layers']:.2f} layers a text, {result['layers']:.2f} times fewer",
        f"overthinking: {thought['wasteful']:.1%} of texts are right at an earlier exit, {thought['destructive']:.1%} "
        f"only there ({thought['of_errors']:.0%} of the last exit's errors); accuracy of an oracle {thought['best']:.3f}",
        f"confusion of the exits: {doubt['wrong']:.2f} where the full model is wrong, {doubt['right']:.2f} where it is right; "
        f"it separates them with {doubt['confusion']:.3f} ± {doubt['error']:.3f} (0.5: not at all), the last probability with "
        f"{doubt['probability']:.3f}",
    ]
