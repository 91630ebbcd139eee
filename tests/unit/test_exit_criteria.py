"""When a text leaves an encoder: the papers' rules on tables made by hand, and what is said of them that does not hold."""

import tracemalloc
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from headrace.data.plan import Threshold
from headrace.runner import classifier as exits
from headrace.runner.classifier import CRITERIA, Criterion, first_exit, passes
from headrace.stats.calibration import calibrate
from headrace.training.classifier import exit_families, grid_of

CLASSES = 3


def of(*exits: tuple[float, ...]) -> np.ndarray:
    """One text's probabilities, exit by exit: [exits, 1, classes]."""
    return np.array(exits)[:, None, :]


def drawn(texts: int, classes: int, layers: int = 5, seed: int = 3) -> np.ndarray:
    """Probabilities [exits, texts, classes] that grow surer from exit to exit."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(layers, texts, classes)).cumsum(0)
    raised = np.exp(logits)
    shares: np.ndarray = raised / raised.sum(-1, keepdims=True)
    return shares


# -- tables by hand ----------------------------------------------------------------------------------------------------

WAVERS = of((0.5, 0.3, 0.2), (0.3, 0.6, 0.1), (0.1, 0.8, 0.1), (0.05, 0.9, 0.05))  # says 0, then 1
LEVEL = of((1 / 3, 1 / 3, 1 / 3), (0.34, 0.33, 0.33), (0.35, 0.33, 0.32), (0.4, 0.3, 0.3))  # never sure


@pytest.mark.parametrize(
    ("criterion", "threshold", "wavers", "level"),
    [
        ("max_prob", 0.0, 0, 0),  # shallow-deep networks: the first that is as likely as that
        ("max_prob", 0.6, 1, 3),
        ("max_prob", 0.85, 3, 3),
        ("margin", 0.29, 1, 3),  # 0.2, 0.3, 0.7, 0.85
        ("entropy", 0.9, 1, 3),  # BranchyNet, in nats: 1.03, 0.898, 0.639, 0.394
        ("entropy", 0.65, 2, 3),
        ("kl", 0.15, 2, 1),  # from the exit before: 0.21, 0.12, 0.037
        ("patience", 1, 2, 1),  # PABEE: exits that say the same, 0, 0, 1, 2 of them before this one
        ("patience", 2, 3, 2),
    ],
)
def test_each_criterion_selects_its_exit(criterion: str, threshold: float, wavers: int, level: int) -> None:
    assert first_exit(criterion, threshold, WAVERS).tolist() == [wavers]
    assert first_exit(criterion, threshold, LEVEL).tolist() == [level]
    both = np.concatenate([WAVERS, LEVEL], 1)
    assert first_exit(criterion, threshold, both).tolist() == [wavers, level]  # whoever is beside it


@pytest.mark.parametrize(
    ("criterion", "careful_first"),
    [
        ("max_prob", [1.0, 0.9, 0.7, 0.5, 0.0]),
        ("margin", [1.0, 0.8, 0.4, 0.1, 0.0]),
        ("entropy", [0.0, 0.2, 0.5, 0.8, np.log(CLASSES)]),
        ("kl", [0.0, 0.01, 0.1, 1.0, 100.0]),
        ("patience", [4, 3, 2, 1]),
    ],
)
def test_a_lower_threshold_exits_no_later(criterion: str, careful_first: list[float]) -> None:
    """And nobody leaves where nothing is sure enough: the last exit answers."""
    said = drawn(200, CLASSES)
    left = [first_exit(criterion, threshold, said) for threshold in careful_first]
    assert all((after <= before).all() for before, after in pairwise(left))
    assert len({tuple(each) for each in left}) > 2
    assert (first_exit("", 0.0, said) == len(said) - 1).all()


def test_of_two_classes_probability_and_entropy_are_one_rule() -> None:
    """The entropy falls as the larger of two probabilities grows, so each threshold of one is a threshold of the other; of
    three classes it is not."""
    two, three = drawn(300, 2), drawn(300, 3)
    for q in (0.55, 0.7, 0.9):
        h = -q * np.log(q) - (1 - q) * np.log(1 - q)
        assert np.array_equal(first_exit("max_prob", q, two), first_exit("entropy", h, two))
        assert not np.array_equal(first_exit("max_prob", q, three), first_exit("entropy", h, three))


# -- W15: the minus ----------------------------------------------------------------------------------------------------


ENTROPY = CRITERIA["entropy"].measure


def signed_wrongly(said: np.ndarray) -> np.ndarray:
    """The entropy as BranchyNet's paper prints it."""
    return -ENTROPY(said)


