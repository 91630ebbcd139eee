"""Learn then Test: bounds, the order of thresholds, and how often a guarantee is broken; the naive choice breaks it."""

import math

import numpy as np
import pytest

from benchmarks import exit_guarantee
from benchmarks.exit_guarantee import Measured, on_fresh, summary
from headrace.stats.calibration import Calibration, calibrate, minimum_n, p_value, redraw

GRID = tuple(1 - 0.05 * i for i in range(21))


@pytest.mark.parametrize(
    ("delta", "bound", "n"),
    [
        (0.05, "hb", 59),
        (0.02, "hb", 149),
        (0.1, "hb", 29),
        (0.05, "hoeffding", 600),
        (0.02, "hoeffding", 3745),
        (0.1, "hoeffding", 150),
    ],
)
def test_minimum_n_equals_the_table(delta: float, bound: str, n: int) -> None:
    assert minimum_n(delta, bound=bound) == n  # type: ignore[arg-type]


def test_p_values() -> None:
    """By hand: Hoeffding's is exp(-2 n d²); of no loss in n the exact tail (1 - delta)^n is what the relative entropy gives."""
    assert p_value(0.02, 100, 0.1, "hoeffding") == pytest.approx(math.exp(-2 * 100 * 0.08**2))
    assert p_value(0.0, 40, 0.1) == pytest.approx(0.9**40)
    assert p_value(0.1, 50, 0.1) == p_value(0.3, 50, 0.1) == 1.0
    risks = [p_value(risk, 400, 0.1) for risk in (0.0, 0.02, 0.05, 0.08, 0.1)]
    assert risks == sorted(risks)
    assert all(p_value(risk, 400, 0.1) <= p_value(risk, 400, 0.1, "hoeffding") for risk in (0.0, 0.02, 0.05, 0.08))


def test_the_first_that_fails_ends_the_search() -> None:
    asked = []

    def losses(threshold: float) -> np.ndarray:
        asked.append(threshold)
        return np.zeros(200) if threshold != 0.85 else np.ones(200)

    found = calibrate(losses, GRID, delta=0.1)
    assert (found.threshold, found.risk, found.n) == (0.9, 0.0, 200)
    assert asked == [one.threshold for one in found.tried] == list(GRID[:4])  # 0.8 would pass, and is not looked at


def test_too_few_inputs_give_no_threshold() -> None:
    found = calibrate(lambda threshold: np.zeros(28), GRID, delta=0.1)
    assert (found.threshold, found.risk) == (None, None)
    assert calibrate(lambda threshold: np.zeros(29), GRID, delta=0.1).threshold == GRID[-1]


@pytest.mark.parametrize("lost", [np.array([1.5]), np.array([-0.1]), np.array([]), np.array([float("nan")])])
def test_losses_are_shares(lost: np.ndarray) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        calibrate(lambda threshold: lost, GRID, delta=0.1)


