"""How often the calibrated rule of a classifier with early exits loses more than delta on texts that did not choose it.

All exits read all texts once. Each redraw calibrates on some of the texts, as `train-classifier` does, and judges the rule on
the others. The control ("naive") takes the last threshold, from the safest on, whose mean loss on the same texts is at most
delta. Rules:

* default: the best of all criteria, each tested at epsilon / 5.
* a criterion alone, at epsilon, as a user names it before.
* by exit (`--train`): the entropy with a threshold for each exit, shaped on the training texts.
* numbers: the patience of exits that predict numbers.

The mean of few other texts scatters around the expected loss, which adds violations to both counts: where the calibrating half
of the texts loses little by chance, the other half loses more. The bound is on the expected loss, of a text drawn from all of
the file; the redraws above delta by it are in brackets.

    python -m benchmarks.classifier_guarantee OUT OUT dev.jsonl -n 436 --delta 0.02 0.05 --train train.jsonl
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np

from headrace.data.plan import Threshold
from headrace.llm import LLM
from headrace.runner.classifier import CRITERIA, ExitClassifiers, first_exit, probabilities
from headrace.stats.calibration import calibrate
from headrace.training.classifier import exit_families, exit_logits, grid_of, read_labelled
from headrace.training.regression import numbers_of

EPSILON, REDRAWS = 0.05, 500


@dataclass(frozen=True, slots=True)
class Texts:
    """Predictions of all exits [exits, texts, classes], or numbers [exits, texts, 1], and the right answers [texts]."""

    predicted: np.ndarray
    targets: np.ndarray


@dataclass(frozen=True, slots=True)
class Curve:
    """Losses and layers of each text under each threshold of a criterion, the safest first: [thresholds, texts]."""

    criterion: str
    thresholds: Sequence[Threshold]
    losses: np.ndarray
    layers: np.ndarray


def curve(exits: ExitClassifiers, texts: Texts, criterion: str, thresholds: Sequence[Threshold]) -> Curve:
    """Losses as the calibration counts them: a wrong class where the full model is right, or a number whose error is above
    the full model's error and the tolerance together."""
    depths = np.stack([first_exit(criterion, one, texts.predicted, exits.tolerance) for one in thresholds])
    here = np.arange(len(texts.targets))
    if exits.tolerance is not None:
        errors = np.abs(texts.predicted[..., 0] - texts.targets)
        losses = errors[depths, here] > errors[-1] + exits.tolerance
    else:
        right = texts.predicted.argmax(-1) == texts.targets
        losses = ~right[depths, here] & right[-1]
    return Curve(criterion, thresholds, losses.astype(float), np.array(exits.layers)[depths])


def rules(exits: ExitClassifiers, texts: Texts, shaped: Texts | None) -> dict[str, list[Curve]]:
    """Curves by the name of a rule, which is the best of them. shaped: training texts, for thresholds by exit."""
    if exits.tolerance is not None:
        patience = [float(count) for count in range(len(exits.layers) - 1, 0, -1)]
        return {"numbers": [curve(exits, texts, "patience", patience)]}
    grids = {name: grid_of(name, len(exits.labels), len(exits.layers)) for name in CRITERIA}
    alone = {name: [curve(exits, texts, name, grid)] for name, grid in grids.items()}
    found = {"default": [one for (one,) in alone.values()], **alone}
    if shaped is not None:
        families = exit_families(shaped.predicted, shaped.targets)["entropy"]
        found["by exit"] = [curve(exits, texts, "entropy", families)]
    return found


def certified(own: Curve, delta: float, epsilon: float) -> int | None:
    """Number of the threshold that Learn-then-Test chooses on these texts."""
    found = calibrate(lambda at: own.losses[int(at)], range(len(own.thresholds)), delta=delta, epsilon=epsilon)
    return None if found.threshold is None else int(found.threshold)


def naive(own: Curve, delta: float) -> int | None:
    """Number of the last threshold up to which the mean loss on these texts is at most delta."""
    low = [*takewhile(lambda at: own.losses[at].mean() <= delta, range(len(own.thresholds)))]
    return low[-1] if low else None


def best(curves: Sequence[Curve], chosen: Sequence[int | None], texts: np.ndarray) -> tuple[Curve, int] | None:
    """The rule with the fewest layers on these texts; None if no criterion has one."""
    pairs = [(own, at) for own, at in zip(curves, chosen, strict=True) if at is not None]
    return min(pairs, key=lambda pair: pair[0].layers[pair[1], texts].mean(), default=None)


def report(curves: Sequence[Curve], n: int, delta: float, redraws: int) -> str:
    """Shares of redraws that are above delta on the other texts (on all), and that chose a rule; mean loss and layers on the
    others."""
    rng, count = np.random.default_rng(0), curves[0].losses.shape[1]
    found: dict[str, list[tuple[float, float, float]]] = {"tested": [], "naive": []}
    for _ in range(redraws):
        order = rng.permutation(count)
        calibrating, fresh = order[:n], order[n:]
        own = [Curve(one.criterion, one.thresholds, one.losses[:, calibrating], one.layers) for one in curves]
        choices = {
            "tested": [certified(one, delta, EPSILON / len(curves)) for one in own],
            "naive": [naive(one, delta) for one in own],
        }
        for kind, chosen in choices.items():
            if rule := best(curves, chosen, calibrating):
                one, at = rule
                losses, layers = one.losses[at], one.layers[at, fresh]
                found[kind].append((float(losses[fresh].mean()), float(losses.mean()), float(layers.mean())))
    parts = []
    for kind, values in found.items():
        above, above_all = (sum(one[at] > delta for one in values) / redraws for at in (0, 1))
        line = f"{kind} {above:.3f} above ({above_all:.3f} on all texts), {len(values) / redraws:.3f} chose"
        if values:
            loss, _, layers = np.mean(values, 0)
            line += f" (loss {loss:.4f}, {layers:.2f} layers)"
        parts.append(line)
    return "; ".join(parts)


def read_texts(llm: LLM, exits: ExitClassifiers, path: Path) -> Texts:
    """Predictions of all exits for the labelled texts of a file."""
    data = read_labelled(path, numbers=exits.tolerance is not None)
    logits = np.swapaxes(np.array(exit_logits(llm, data.texts)), 0, 1)
    if exits.tolerance is not None:
        return Texts(logits, numbers_of(data.labels))
    return Texts(probabilities(logits), np.array([exits.labels.index(label) for label in data.labels]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("classifier")
    parser.add_argument("data", type=Path, help="labelled texts that trained nothing")
    parser.add_argument("-n", type=int, required=True, help="texts of each calibration")
    parser.add_argument("--delta", type=float, nargs="+", default=[0.02, 0.05])
    parser.add_argument("--train", type=Path, help="the training texts, which shape the thresholds by exit")
    parser.add_argument("--redraws", type=int, default=REDRAWS)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(arguments)
    with LLM(args.model, threads=args.threads, classifier=args.classifier) as llm:
        assert llm.classifier is not None
        exits = llm.classifier.exits
        texts = read_texts(llm, exits, args.data)
        shaped = None if args.train is None else read_texts(llm, exits, args.train)
    print(f"{len(texts.targets)} texts, {args.n} of them calibrate; {args.redraws} redraws; epsilon {EPSILON:g}")
    found = rules(exits, texts, shaped)
    for delta in args.delta:
        for name, curves in found.items():
            print(f"{name}, delta {delta:g}: {report(curves, args.n, delta, args.redraws)}", flush=True)


if __name__ == "__main__":
    main()