def test_w15_the_entropy_has_a_minus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of which nothing is known never leaves at a threshold below ln C, and one of which all is known does at once.
    Control: without the minus all leave at once, the doubtful ones too."""
    level, certain = np.full((4, 1, CLASSES), 1 / CLASSES), np.repeat(np.eye(CLASSES)[:1][None], 4, 0)
    said = np.concatenate([level, certain], 1)
    for threshold in (0.0, 0.5, np.log(CLASSES) - 1e-9):
        assert first_exit("entropy", threshold, said).tolist() == [3, 0]
    assert first_exit("entropy", float(np.log(CLASSES) + 1e-9), said).tolist() == [0, 0]
    monkeypatch.setitem(CRITERIA, "entropy", Criterion(signed_wrongly, False, lambda classes, exits: 0.0))
    assert first_exit("entropy", 0.5, said).tolist() == [0, 0]


# -- W16: patience -----------------------------------------------------------------------------------------------------


def error_by_hand(exits: int, patience: int, inner: float, last: float) -> float:
    """How often PABEE is wrong about two classes, exactly: every exit errs by itself, with probability `inner`, the last one
    with `last`. By the number of exits that have agreed so far, and whether they are right."""
    runs, wrong = {(0, True): 1 - inner, (0, False): inner}, 0.0
    for exit in range(1, exits):
        error = last if exit == exits - 1 else inner
        after: dict[tuple[int, bool], float] = {}
        for (count, was_right), share in runs.items():
            for right, chance in ((True, 1 - error), (False, error)):
                agreed = count + 1 if right == was_right else 0
                if agreed == patience or exit == exits - 1:
                    wrong += share * chance * (not right)
                else:
                    after[agreed, right] = after.get((agreed, right), 0.0) + share * chance
        runs = after
    return wrong


def error_of_the_rule(exits: int, patience: int, inner: float, last: float, texts: int = 40_000) -> float:
    """The same counted, of texts drawn so."""
    rng = np.random.default_rng(11)
    errs = rng.random((exits, texts)) < np.array([inner] * (exits - 1) + [last])[:, None]
    said = np.where(errs[..., None], [0.1, 0.9], [0.9, 0.1])  # class 0 is right
    left = first_exit("patience", patience, said)
    wrong: np.ndarray = errs[left, np.arange(texts)]
    return float(wrong.mean())


@pytest.mark.parametrize("patience", [1, 2, 4])
def test_patience_errs_as_often_as_it_must(patience: int) -> None:
    """The recursion against the rule, within four standard errors. Control: one exit's patience more is another number."""
    expected, found = (error(12, patience, 0.3, 0.1) for error in (error_by_hand, error_of_the_rule))
    near = 4 * (expected * (1 - expected) / 40_000) ** 0.5
    assert abs(found - expected) < near
    assert abs(error_by_hand(12, patience + 1, 0.3, 0.1) - found) > near


def test_w16_patience_gains_under_conditions() -> None:
    """Of twelve exits that err by themselves. Inner ones of 15 % and a last one of 10 %: any patience here is better than the
    whole model, and three is best. Inner ones of 30 %: a small patience is worse than the whole model, and a larger better."""
    good = {patience: error_by_hand(12, patience, 0.15, 0.1) for patience in (1, 2, 3, 4, 6, 8)}
    assert max(good.values()) < 0.1
    assert min(good, key=lambda patience: good[patience]) == 3
    poor = {patience: error_by_hand(12, patience, 0.3, 0.1) for patience in (1, 2, 3, 4, 6, 8)}
    assert poor[1] > 0.1
    assert min(poor.values()) < 0.1


# -- W51: sure, and unchanging -----------------------------------------------------------------------------------------