@pytest.mark.parametrize("given", [{"delta": 0.0}, {"delta": 1.0}, {"delta": 0.1, "epsilon": 0.0}])
def test_levels_lie_between(given: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        calibrate(lambda threshold: np.zeros(9), GRID, **given)  # type: ignore[arg-type]


def world(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores and losses: an input of score s is lost with probability (1 - s) / 2 once its threshold is at most s."""
    scores = rng.random(n)
    return scores, rng.random(n) < (1 - scores) / 2


def true_risk(threshold: float) -> float:
    return (1 - threshold) ** 2 / 4  # of the integral of (1 - s) / 2 from the threshold on


def violations(choose: str, runs: int = 400, n: int = 400, delta: float = 0.1) -> float:
    """How often a threshold is chosen whose true risk is above delta."""
    rng, broken = np.random.default_rng(7), 0
    for _ in range(runs):
        scores, lost = world(rng, n)
        losses = lambda threshold: ((scores >= threshold) & lost).astype(float)  # noqa: B023, E731
        if choose == "naive":  # the lowest threshold whose mean loss is small enough
            threshold = min(t for t in GRID if losses(t).mean() <= delta)
        else:
            found: Calibration = calibrate(losses, GRID, delta=delta, bound=choose)  # type: ignore[arg-type]
            threshold = 1.0 if found.threshold is None else found.threshold
        broken += true_risk(threshold) > delta
    return broken / runs


def test_the_guarantee_holds() -> None:
    """At most epsilon = 0.05 of the choices are wrong; three standard errors of 400 runs are 0.033."""
    assert violations("hb") <= 0.05 + 0.033
    assert violations("hoeffding") <= 0.05 + 0.033


def test_the_naive_choice_breaks_it() -> None:
    """Control: the lowest threshold with a small mean loss is above delta far more often."""
    assert violations("naive") > 0.3


def past_the_first_failure(runs: int = 200, n: int = 400, delta: float = 0.1) -> tuple[float, float]:
    """How often a threshold is kept of a grid in which all lose a little more than delta, each by itself: by the search, and
    where the best that passes is taken although others before it failed."""
    rng, searched, best = np.random.default_rng(4), 0, 0
    for _ in range(runs):
        drawn = {threshold: (rng.random(n) < delta + 0.001).astype(float) for threshold in GRID}
        searched += calibrate(drawn.__getitem__, GRID, delta=delta).threshold is not None
        best += any(p_value(lost.mean(), n, delta) <= 0.05 for lost in drawn.values())
    return searched / runs, best / runs


def test_calibration_stops_at_the_first_failure() -> None:
    """Three standard errors of 200 runs are 0.046. Control: twenty-one tries are as many chances."""
    searched, best = past_the_first_failure()
    assert searched <= 0.05 + 0.046
    assert best > 0.15


def test_few_inputs_show_nothing_by_hoeffding() -> None:
    """436 without a loss show 0.05 by Hoeffding and Bentkus, and not by Hoeffding alone."""
    found = {bound: calibrate(lambda threshold: np.zeros(436), GRID, delta=0.05, bound=bound) for bound in ("hb", "hoeffding")}  # type: ignore[arg-type]
    assert found["hb"].threshold == GRID[-1]
    assert found["hoeffding"].threshold is None


def test_a_redraw_is_judged_on_other_inputs() -> None:
    """Of 1,200 inputs 400 calibrate and 800 judge. Control: the naive choice loses more than delta on these far more often."""
    scores, lost = world(np.random.default_rng(3), 1200)
    losses = {threshold: ((scores >= threshold) & lost).astype(float) for threshold in GRID}
    found = redraw(losses, 400, delta=0.1)
    assert found.tested <= 0.05
    assert found.naive > 0.15
    assert 0 < found.risk < 0.1
    same = redraw({threshold: np.zeros(50) for threshold in GRID}, 40, delta=0.1)
    assert (same.tested, same.naive, same.risk, same.chosen) == (0, 0, 0, 1)


def test_redraws_that_choose_no_threshold_are_counted() -> None:
    """40 inputs show no threshold at delta 0.05, so no redraw is above it, whatever is lost; with 60 and few losses a part of
    the redraws chooses one."""
    harmful = {0.9: np.array([0.0] * 58 + [1.0, 1.0]), 0.5: np.ones(60)}
    few = redraw(harmful, 40, delta=0.05)
    assert (few.chosen, few.tested) == (0, 0)
    assert "0.000 of 500 redraws chose a threshold (40 prompts are fewer than the 59" in summary(few, 40, 0.05)
    some = redraw({0.9: np.array([0.0] * 119 + [1.0])}, 60, delta=0.05)
    assert 0.4 < some.chosen < 0.6, "the one loss is among the 60 in half of the redraws"
    assert "fewer than" not in summary(some, 60, 0.05)
    assert redraw({0.9: np.zeros(120)}, 60, delta=0.05).chosen == 1


def test_one_calibration_is_judged_on_the_other_prompts() -> None:
    """60 prompts choose 0.5, on which they lose nothing; the 40 others lose a quarter. Control: chosen on all, nothing is."""
    lost = np.array([0.0] * 60 + [1.0] * 10 + [0.0] * 30)
    found = Measured({0.9: np.zeros(100), 0.5: lost}, {0.9: np.full(100, 8.0), 0.5: np.full(100, 6.0)})
    line = on_fresh(found, 60, 0.05)
    assert line == "delta 0.05: the first 60 prompts choose 0.5 (0.0000 lost), the 40 others lose 0.2500 ± 0.0693 at 6.00"
    assert "choose 0.9" in on_fresh(found, 98, 0.05)
    assert on_fresh(found, 40, 0.05) == "delta 0.05: the first 40 prompts choose no threshold"


def test_states_are_compared_prompt_by_prompt(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two states whose losses differ by 0.25 on each prompt: no error, though each state's own mean has one."""
    own = np.linspace(0, 0.5, 10)
    made = {"deferred": (own, np.full(10, 6.0)), "propagate": (own + 0.25, np.full(10, 5.0))}
    monkeypatch.setattr(exit_guarantee, "measured", lambda args, state: Measured({0.5: made[state][0]}, {0.5: made[state][1]}))
    exit_guarantee.main(["model", "exits", "file", "-n", "5", "--exit-state", "deferred", "propagate"])
    lines = [line for line in capsys.readouterr().out.splitlines() if " less " in line]
    assert lines == ["propagate less deferred, 0.5: 0.2500 ± 0.0000 lost, -1.0000 ± 0.0000 layers"]
