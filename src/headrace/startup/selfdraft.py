"""Which part of a model drafts for it, kept in a file by model; `training.selfdraft` finds it."""

import hashlib
from pathlib import Path

import msgspec

from headrace.runner.span import Span
from headrace.weights.store import home


class Saved(msgspec.Struct, frozen=True):
    """A choice as the file keeps it."""

    layers: int
    skips: tuple[int, ...]


def place(model: Path) -> Path:
    """Where the choice for a model file or folder is kept."""
    sign = f"{model.resolve()}:{model.stat().st_size}"
    return home() / "self-draft" / f"{hashlib.sha256(sign.encode()).hexdigest()[:24]}.json"


def save(model: Path, span: Span) -> Path:
    path = place(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.json.encode(Saved(span.layers, span.skips)))
    return path


def load(model: Path) -> Span:
    """The saved choice. Raises ValueError where there is none, saying how to make one."""
    try:
        saved = msgspec.json.decode(place(model).read_bytes(), type=Saved)
    except FileNotFoundError:
        raise ValueError(
            f"no part of {model.name} has been chosen to draft for it; run: headrace bench self-draft {model}"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{place(model)} cannot be read ({error}); remove it") from None
    return Span(saved.layers, saved.skips)