def test_w51_low_entropy_and_stability_are_different_criteria() -> None:
    """A text whose second exit has a low entropy and whose third says something else: entropy lets it go, and wrong; the
    change between exits does not. And one that nobody is sure of, though nothing changes."""
    turns = of((0.5, 0.3, 0.2), (0.95, 0.03, 0.02), (0.1, 0.85, 0.05), (0.08, 0.88, 0.04))
    stays = of(*[(0.4, 0.35, 0.25)] * 4)
    said = np.concatenate([turns, stays], 1)
    assert first_exit("entropy", 0.3, said).tolist() == [1, 3]
    assert first_exit("kl", 0.05, said).tolist() == [3, 1]
    assert turns[1, 0].argmax() != turns[3, 0].argmax()


# -- who leaves matters ------------------------------------------------------------------------------------------------


def test_random_exits_lose_accuracy() -> None:
    """Three exits, each as sure as it is right, before one that is nearly always. Who leaves by their own word loses little;
    the same layers handed out by chance lose two points at least."""
    rng, texts = np.random.default_rng(2), 4_000
    certain = np.stack([rng.uniform(0.5, 1, texts) for _ in range(3)] + [np.full(texts, 0.98)])
    right = rng.random(certain.shape) < certain
    said = np.where(right[..., None], np.stack([certain, 1 - certain], -1), np.stack([1 - certain, certain], -1))

    def accuracy(left: np.ndarray) -> float:
        return float((said[left, np.arange(texts)].argmax(-1) == 0).mean())

    left = first_exit("max_prob", 0.9, said)
    assert 0.2 < (left < 3).mean() < 0.8
    assert accuracy(left) > accuracy(np.full(texts, 3)) - 0.05
    assert accuracy(rng.permutation(left)) < accuracy(left) - 0.02


def together(criterion: str, threshold: float, said: np.ndarray, tolerance: float | None = None) -> np.ndarray:
    """Nobody leaves before all can, as the code of PABEE and CALM has it in batches."""
    return np.full(said.shape[1], bool(passes(criterion, threshold, said).all()))


def test_exiting_as_a_batch_changes_the_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: then who is beside a text decides where it leaves."""

    def alone(rule: Callable[..., np.ndarray]) -> bool:
        monkeypatch.setattr(exits, "passes", rule)
        said = drawn(40, CLASSES)
        each = [int(first_exit("max_prob", 0.8, said[:, at : at + 1])[0]) for at in range(40)]
        return first_exit("max_prob", 0.8, said).tolist() == each

    assert alone(passes)
    assert not alone(together)


def test_an_exit_of_many_labels_takes_little_memory() -> None:
    """The products of a step's rows are made some at a time, and the sums have the bits that they have all at once."""
    rng = np.random.default_rng(0)
    weight, pooled = rng.normal(size=(1, 512, 384)), rng.normal(size=(64, 384)).astype(np.float32)
    many = exits.ExitClassifiers((1,), tuple(map(str, range(512))), "mean", weight, np.ones((1, 512)))
    tracemalloc.start()
    found = many.logits(0, pooled)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20, "all at once they are 96 MiB"
    np.testing.assert_array_equal(found, (pooled[:, None] * weight[0]).sum(-1) + 1)


# -- a threshold for each exit (BranchyNet) ----------------------------------------------------------------------------


DELTA = 0.024  # below the loss of some thresholds by little


