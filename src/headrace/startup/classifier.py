"""A trained classifier with early exits: its files, the threshold of a request, the encoding of texts and pairs of texts.

Files: classifier.json (description and model), classifier.safetensors (weights), calibration.json (calibrated thresholds).
Needs no torch.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from headrace.data.outputs import Classification, Vote
from headrace.data.plan import Threshold
from headrace.decoding.prompts import POOLS
from headrace.runner.classifier import BOTH, ExitClassifiers, probabilities
from headrace.startup.opening import Opened, missing_heads_error
from headrace.weights.atomic_file import atomic_write
from headrace.weights.decode import read_floats
from headrace.weights.source import CLASSIFIER_INFO

INFO, WEIGHTS, CALIBRATION = CLASSIFIER_INFO, "classifier.safetensors", "calibration.json"
VERSION = 1
MOST_LABELS, LONGEST_LABEL = 4096, 1024
Size = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
# Two texts with one class, such as a premise and a hypothesis.
Pair = tuple[str, str]


class Info(msgspec.Struct, frozen=True):
    """The fields of classifier.json.

    model: name for the user. fits: fingerprint of the model that the exits were trained on. layers: number of layers below each
    exit. trained: training settings for the user. tolerance: of exits that predict numbers; they have no labels.
    """

    model: str
    fits: str
    labels: tuple[str, ...]
    layers: tuple[Size, ...]
    pooling: str
    trained: dict[str, float | str] = {}
    version: Size = VERSION
    tolerance: float | msgspec.UnsetType = msgspec.UNSET


class ClassifierThreshold(msgspec.Struct, frozen=True):
    """A threshold with a guarantee from `n` held-out texts: with probability 1 - epsilon, at most a share `delta` of texts like
    them is lost, that is, the exit is wrong and the full model is right; of numbers, the exit errs by more than the full model
    and the tolerance together. risk, mean_layers, spread: values on the n texts; spread is the standard deviation of
    the layers, 0 in files that lack it.
    """

    criterion: Annotated[str, msgspec.Meta(min_length=1)]
    threshold: Threshold
    delta: float
    epsilon: float
    bound: str
    n: int
    risk: float
    mean_layers: float
    spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Classifier:
    """Exits with calibrated thresholds (`rules`); the one with the least `mean_layers` comes first."""

    exits: ExitClassifiers
    rules: tuple[ClassifierThreshold, ...] = field(default=())

    def rule(self, criterion: str | None, threshold: Threshold | None) -> tuple[str, Threshold]:
        """Criterion and threshold of a request; None selects a calibrated one, "off" disables early exit. Raises ValueError."""
        threshold = tuple(threshold) if isinstance(threshold, list) else threshold
        if criterion == "off" or (criterion is None and threshold is None and not self.rules):
            if threshold is not None:
                raise ValueError("threshold needs a criterion; name one, or leave threshold out")
            return "", 0.0
        if threshold is None:
            found = [rule for rule in self.rules if criterion in (None, rule.criterion)]
            if not found:
                self.exits.check(str(criterion))
                raise ValueError(f"no threshold of {criterion} was calibrated for this classifier; give one")
            return found[0].criterion, found[0].threshold
        if criterion is None:
            raise ValueError("threshold needs a criterion; name one")
        self.exits.check(criterion, threshold)
        return criterion, threshold

    def calibrated(self, criterion: str, threshold: Threshold) -> ClassifierThreshold | None:
        """The calibrated rule with this criterion and threshold; None if there is none, or its layers have no spread."""
        rules = (rule for rule in self.rules if (rule.criterion, rule.threshold) == (criterion, threshold))
        return next((rule for rule in rules if rule.spread > 0), None)

    def classification(self, token_ids: list[int], logits: Sequence[Sequence[float]]) -> Classification:
        """The classification of a text from the logits [exits, classes] of its computed exits, or from their numbers."""
        if self.exits.tolerance is not None:
            numbers = [Vote(layer, value=row[0]) for layer, row in zip(self.exits.layers, logits, strict=False)]
            return Classification(token_ids, "", {}, numbers[-1].layers, numbers, numbers[-1].value)
        shares, layers, labels = probabilities(np.array(logits)), self.exits.layers, self.exits.labels
        votes = [Vote(layers[at], labels[one.argmax()], float(one.max())) for at, one in enumerate(shares)]
        each = dict(zip(labels, shares[-1].tolist(), strict=True))
        return Classification(token_ids, votes[-1].label, each, votes[-1].layers, votes)


def encode_texts(read: Callable[[str], list[int]], texts: Any) -> Any:
    """Encode texts for `LLM.classify` with `read`; token ids stay.

    A pair (a, b) becomes [CLS] a [SEP] b [SEP], all of one token type.
    """
    if isinstance(texts, str) or not all(isinstance(one, str | tuple | list) for one in texts):
        return texts
    return [_ids(read, one) for one in texts]


def _ids(read: Callable[[str], list[int]], text: Any) -> Any:
    if isinstance(text, tuple) and len(text) == 2 and all(isinstance(one, str) for one in text):
        first, second = text
        return [*read(first), *read(second)[1:]]
    return read(text) if isinstance(text, str) else text


def require_classifier(classifier: Classifier | None) -> Classifier:
    """Return the classifier. Raises ValueError if None."""
    if classifier is None:
        raise ValueError("no classifier was opened; train one (headrace train-classifier), and give it as classifier=FOLDER")
    return classifier


def fingerprint(model: Opened) -> str:
    """Fingerprint of a model's sizes and small tensors (norms, biases), which differ between trained weights."""
    c, source = model.config, model.source
    sign = hashlib.sha256(f"{c.architecture} {c.hidden_size} {c.vocab_size} {c.num_layers} {model.pooling}".encode())
    for name in sorted(source.names()):
        if len(source.info(name).shape) == 1:
            sign.update(name.encode() + b"\0" + np.asarray(read_floats(source, name), "<f4").tobytes())
    return sign.hexdigest()[:32]


