"""Exits that predict a number: the fit over a frozen encoder, the calibration of patience, and the correlation with the labels.

A text stops at the first exit at which `patience` exits in a row have each changed the number by less than a tolerance.

Source: PABEE, Zhou et al., "BERT Loses Patience", arXiv 2006.04152, section 3.2 (regression).
"""

import math
from collections.abc import Sequence

import numpy as np

from headrace.runner.classifier import ExitClassifiers, first_exit
from headrace.startup.classifier import ClassifierThreshold
from headrace.stats.calibration import calibrate


def numbers_of(labels: Sequence[str]) -> np.ndarray:
    """Labels as float64 [texts]. Raises ValueError for a label that is no finite number."""
    values = []
    for label in labels:
        try:
            value = float(label)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise ValueError(f"label {label!r:.100}: --tolerance learns numbers; give numbers, or leave --tolerance out")
        values.append(value)
    return np.array(values)


def spread(targets: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of the numbers to learn. Raises ValueError if all are equal."""
    if not (scale := float(targets.std())) > 0:
        raise ValueError(f"all numbers to learn are {targets[0]:g}; give texts with different ones")
    return float(targets.mean()), scale


def fit_number(rows: np.ndarray, targets: np.ndarray, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Fit a ridge regression in float64; rows and targets are normalized to mean 0 and variance 1.

    rows: [texts, hidden]. targets: [texts]. decay: L2 penalty of the weights, next to the mean square of the errors.
    Returns weight [1, hidden] and bias [1] float32 with the normalization folded in.
    """
    mean, scale = rows.mean(0, dtype=np.float64), rows.std(0, dtype=np.float64) + 1e-6
    centre, width = spread(targets)
    x, y = (rows - mean) / scale, (targets - centre) / width
    weight = np.linalg.solve(x.T @ x / len(x) + decay * np.eye(x.shape[1]), x.T @ y / len(x)) * width / scale
    return weight[None].astype(np.float32), np.array([centre - weight @ mean], np.float32)


def correlations(values: np.ndarray, targets: np.ndarray) -> list[float]:
    """Pearson's r of each exit's numbers [exits, texts, 1] with the targets [texts]; 0 for an exit that predicts one number."""
    return [float(np.corrcoef(own, targets)[0, 1]) if own.std() > 0 else 0.0 for own in values[..., 0]]


def calibrated_patience(
    exits: ExitClassifiers, values: np.ndarray, targets: np.ndarray, delta: float, epsilon: float
) -> list[ClassifierThreshold]:
    """Calibrate the patience: one threshold, or none if no patience is shown to be good enough.

    values: [exits, texts, 1] of texts that trained nothing; targets: [texts].
    A text has loss 1 if its exit errs by more than the full model and the tolerance together.
    """
    assert exits.tolerance is not None
    tolerance, errors = exits.tolerance, np.abs(values[..., 0] - targets)

    def exit_of(patience: float) -> np.ndarray:
        return first_exit("patience", patience, values, tolerance)

    def losses(patience: float) -> np.ndarray:
        at = exit_of(patience)
        return (errors[at, np.arange(len(at))] > errors[-1] + tolerance).astype(float)

    grid = [float(count) for count in range(len(exits.layers) - 1, 0, -1)]
    result = calibrate(losses, grid, delta=delta, epsilon=epsilon) if grid else None
    if result is None or result.threshold is None or result.risk is None:
        return []
    depths = np.array(exits.layers)[exit_of(result.threshold)]
    about = result.bound, result.n, result.risk, float(depths.mean()), float(depths.std())
    return [ClassifierThreshold("patience", result.threshold, delta, epsilon, *about)]
