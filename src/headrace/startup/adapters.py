"""The adapters that a model is opened with: their names, files and refusals. Needs no torch."""

import re
from pathlib import Path

from headrace.data.settings import ModelSettings
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.startup.opening import Opened
from headrace.startup.read_adapter import read_adapter
from headrace.weights.lora import Adapter

MOST_ADAPTERS = 64
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,99}")
# Settings that adapters do not go with, and why.
REFUSED = {
    "exits": "the confidence of exits was calibrated without it",
    "cascade": "the threshold of the smaller model was calibrated without it",
    "classifier": "its exits were trained without it",
    "offload": "its matrices are in memory",
}


def named_adapters(setting: str | None) -> dict[str, Path]:
    """Path by name, from NAME=PATH,NAME=PATH; a PATH alone is named after its folder or file. Raises ValueError."""
    paths: dict[str, Path] = {}
    for each in filter(None, (setting or "").split(",")):
        name, given, rest = each.partition("=")
        path = Path(rest if given else each).expanduser()
        name = name if given else path.resolve().name.removesuffix(".gguf")
        if not NAME.fullmatch(name):
            raise ValueError(f"adapter {each!r:.200}: must be NAME=PATH, and a name has letters, digits and _ . : -")
        if name in paths:
            raise ValueError(f"adapter {name!r} is given twice; choose another name")
        paths[name] = path
    if len(paths) > MOST_ADAPTERS:
        raise ValueError(f"at most {MOST_ADAPTERS} adapters of a model, not {len(paths)}")
    return paths


def open_adapters(opened: Opened, settings: ModelSettings) -> tuple[Adapter, ...]:
    """Read the adapters of a model. Raises ValueError (WeightError) for one that cannot work, one line."""
    paths = named_adapters(settings.adapter)
    if not paths:
        return ()
    _check_pairing(opened, settings)
    model: Model = describe(opened.config)
    return tuple(read_adapter(name, path, model, settings.max_lora_rank) for name, path in paths.items())


def check_adapter(opened: Opened, settings: ModelSettings, name: str, path: Path) -> None:
    """Raise ValueError (WeightError) if a model with these settings cannot take the adapter. Reads all of it."""
    _check_pairing(opened, settings)
    read_adapter(name, path, describe(opened.config), settings.max_lora_rank)


def _check_pairing(opened: Opened, settings: ModelSettings) -> None:
    for setting, why in REFUSED.items():
        if getattr(settings, setting):
            raise ValueError(f"adapter does not go with {setting}: {why}; leave one of them out")
    if opened.config.source is not None:
        raise ValueError(f"adapters are for decoders and encoders, and {opened.name} is an encoder-decoder")
