"""The saved span of a model that drafts for it, one file per model. `training.selfdraft` chooses it."""

import hashlib
from pathlib import Path

import msgspec

from headrace.runner.span import ATTENTION, MLP, Span
from headrace.weights.store import home

SKIPS = {0, ATTENTION, MLP, ATTENTION | MLP}


class Saved(msgspec.Struct, frozen=True):
    """The fields of the file."""

    layers: int
    skips: tuple[int, ...]


def place(model: Path) -> Path:
    """Path of the file for a model file or folder."""
    sign = f"{model.resolve()}:{model.stat().st_size}"
    return home() / "self-draft" / f"{hashlib.sha256(sign.encode()).hexdigest()[:24]}.json"


def save(model: Path, span: Span) -> Path:
    path = place(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(Saved(span.layers, span.skips)))
    return path


def load(model: Path, layers: int) -> Span:
    """The saved span of a model with `layers` layers. Raises ValueError if there is none or it is another model's."""
    again = f"run: headrace bench self-draft {model}"
    try:
        saved = msgspec.json.decode(place(model).read_bytes(), type=Saved)
    except FileNotFoundError:
        raise ValueError(f"no part of {model.name} has been chosen to draft for it; {again}") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"{place(model)} cannot be read ({error}); remove it") from None
    if not 0 <= saved.layers <= layers or len(saved.skips) > layers or not set(saved.skips) <= SKIPS:
        raise ValueError(f"{place(model)} belongs to another model than {model.name}, which has {layers} layers; {again}")
    return Span(saved.layers, saved.skips)
