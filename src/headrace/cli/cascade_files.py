"""Cascades in a settings file, and the results of `bench cascade --json` that they name."""

import json
import math
from collections.abc import Mapping
from typing import Any

from headrace.server.settings import CascadeSettings, SettingsError
from headrace.weights.store import expand


def read_cascade(table: Mapping[str, Any]) -> CascadeSettings:
    """Read one table of a settings file: name, tiers, score, and threshold or calibration.

    Threshold and calibration are one value, or a list with one for each tier but the last. Raises SettingsError.
    """
    given = dict(table)
    name, tiers, score = given.pop("name", ""), given.pop("tiers", []), given.pop("score", None)
    thresholds, files = _listed(given.pop("threshold", None)), _listed(given.pop("calibration", None))
    who = f"the cascade {str(name)[:100]!r}"
    if given:
        raise SettingsError(f"{who}: there is no setting {min(given)!r}; it has name, tiers, score, threshold, calibration")
    if not isinstance(name, str) or not isinstance(tiers, list) or not all(isinstance(tier, str) for tier in tiers):
        raise SettingsError(f"{who}: name is text and tiers is a list of the names of models")
    if bool(thresholds) == bool(files):
        raise SettingsError(f"{who} needs either threshold or calibration (what bench cascade --json wrote)")
    if not all(isinstance(one, int | float) and not isinstance(one, bool) for one in thresholds):
        raise SettingsError(f"{who}: threshold is a number, or a list of one for each tier but the last")
    calibrations = [_calibrated(who, one, score) for one in files]
    if len(apart := {scored for _, scored, _ in calibrations}) > 1:
        raise SettingsError(f"{who}: its files were calibrated with different scores ({', '.join(sorted(apart))}); use one")
    return CascadeSettings(
        name,
        tuple(tiers),
        tuple(_as_float(one) for one in thresholds) or tuple(threshold for threshold, _, _ in calibrations),
        score or (calibrations[0][1] if calibrations else "min"),
        "; ".join(promise for _, _, promise in calibrations),
    )


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [] if given is None else [given]


def _as_float(number: float) -> float:
    """Return a number of a file as a float; an integer above the float range becomes infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _calibrated(who: str, file: Any, score: Any) -> tuple[float, Any, str]:
    """Return threshold, score and guarantee of a result of `bench cascade --json`. Raises SettingsError."""
    try:
        found = json.loads(expand(file).read_text("utf-8"))
        made, scored, models = found["calibration"], str(found["score"]), found.get("models", ())
        threshold, n = made["threshold"], made["n"]
        promise = f"loses at most {made['delta']:g} with probability {1 - made['epsilon']:g}, on inputs like the {n} of {file}"
        promise += f" and of {' before '.join(models)}" if models else ""
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise SettingsError(f"{who}: {file} is not what bench cascade --json writes ({type(error).__name__})") from None
    if score is not None and score != scored:
        raise SettingsError(f"{who}: {file} was calibrated with the score {scored!r}, not {score!r}; leave score out")
    if not isinstance(threshold, int | float) or isinstance(threshold, bool):
        raise SettingsError(f"{who}: {file} found no threshold; calibrate with more questions, or a larger --delta")
    return _as_float(threshold), scored, promise
