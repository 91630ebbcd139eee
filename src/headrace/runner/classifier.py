"""Early-exit classification of encoders: a classifier after some layers. A text stops at the first exit whose confidence
passes, and the layers above are skipped for it. The batch shrinks from layer to layer, which changes no other row.

Source of the criteria: Teerapittayanon et al., "BranchyNet", 2016 (entropy); Kaya et al., "Shallow-Deep Networks", arXiv
1810.07052 (probability); Zhou et al., "BERT Loses Patience" (PABEE), arXiv 2006.04152 (agreement of exits in a row, and for
numbers steps smaller than a tolerance in a row).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.data.plan import Classified, Classify, Feed, Pooled, Threshold
from headrace.runner.program import AnyLive, Program
from headrace.runner.span import Span
from headrace.runner.wants import add_rows, pools

PRODUCTS = 1 << 20  # products in memory at once while an exit reads pooled rows
BOTH = "both"  # pooling: the first row, then the mean


@dataclass(frozen=True, slots=True)
class Criterion:
    """A confidence measure of the last of several exits. measure: probabilities of all of them [exits, texts, classes] ->
    [texts]. rising: passes at the threshold and above, otherwise at it and below. most: the largest threshold, by classes and
    exits. least: the smallest."""

    measure: Callable[[np.ndarray], np.ndarray]
    rising: bool
    most: Callable[[int, int], float]
    least: float = 0.0


def _max_prob(probs: np.ndarray) -> np.ndarray:
    best: np.ndarray = probs[-1].max(-1)
    return best


def _margin(probs: np.ndarray) -> np.ndarray:
    ranked = np.sort(probs[-1], -1)
    ahead: np.ndarray = ranked[:, -1] - ranked[:, -2]
    return ahead


def _entropy(probs: np.ndarray) -> np.ndarray:
    return _cross(probs[-1], probs[-1])


def _kl(probs: np.ndarray) -> np.ndarray:
    """Divergence from the exit before, in nats; infinite for the first exit."""
    if len(probs) == 1:
        return np.full(probs.shape[1], np.inf)
    return np.maximum(_cross(probs[-1], probs[-2]) - _cross(probs[-1], probs[-1]), 0.0)


def _patience(probs: np.ndarray) -> np.ndarray:
    """Number of exits in a row, before the last, that agree with it."""
    best = probs.argmax(-1)
    same: np.ndarray = np.cumprod(best[-2::-1] == best[-1], 0).sum(0) if len(probs) > 1 else np.zeros(probs.shape[1])
    return same


def _steady(values: np.ndarray, tolerance: float) -> np.ndarray:
    """Number of exits in a row, up to the last, that changed the number [exits, texts, 1] by less than the tolerance."""
    near = np.abs(np.diff(values[..., 0], axis=0)) < tolerance
    count: np.ndarray = np.cumprod(near[::-1], 0).sum(0)
    return count


def _cross(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Cross entropy -sum p log q, in nats."""
    sums: np.ndarray = -np.where(p > 0, p * np.log(np.maximum(q, 1e-300)), 0.0).sum(-1)
    return sums


CRITERIA: dict[str, Criterion] = {
    "max_prob": Criterion(_max_prob, True, lambda classes, exits: 1.0),
    "margin": Criterion(_margin, True, lambda classes, exits: 1.0),
    "entropy": Criterion(_entropy, False, lambda classes, exits: math.log(classes)),
    "kl": Criterion(_kl, False, lambda classes, exits: math.inf),
    "patience": Criterion(_patience, True, lambda classes, exits: exits - 1),
}