def save(
    folder: Path, exits: ExitClassifiers, model: Opened, trained: dict[str, float | str], rules: Sequence[ClassifierThreshold]
) -> None:
    """Write all three files. classifier.json comes last, so that an incomplete folder is not a classifier."""
    info = Info(
        model.path.name,
        fingerprint(model),
        exits.labels,
        exits.layers,
        exits.pooling,
        trained,
        tolerance=msgspec.UNSET if exits.tolerance is None else exits.tolerance,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INFO).unlink(missing_ok=True)
    with atomic_write(folder / WEIGHTS) as part:
        save_file({"weight": exits.weight.astype(np.float32), "bias": exits.bias.astype(np.float32)}, part)
    for name, what in ((CALIBRATION, sorted(rules, key=lambda rule: rule.mean_layers)), (INFO, info)):
        with atomic_write(folder / name) as part:
            part.write_bytes(msgspec.json.format(msgspec.json.encode(what), indent=2) + b"\n")


def load(folder: str | Path, model: Opened) -> Classifier:
    """Load a classifier. Raises ValueError, one line, if it cannot be read or belongs to another model."""
    place, c = Path(folder), model.config
    if not (place / INFO).is_file():
        raise ValueError(f"{missing_heads_error(place, 'classifier', INFO)}; train one: headrace train-classifier {model.name}")
    try:
        info = msgspec.json.decode((place / INFO).read_bytes(), type=Info)
        # numpy lacks some types that a file may have.
        with safe_open(place / WEIGHTS, framework="np") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.offset_keys()}
            tensors = {name: file.get_tensor(name) for name, kind in kinds.items() if kind == "F32"}
        found = place / CALIBRATION
        rules = msgspec.json.decode(found.read_bytes(), type=tuple[ClassifierThreshold, ...]) if found.is_file() else ()
    except (OSError, msgspec.MsgspecError, RecursionError, UnicodeDecodeError, SafetensorError) as error:
        raise ValueError(f"{place}: this classifier cannot be read ({' '.join(str(error).split())[:200]})") from None
    if not c.encoder:
        raise ValueError(f"classifiers need an encoder (BERT, MiniLM), and {model.name} is not one; leave it out")
    if info.version != VERSION:
        raise ValueError(f"{place}: classifiers of version {info.version} are unknown; train it again")
    if info.fits != fingerprint(model):
        raise ValueError(
            f"{place}: this classifier is for {info.model!r:.100}, and {model.name} is another model; "
            f"train one for it: headrace train-classifier {model.name}"
        )
    _check(place, info, tensors, model)
    weight, bias = (tensors[name].astype(np.float64) for name in ("weight", "bias"))
    exits = ExitClassifiers(info.layers, info.labels, info.pooling, weight, bias, info.tolerance or None)
    for rule in rules:
        try:
            exits.check(rule.criterion, rule.threshold)
        except ValueError as error:
            raise ValueError(f"{found}: {error}; train it again") from None
    return Classifier(exits, tuple(sorted(rules, key=lambda rule: rule.mean_layers)))


def _check(place: Path, info: Info, tensors: dict[str, np.ndarray], model: Opened) -> None:
    """Raise ValueError for an invalid field or tensor."""
    layers, labels, c = info.layers, info.labels, model.config
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] != c.num_layers:
        raise ValueError(f"{place}: exits stand after ascending layers, the last after layer {c.num_layers}; train it again")
    if isinstance(info.tolerance, float):
        if labels or not 0 < info.tolerance < float("inf"):
            raise ValueError(f"{place}: exits that predict numbers have a tolerance above 0 and no labels; train it again")
    elif len(set(labels)) != len(labels) or not 2 <= len(labels) <= MOST_LABELS or max(map(len, labels)) > LONGEST_LABEL:
        raise ValueError(f"{place}: a classifier has 2 to {MOST_LABELS} different labels; train it again")
    if info.pooling not in (*POOLS, BOTH):
        raise ValueError(f"{place}: unknown pooling {info.pooling!r:.100}; train it again")
    outputs = 1 if isinstance(info.tolerance, float) else len(labels)
    shape = len(layers), outputs, c.hidden_size * (1 + (info.pooling == BOTH))
    for name, wanted in (("weight", shape), ("bias", shape[:2])):
        if name not in tensors or tensors[name].shape != wanted or tensors[name].dtype != np.float32:
            raise ValueError(f"{place}: tensor {name!r} is missing or not of the shape {wanted}; train it again")
        if not np.isfinite(tensors[name]).all():
            raise ValueError(f"{place}: tensor {name!r} has values that are NaN or infinite; train it again")
