"""Default sampling settings of a model, with the origin of each.

In order: the name that the user gave (`headrace add`), the catalog (by name or SHA-256 of the file), the model's own files
(generation_config.json, general.sampling.* of a GGUF file), its family in the catalog, and `FALLBACK`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

from headrace.weights.catalog import Entry, Family

# Enough variety for a conversation, without the tail that makes a small model wander into other languages.
FALLBACK = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
FROM_NAME, FROM_CATALOG, FROM_MODEL, FROM_FAMILY, FROM_US = "name", "catalog", "model", "family", "default"
STATED = (FROM_NAME, FROM_CATALOG, FROM_MODEL)
FOLDER_FIELDS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
GGUF_FIELDS = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_repeat": "repetition_penalty",
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its origin: name | catalog | model | family | default. of: name of the entry or family, unless it is the
    model's own.
    """

    value: Any
    origin: str
    of: str = ""


Defaults = Mapping[str, Setting]
# Which defaults hold: the model's, or neutral ones.
SamplingDefaults = Literal["model", "neutral"]


def defaults_of(entry: Entry | None, called: str, own: Mapping[str, Any], family: Family | None) -> dict[str, Setting]:
    """Settings of a model that the user calls `called`. own: settings of its files."""
    if entry is not None and entry.sampling:
        return _from(entry.sampling, FROM_CATALOG, "" if entry.name == called else entry.name)
    if own:
        return _from(own, FROM_MODEL)
    if family is not None:
        return _from(family.sampling, FROM_FAMILY, family.name)
    return _from(FALLBACK, FROM_US)


def from_name(sampling: Mapping[str, Any]) -> dict[str, Setting]:
    """Settings that belong to a name that the user gave."""
    return _from(sampling, FROM_NAME)


def values(defaults: Defaults) -> dict[str, Any]:
    """Values by setting."""
    return {name: one.value for name, one in defaults.items()}


def stated(defaults: Defaults) -> dict[str, Any]:
    """Values by setting, without those guessed from the family or taken from FALLBACK."""
    return {name: one.value for name, one in defaults.items() if one.origin in STATED}


def as_json(defaults: Defaults) -> dict[str, dict[str, Any]]:
    """JSON data: {"temperature": {"value": 0.2, "origin": "catalog", "of": ""}, …}."""
    return {name: asdict(one) for name, one in defaults.items()}


def summary(defaults: Defaults, given: Mapping[str, Any] | None = None) -> str:
    """One line: "temperature 0.5 (given), top_p 0.9, top_k 20 (catalog)". given: settings that override the defaults."""
    given = given or {}
    parts = [(name, value, "given") for name, value in given.items()]
    parts += [(name, one.value, _origin(one)) for name, one in defaults.items() if name not in given]
    texts = []
    for origin, group in groupby(parts, key=lambda part: part[2]):
        texts.append(", ".join(f"{name} {_shown(value)}" for name, value, _ in group) + f" ({origin})")
    return ", ".join(texts) or "nothing is filtered"


def own_settings(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings of a generation_config.json; greedy if do_sample is false."""
    settings = {name: generation[name] for name in FOLDER_FIELDS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        settings["temperature"] = 0.0
    return settings


def gguf_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling settings of a GGUF file."""
    stated = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in GGUF_FIELDS.items()}
    # Numbers are stored as float32: keep the digits that it holds.
    numbers = {name: value for name, value in stated.items() if isinstance(value, int | float) and not isinstance(value, bool)}
    return {name: value if isinstance(value, int) else float(f"{value:.7g}") for name, value in numbers.items()}


def family_of(families: Iterable[Family], architecture: str, names: Iterable[str]) -> Family | None:
    """The family of a model by its architecture and one of its names; the longest match wins."""
    words = ["".join(char for char in name.lower() if char.isalnum()) for name in names]
    alike = [one for one in families if one.architecture == architecture and any(one.key in word for word in words)]
    return max(alike, key=lambda one: len(one.key), default=None)


def _from(sampling: Mapping[str, Any], origin: str, of: str = "") -> dict[str, Setting]:
    return {name: Setting(value, origin, of) for name, value in sampling.items()}


def _origin(one: Setting) -> str:
    origin = {FROM_MODEL: "the model's own", FROM_US: "default"}.get(one.origin, one.origin)
    return f"{origin}: {one.of}" if one.of else origin


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