@dataclass(frozen=True, slots=True)
class ExitClassifiers:
    """Linear classifiers over pooled hidden rows. Exit i reads them after `layers[i]` layers, the last one after all.

    weight: [exits, classes, width] float64. bias: [exits, classes] float64. pooling: first, last or mean (width: the hidden
    size), or both (twice that: the first row, then the mean). tolerance: None for classes; otherwise each exit predicts one
    number, there are no labels, and patience counts exits that change it by less than the tolerance.
    """

    layers: tuple[int, ...]
    labels: tuple[str, ...]
    pooling: str
    weight: np.ndarray
    bias: np.ndarray
    tolerance: float | None = None

    def predictions(self, logits: np.ndarray) -> np.ndarray:
        """Probabilities of logits [..., classes]; numbers are predictions as they are."""
        return probabilities(logits) if self.tolerance is None else logits

    def logits(self, exit: int, pooled: np.ndarray) -> np.ndarray:
        """Logits [texts, classes] of one exit for pooled rows [texts, width]. A text's products are summed in one order,
        whatever the batch."""
        weight = self.weight[exit]
        step = max(1, PRODUCTS // weight.size)
        parts = [(pooled[at : at + step, None] * weight).sum(-1) for at in range(0, len(pooled), step)]
        return np.concatenate(parts) + self.bias[exit]

    def check(self, criterion: str, threshold: Threshold | None = None) -> None:
        """Raise ValueError for an unknown criterion or thresholds out of range. An empty criterion disables early exit."""
        if not criterion:
            return
        if criterion not in CRITERIA:
            raise ValueError(f"unknown criterion {criterion!r:.100}; use {', '.join(CRITERIA)}")
        if self.tolerance is not None and criterion != "patience":
            raise ValueError(f"{criterion} needs classes, and these exits predict numbers; use patience")
        rule = CRITERIA[criterion]
        most = rule.most(len(self.labels), len(self.layers))
        values = threshold if isinstance(threshold, tuple) else () if threshold is None else (threshold,)
        if isinstance(threshold, tuple) and len(values) != len(self.layers) - 1:
            raise ValueError(
                f"give one threshold, or {len(self.layers) - 1}: one for each exit but the last, not {len(values)}"
            )
        if (wrong := next((value for value in values if not rule.least <= value <= most), None)) is not None:
            bounds = f"{rule.least:g} or more" if math.isinf(most) else f"{rule.least:g} to {most:g}"
            raise ValueError(f"the threshold of {criterion} must be {bounds} here, not {wrong:g}")


def probabilities(logits: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    shares: np.ndarray = raised / raised.sum(-1, keepdims=True)
    return shares


def passes(criterion: str, threshold: Threshold, probs: np.ndarray, tolerance: float | None = None) -> np.ndarray:
    """Which texts stop at the last exit of these probabilities [exits, texts, classes]: [texts] bool.

    tolerance: `probs` are numbers [exits, texts, 1], and the criterion is patience.

    The last exit of the classifier has no threshold of its own among several: no text stops there.
    """
    if not criterion:
        return np.zeros(probs.shape[1], bool)
    if isinstance(threshold, tuple):
        if len(probs) > len(threshold):
            return np.zeros(probs.shape[1], bool)
        threshold = threshold[len(probs) - 1]
    rule = CRITERIA[criterion]
    measured = rule.measure(probs) if tolerance is None else _steady(probs, tolerance)
    passed: np.ndarray = measured >= threshold if rule.rising else measured <= threshold
    return passed


def first_exit(criterion: str, threshold: Threshold, probs: np.ndarray, tolerance: float | None = None) -> np.ndarray:
    """The exit at which each text stops, of all exits' probabilities [exits, texts, classes], or numbers: [texts]."""
    last = len(probs) - 1
    exits = np.full(probs.shape[1], last)
    for exit in reversed(range(last)):
        exits[passes(criterion, threshold, probs[: exit + 1], tolerance)] = exit
    return exits


def asked(feeds: Sequence[Feed]) -> bool:
    """Whether any feed wants a class."""
    return any(isinstance(want, Classify) for feed in feeds for want in feed.wants)


class ClassifierRun:
    """One step that runs from exit to exit, with fewer texts each time. Feeds from which only rows are pooled stay to the
    end."""

    def __init__(self, exits: ExitClassifiers, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> None:
        self.exits = exits
        self.feeds = feeds
        self.lives = lives
        self.rules = [next((want for want in feed.wants if isinstance(want, Classify)), None) for feed in feeds]
        self.here = list(range(len(feeds)))  # numbers of the feeds that are still in the batch
        self.logits: list[list[np.ndarray]] = [[] for _ in feeds]  # by feed: logits [classes] of each exit it passed
        self.computed = 0  # rows × layers

    def run(self, program: Program) -> list[tuple[Any, ...]]:
        """The answers of every feed, in the order of their wants."""
        rows, first = None, 0
        for exit, last in enumerate(self.exits.layers):
            step = program.step()
            for number in self.here:
                step.feed(self.feeds[number], self.lives[number])
            rows = program.run(step, Span(last, first=first), rows, keep=True)
            self.computed += len(rows) * (last - first)
            first, staying = last, self._judge(exit, program.on_host(rows))
            if not staying:
                return self._answers(program, None)
            if last < self.exits.layers[-1] and len(staying) < len(self.here):
                rows = rows[np.concatenate([np.arange(one.start, one.stop) for one in self._places(staying)])]
                self.here = staying
        return self._answers(program, rows)

    def _places(self, numbers: Sequence[int]) -> Iterator[slice]:
        """The slices of some feeds' rows among those still in the batch."""
        wanted, start = set(numbers), 0
        for number in self.here:
            end = start + self.feeds[number].count
            if number in wanted:
                yield slice(start, end)
            start = end

    def _judge(self, exit: int, rows: np.ndarray) -> list[int]:
        """Apply an exit to the rows [n, hidden] after its layers; returns the feeds that go on."""
        numbers = [number for number in self.here if self.rules[number] is not None]
        if not numbers:
            return self.here
        pooled = np.stack([_pool(rows[place], self.exits.pooling) for place in self._places(numbers)])
        for number, logits in zip(numbers, self.exits.logits(exit, pooled), strict=True):
            self.logits[number].append(logits)
        gone: set[int] = set()
        for rule in {self.rules[number] for number in numbers}:
            assert rule is not None
            same = [number for number in numbers if self.rules[number] == rule]
            probs = self.exits.predictions(np.stack([self.logits[number] for number in same], 1))
            exiting = passes(rule.criterion, rule.threshold, probs, self.exits.tolerance)
            gone.update(number for number, exits in zip(same, exiting, strict=True) if exits)
        return [number for number in self.here if number not in gone]

    def _answers(self, program: Program, rows: Any) -> list[tuple[Any, ...]]:
        outputs: list[list[Any]] = [
            [Classified(_as_tuples(logits)) if isinstance(want, Classify) else None for want in feed.wants]
            for feed, logits in zip(self.feeds, self.logits, strict=True)
        ]
        if rows is not None:
            for at_here, at, which, want in pools([self.feeds[number] for number in self.here]):
                summed = add_rows(want.before, program.on_host(program.final(rows[which])))
                outputs[self.here[at_here]][at] = Pooled(summed)
        return [tuple(answers) for answers in outputs]


def _pool(rows: np.ndarray, pooling: str) -> np.ndarray:
    """Pooled row [width] of a text's rows [tokens, hidden]."""
    if pooling == BOTH:
        return np.concatenate([rows[0], rows.sum(0) / len(rows)])
    chosen: np.ndarray = rows[0] if pooling == "first" else rows[-1] if pooling == "last" else rows.sum(0) / len(rows)
    return chosen


def _as_tuples(rows: Sequence[np.ndarray]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row.tolist()) for row in rows)
