"""Calibrated confidence thresholds: of early exits in calibration.json in their folder, of cascades in Headrace's own folder.

Needs no torch.
"""

import hashlib
import logging
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.data.params import ParamError, SamplingParams
from headrace.data.settings import DEFERRED, ModelSettings
from headrace.startup.classifier import fingerprint
from headrace.startup.opening import Opened
from headrace.weights.atomic_file import atomic_write
from headrace.weights.model_files import weight_files
from headrace.weights.store import find_home, home

log = logging.getLogger("headrace")

CALIBRATION = "calibration.json"
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Depth = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


def exits_fingerprint(model: Opened, exits: str | Path) -> str:
    """Fingerprint of a model's norms, biases and size together with the weights of its exits.

    A calibrated threshold is valid for this model and these exits alone, while exits may draft for any model of the same shape.
    """
    sign = hashlib.sha256(f"{fingerprint(model)} {_size(model.path)}".encode())
    for file in sorted(Path(exits).glob("*.safetensors")):
        sign.update(file.read_bytes())
    return sign.hexdigest()[:32]


def cascade_folder(model: Path, smaller: Path) -> Path:
    """The folder of the thresholds of a cascade, by paths and sizes of both models' files."""
    signs = [f"{one.resolve()}:{_size(one)}" for one in (model, smaller)]
    return home() / "cascades" / hashlib.sha256("\n".join(signs).encode()).hexdigest()[:24]


def _size(model: Path) -> int:
    return sum(file.stat().st_size for file in weight_files(model))


class CalibratedThreshold(msgspec.Struct, frozen=True):
    """A threshold with a guarantee from `n` prompts: for prompts like them, with probability 1 - epsilon, answers lose at most
    `delta` on average compared with the full model (Learn then Test).

    loss: text (1 - ROUGE-L of the tokens), token (share of exited tokens that differ from the full model's) or risk (ROUGE-L to
    references below the full model's). risk: its mean.
    layers: mean number of layers per token (in a cascade: of the larger model, 0 for the smaller one's tokens). spread: its
    standard deviation between answers. data: SHA-256 of the prompts. state: exit_state during calibration. fits: fingerprint of
    the model and exits. slope: exit_slope; exits: exit_layers during calibration, empty for the exit that drafts.
    """

    criterion: str
    threshold: float
    decay: float
    max_tokens: Count
    loss: str
    delta: Share
    epsilon: Share
    n: Count
    risk: Share
    layers: Depth
    spread: Depth
    data: str
    state: str = DEFERRED
    fits: str = ""
    slope: float = 0.0
    exits: str = ""

    def summary(self) -> str:
        """One line for the user."""
        decay = f", decay {self.decay:g}" if self.decay else ""
        decay += f", slope {self.slope:g}" if self.slope else ""
        decay += f", exit_layers {self.exits}" if self.exits else ""
        state = "" if self.state == DEFERRED else f", exit_state {self.state}"
        return (
            f"{self.criterion} {self.threshold:g}{decay}{state}: {self.loss} loss at most {self.delta:g} with probability "
            f"{1 - self.epsilon:g}, for prompts like the {self.n} it was calibrated on; {self.layers:.1f} layers a token"
        )


def save(folder: Path, rule: CalibratedThreshold) -> None:
    """Add a threshold to a folder. It replaces one with the same criterion, decay, slope, exits, loss, state and model."""

    def kind(one: CalibratedThreshold) -> tuple[str | float, ...]:
        return one.criterion, one.decay, one.slope, one.exits, one.loss, one.state, one.fits

    others = [one for one in load(folder) if kind(one) != kind(rule)]
    data = msgspec.json.encode([rule, *others])
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / CALIBRATION) as part:
        part.write_bytes(msgspec.json.format(data, indent=2) + b"\n")


def load(folder: str | Path, state: str = "") -> tuple[CalibratedThreshold, ...]:
    """The thresholds in a folder, newest first, optionally of one exit_state. Raises ValueError if the file cannot be read."""
    place = Path(folder) / CALIBRATION
    try:
        rules = msgspec.json.decode(place.read_bytes(), type=tuple[CalibratedThreshold, ...]) if place.is_file() else ()
        for one in rules:
            asked: dict[str, Any] = {"exit_criterion": one.criterion, "exit_threshold": one.threshold, "exit_decay": one.decay}
            asked["exit_slope"] = one.slope
            # Raises ParamError if no request could have these values.
            SamplingParams(**asked, max_tokens=one.max_tokens)
        return tuple(one for one in rules if state in ("", one.state))
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError, ParamError) as error:
        raise ValueError(f"{place} cannot be read ({' '.join(str(error).split())[:200]}); remove it") from None


def load_for(model: Opened, settings: ModelSettings, smaller: Path | None) -> tuple[CalibratedThreshold, ...]:
    """The calibrated thresholds, newest first, of a model that was opened with `settings`; `smaller`: its cascade's model.

    Thresholds of another model or of other exits are left out, with a warning in the log. Raises ValueError as `load` does.
    """
    if settings.exits is None:
        return () if smaller is None or find_home() is None else load(cascade_folder(model.path, smaller), settings.exit_state)
    rules = [rule for rule in load(settings.exits, settings.exit_state) if rule.exits == (settings.exit_layers or "")]
    if not rules:
        return ()
    sign = exits_fingerprint(model, settings.exits)
    if not (own := tuple(rule for rule in rules if rule.fits == sign)):
        place = Path(settings.exits) / CALIBRATION
        log.warning("%s is of another model or of other exits and is not used; run headrace calibrate", place)
    return own


def save_for(rule: CalibratedThreshold, model: Opened, settings: ModelSettings, smaller: Path | None) -> CalibratedThreshold:
    """Save a threshold that was calibrated on a model opened with `settings`. Returns it as saved.

    smaller: the smaller model of a cascade. The file is in the folder of the exits, or in Headrace's own folder for a cascade.
    """
    if settings.exits is None:
        assert smaller is not None
        save(cascade_folder(model.path, smaller), rule)
        return rule
    fits, exits = exits_fingerprint(model, settings.exits), settings.exit_layers or ""
    rule = msgspec.structs.replace(rule, fits=fits, state=settings.exit_state, exits=exits)
    save(Path(settings.exits), rule)
    return rule
