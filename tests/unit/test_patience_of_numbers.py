"""PABEE for regression: patience counts exits that change the number by less than a tolerance."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from headrace.runner import classifier as exits
from headrace.runner.classifier import ExitClassifiers, first_exit
from headrace.startup.classifier import Classifier
from headrace.training.regression import calibrated_patience, correlations, fit_number, numbers_of, spread

EXITS = 6


def of(*values: float) -> np.ndarray:
    """One text's numbers, exit by exit: [exits, 1, 1]."""
    return np.array(values)[:, None, None]


def regressor(tolerance: float, layers: int = EXITS) -> ExitClassifiers:
    return ExitClassifiers(tuple(range(1, layers + 1)), (), "mean", np.empty(0), np.empty(0), tolerance)


@pytest.mark.parametrize(
    ("tolerance", "patience", "exit"),
    [
        (0.25, 1, 2),  # steps of 1, 0.125, 0.5, 0.125, 0.125
        (0.25, 2, 5),
        (0.125, 1, 5),  # a step as large as the tolerance does not count
        (0.75, 2, 3),
        (0.75, 4, 5),
        (2.0, 1, 1),
        (2.0, 3, 3),
    ],
)
def test_patience_of_numbers_by_hand(tolerance: float, patience: int, exit: int) -> None:
    values = of(0.0, 1.0, 1.125, 1.625, 1.75, 1.875)
    assert first_exit("patience", patience, values, tolerance).tolist() == [exit]


def by_the_paper(values: Sequence[float], patience: int, tolerance: float) -> int:
    """The counter as the paper has it: + 1 if |y_i - y_(i-1)| < tolerance, otherwise 0; stop at `patience`."""
    count = 0
    for exit in range(1, len(values)):
        count = count + 1 if abs(values[exit] - values[exit - 1]) < tolerance else 0
        if count == patience:
            return exit
    return len(values) - 1


def drawn(texts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers [exits, texts, 1] that come nearer to the target from exit to exit, of some texts faster; targets [texts]."""
    rng = np.random.default_rng(seed)
    targets, hardness = rng.uniform(0, 5, texts), rng.uniform(0.2, 1.4, texts)
    noise = rng.normal(size=(EXITS, texts)) * hardness / (1 + np.arange(EXITS))[:, None]
    return (targets + noise)[..., None], targets


@pytest.mark.parametrize("patience", [1, 2, 4])
@pytest.mark.parametrize("tolerance", [0.1, 0.5])
def test_the_rule_is_that_of_the_paper(patience: int, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text by text. Control: a rule that ignores the tolerance lets every text go at the exit of its patience."""
    values, _ = drawn(500, 1)
    right = [by_the_paper(values[:, text, 0], patience, tolerance) for text in range(values.shape[1])]
    assert first_exit("patience", patience, values, tolerance).tolist() == right
    assert len(set(right)) > 1
    monkeypatch.setattr(exits, "_steady", lambda values, _: np.full(values.shape[1], len(values) - 1))
    ignored = first_exit("patience", patience, values, tolerance)
    assert set(ignored.tolist()) == {patience}
    assert ignored.tolist() != right


def test_a_larger_tolerance_and_a_smaller_patience_exit_no_later() -> None:
    values, _ = drawn(400, 2)
    by_tolerance = [first_exit("patience", 2, values, tolerance) for tolerance in (0.01, 0.1, 0.4, 1.0, 100.0)]
    by_patience = [first_exit("patience", patience, values, 0.3) for patience in (5, 4, 3, 2, 1)]
    for left in (by_tolerance, by_patience):
        assert all((after <= before).all() for before, after in pairwise(left))
        assert len({tuple(each) for each in left}) == 5
    assert (by_tolerance[-1] == 2).all()


def lost(values: np.ndarray, targets: np.ndarray, patience: float, tolerance: float) -> np.ndarray:
    errors, at = np.abs(values[..., 0] - targets), first_exit("patience", patience, values, tolerance)
    wrong: np.ndarray = errors[at, np.arange(len(at))] > errors[-1] + tolerance
    return wrong.astype(float)


def test_a_calibrated_patience_keeps_its_promise() -> None:
    """500 redraws: at most a share epsilon loses more than delta on fresh texts. Control: the least patience that lost little
    on the same texts breaks that more often than epsilon."""
    tolerance, fresh, broken, naive, chosen = 0.2, drawn(40_000, 3), 0, 0, []
    true = {patience: lost(*fresh, patience, tolerance).mean() for patience in range(1, EXITS)}
    assert true[3] < true[2] < true[1]
    delta = true[1] - 0.003  # the least patience that holds is 2
    for seed in range(500):
        values, targets = drawn(300, 100 + seed)
        rules = calibrated_patience(regressor(tolerance), values, targets, delta, 0.05)
        chosen += [rule.threshold for rule in rules]
        broken += sum(true[int(rule.threshold)] > delta for rule in rules if isinstance(rule.threshold, float))
        low = [patience for patience in true if lost(values, targets, patience, tolerance).mean() <= delta]
        naive += true[min(low)] > delta
    assert broken <= 0.05 * 500
    assert naive > 0.05 * 500
    assert min(chosen) < EXITS - 1, "some texts exit early"


def test_a_fit_of_numbers_finds_the_plane() -> None:
    rng = np.random.default_rng(0)
    rows = (rng.normal(size=(400, 5)) * 10 + 100).astype(np.float32)
    targets = 3 + 0.5 * rows[:, 2].astype(np.float64) - 0.25 * rows[:, 4]
    weight, bias = fit_number(rows, targets, 1e-9)
    assert (weight.shape, bias.shape) == ((1, 5), (1,))
    np.testing.assert_allclose(weight[0], [0, 0, 0.5, 0, -0.25], atol=1e-4)
    np.testing.assert_allclose(rows @ weight[0] + bias, targets, atol=1e-2)
    shrunk, _ = fit_number(rows, targets, 10.0)
    assert np.abs(shrunk).sum() < 0.2 * np.abs(weight).sum()
    assert correlations(np.stack([rows[:, 2:3], np.ones((400, 1))]), rows[:, 2]) == pytest.approx([1.0, 0.0])


def test_what_is_no_number_is_a_one_line_error() -> None:
    assert numbers_of(["1", "2.5", "-3e2"]).tolist() == [1.0, 2.5, -300.0]
    for label in ("good", "nan", "inf", ""):
        with pytest.raises(ValueError, match=r"label .*: --tolerance learns numbers; give numbers, or leave --tolerance out"):
            numbers_of(["1", label])
    with pytest.raises(ValueError, match="all numbers to learn are 2; give texts with different ones"):
        spread(np.array([2.0, 2.0]))


def test_numbers_have_no_probabilities() -> None:
    known = Classifier(regressor(0.5))
    assert known.rule("patience", 2.0) == ("patience", 2.0)
    for criterion in ("max_prob", "margin", "entropy", "kl"):
        with pytest.raises(ValueError, match=f"{criterion} needs classes, and these exits predict numbers; use patience"):
            known.rule(criterion, 0.5)
    with pytest.raises(ValueError, match="the threshold of patience must be 0 to 5 here, not 6"):
        known.rule("patience", 6.0)
    made = known.classification([1, 2], [(0.5,), (1.5,)])
    assert made.record(votes=True) == {
        "value": 1.5,
        "layers": 2,
        "exits": [{"layers": 1, "value": 0.5}, {"layers": 2, "value": 1.5}],
    }
    assert repr(made) == "Classification(1.5, 2 layers)"
