"""benchmarks.classifier_guarantee: it chooses the rule that train-classifier stores, and its control breaks the bound."""

import numpy as np
import pytest

from benchmarks import classifier_guarantee as bench
from benchmarks.classifier_guarantee import Texts, best, certified, curve, naive, report, rules
from headrace.runner.classifier import CRITERIA, ExitClassifiers
from headrace.training.classifier import calibrated
from headrace.training.regression import calibrated_patience

EXITS, DELTA = 3, 0.024


def classes(texts: int, seed: int) -> Texts:
    """Two classes and three exits: the first is often wrong, as sure as the second."""
    rng = np.random.default_rng(seed)
    targets, sure = rng.integers(0, 2, texts), rng.uniform(0.5, 1.0, (EXITS, texts))
    right = rng.random((EXITS, texts)) < np.stack([0.5 + 0.15 * sure[0], 0.9 + 0.1 * sure[1], np.full(texts, 0.98)])
    chosen = np.where(right, targets, 1 - targets)
    return Texts(np.where(chosen[..., None] == np.arange(2), sure[..., None], 1 - sure[..., None]), targets)


def evidence(texts: int, seed: int) -> Texts:
    """Two classes and three exits whose evidence grows from exit to exit, so that each criterion loses some texts."""
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, 2, texts)
    logits = ((2 * targets - 1) * 0.8 + rng.normal(size=(EXITS, texts))).cumsum(0)
    second = 1 / (1 + np.exp(-logits))
    return Texts(np.stack([1 - second, second], -1), targets)


def numbers(texts: int, seed: int) -> Texts:
    rng = np.random.default_rng(seed)
    targets, hardness = rng.uniform(0, 5, texts), rng.uniform(0.2, 1.4, texts)
    noise = rng.normal(size=(6, texts)) * hardness / (1 + np.arange(6))[:, None]
    return Texts((targets + noise)[..., None], targets)


def classifier(tolerance: float | None = None, layers: int = EXITS) -> ExitClassifiers:
    labels = ("a", "b") if tolerance is None else ()
    return ExitClassifiers(tuple(range(1, layers + 1)), labels, "mean", np.empty(0), np.empty(0), tolerance)


def test_the_default_rule_is_the_one_that_training_stores() -> None:
    """The best of all criteria, each at epsilon / 5. Control: at epsilon another threshold passes."""
    exits, texts = classifier(), evidence(900, 1)
    for epsilon, same in ((0.05 / len(CRITERIA), True), (0.05, False)):
        stored = min(calibrated(exits, texts.predicted, texts.targets, 0.05, epsilon), key=lambda rule: rule.mean_layers)
        curves = rules(exits, texts, None)["default"]
        chosen = [certified(one, 0.05, 0.05 / len(curves)) for one in curves]
        rule = best(curves, chosen, np.arange(900))
        assert rule is not None
        assert ((rule[0].criterion, rule[0].thresholds[rule[1]]) == (stored.criterion, stored.threshold)) == same


def test_the_patience_of_numbers_is_the_one_that_training_stores() -> None:
    texts, exits = numbers(900, 2), classifier(0.2, 6)
    (stored,) = calibrated_patience(exits, texts.predicted, texts.targets, 0.1, 0.05)
    (own,) = rules(exits, texts, None)["numbers"]
    at = certified(own, 0.1, 0.05)
    assert at is not None
    assert own.thresholds[at] == stored.threshold < 5
    assert own.losses[at].mean() == pytest.approx(stored.risk)
    assert own.layers[at].mean() == pytest.approx(stored.mean_layers)


def test_redraws_keep_the_bound_and_the_control_breaks_it() -> None:
    """4,000 texts, of which 300 calibrate. The control chooses without a test."""
    usual, by_exit = rules(classifier(), evidence(4000, 3), None), rules(classifier(), classes(4000, 3), classes(2000, 4))
    assert [*by_exit] == ["default", *CRITERIA, "by exit"]
    found = {"default": (usual, 0.05), "by exit": (by_exit, DELTA)}
    for name, (curves, delta) in found.items():
        parts = report(curves[name], 300, delta, 200).split("; ")
        shares = {part.split()[0]: float(part.split()[1]) for part in parts}
        assert shares["tested"] <= 0.05, name
        assert shares["naive"] > 0.1, name


def test_a_rule_that_cannot_be_shown_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """50 texts show nothing at delta 0.02. Control: a test that always passes chooses a rule in each redraw."""
    curves = rules(classifier(), classes(400, 5), None)["entropy"]
    assert report(curves, 50, 0.02, 20).startswith("tested 0.000 above (0.000 on all texts), 0.000 chose; naive")
    monkeypatch.setattr(bench, "certified", lambda own, delta, epsilon: len(own.thresholds) - 1)
    assert report(curves, 50, 0.02, 20).startswith("tested 1.000 above (1.000 on all texts), 1.000 chose (loss ")


def test_losses_are_counted_by_hand() -> None:
    """Two exits and the full model; the second text is lost at the first exit, the third was wrong anyway."""
    sure, wrong = [0.99, 0.01], [0.01, 0.99]
    texts = Texts(np.array([[sure, wrong, wrong], [sure, sure, wrong], [sure, sure, wrong]]), np.array([0, 0, 0]))
    own = curve(classifier(), texts, "max_prob", [1.0, 0.9])
    assert own.losses.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert own.layers.tolist() == [[3, 3, 3], [1, 1, 1]]
    assert naive(own, 0.4) == 1
    assert naive(own, 0.3) == 0