def two_kinds(texts: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Two classes and three exits: the first is as sure as the second and often wrong, the second and the last are right."""
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, 2, texts)
    sure = rng.uniform(0.5, 1.0, (3, texts))
    right = rng.random((3, texts)) < np.stack([0.5 + 0.15 * sure[0], 0.9 + 0.1 * sure[1], np.full(texts, 0.98)])
    chosen = np.where(right, classes, 1 - classes)
    probs = np.where(chosen[..., None] == np.arange(2), sure[..., None], 1 - sure[..., None])
    return probs, classes


def lost(probs: np.ndarray, classes: np.ndarray, rule: Threshold) -> np.ndarray:
    predicted, at = probs.argmax(-1), first_exit("entropy", rule, probs)
    wrong: np.ndarray = (predicted[at, np.arange(len(at))] != classes) & (predicted[-1] == classes)
    return wrong.astype(float)


def test_thresholds_by_exit_by_hand() -> None:
    """Entropies of two exits: the first text passes at the first, the second at the second, the third at none."""
    sure, doubtful = [0.99, 0.01], [0.6, 0.4]  # 0.056 and 0.673 nats
    probs = np.array([[sure, doubtful, doubtful], [sure, sure, doubtful], [doubtful] * 3])
    assert first_exit("entropy", (0.1, 0.1), probs).tolist() == [0, 1, 2]
    assert first_exit("entropy", (0.0, 0.1), probs).tolist() == [1, 1, 2]
    assert first_exit("entropy", (0.7, 0.0), probs).tolist() == [0, 0, 0]
    assert first_exit("entropy", (0.0, 0.0), probs).tolist() == [2, 2, 2]


def test_a_cap_on_layers_holds_whatever_the_texts() -> None:
    """The largest threshold at an exit stops every text there: inputs made to look doubtful cost no more layers."""
    doubtful = np.full((5, 50, CLASSES), 1 / CLASSES)
    most = float(np.log(CLASSES)) + 1e-12
    assert first_exit("entropy", (0.1, 0.1, most, 0.0), doubtful).max() == 2
    assert first_exit("entropy", 0.1, doubtful).min() == 4  # the control: without a cap all layers run


def alternating(texts: int) -> np.ndarray:
    """Exits that contradict the exit before: the texts on which patience costs most, [5 exits, texts, 2 classes]."""
    first = np.arange(5)[:, None] % 2 == np.zeros(texts)
    return np.stack([np.where(first, 0.9, 0.1), np.where(first, 0.1, 0.9)], -1)


def test_patience_has_a_cap_too() -> None:
    """Patience 0 at an exit stops every text there; without it alternating exits run all layers. Others keep their exit."""
    assert first_exit("patience", 2.0, alternating(50)).min() == 4  # the control
    assert first_exit("patience", (2.0, 2.0, 0.0, 0.0), alternating(50)).max() == 2
    easy = np.tile([0.9, 0.1], (5, 50, 1))
    assert (first_exit("patience", (2.0, 2.0, 2.0, 0.0), easy) == first_exit("patience", 2.0, easy)).all()
    jumps = np.arange(5.0)[:, None, None] * np.ones((1, 50, 1))
    assert first_exit("patience", 1.0, jumps, 0.5).min() == 4  # numbers: the control
    assert first_exit("patience", (1.0, 0.0, 0.0, 0.0), jumps, 0.5).max() == 1


def test_an_exit_that_errs_gets_a_stricter_threshold() -> None:
    """At equal loss on fresh texts the thresholds by exit use fewer layers than one threshold for all."""
    families = exit_families(*two_kinds(4000, 1))["entropy"]
    assert all(np.all(np.array(after) >= before) for before, after in pairwise(families))
    probs, classes = two_kinds(4000, 2)
    layers = {}
    for name, grid in (("each", families), ("one", grid_of("entropy", 2, 3))):
        rules = [rule for rule in grid if lost(probs, classes, rule).mean() <= 0.05]
        layers[name] = min(float(first_exit("entropy", rule, probs).mean()) for rule in rules)
    assert layers["each"] < layers["one"] - 0.3


def test_calibrated_thresholds_by_exit_keep_the_guarantee() -> None:
    """500 redraws: with at most a share epsilon of them above delta on fresh texts; the control takes the last threshold whose
    mean is at most delta."""
    families = exit_families(*two_kinds(2000, 3))["entropy"]
    fresh = two_kinds(40_000, 4)
    risks = [lost(*fresh, rule).mean() for rule in families]
    tested = naive = 0
    for seed in range(500):
        probs, classes = two_kinds(300, 100 + seed)
        means = [lost(probs, classes, rule) for rule in families]
        found = calibrate(lambda at: means[int(at)], range(len(families)), delta=DELTA)  # noqa: B023
        tested += found.threshold is not None and risks[int(found.threshold)] > DELTA
        low = [at for at, mean in enumerate(means) if mean.mean() <= DELTA]
        naive += risks[low[-1]] > DELTA
    assert tested <= 0.05 * 500
    assert naive > 0.05 * 500
