"""Names that the user gave to models (`headrace add`): one file each in `$HEADRACE_HOME/names`, with settings and template."""

import os
from pathlib import Path
from typing import Any

import msgspec

from headrace.data.params import SamplingParams
from headrace.weights.catalog import is_name
from headrace.weights.store import StoreError, find_home, home


class Name(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name that the user gave to a model, with settings of its own. Raises ValueError.

    model: an absolute path, or another name of a model. sampling: fields of SamplingParams that override the model's settings.
    template: chat template in place of the model's. system: system message of conversations that have none.
    """

    name: str
    model: str
    sampling: dict[str, Any] = {}
    template: str | None = None
    system: str | None = None

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ValueError(f"a name is letters and digits joined by single . _ or -, not {self.name!r}")
        SamplingParams(**self.sampling)


def find(name: str) -> Name | None:
    """The name, or None. Raises StoreError if its file cannot be read."""
    if not is_name(name) or find_home() is None:
        return None
    path = _path(name)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read ({error}); give the name again with: headrace add {name} PATH") from None


def given() -> list[Name]:
    """All names, sorted."""
    if find_home() is None:
        return []
    names = (find(path.stem) for path in sorted(_folder().glob("*.json")))
    return [name for name in names if name is not None]


def save(name: Name) -> None:
    """Write a name atomically. Raises StoreError."""
    draft = _folder() / f".{name.name}.{os.getpid()}"
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(name)))
        draft.replace(_path(name.name))
    except OSError as error:
        raise StoreError(
            f"cannot write to {_folder()} ({error.strerror or error}): set HEADRACE_HOME to a folder of yours"
        ) from None


def remove(name: str) -> None:
    """Delete a name; its model stays."""
    _path(name).unlink(missing_ok=True)


def _folder() -> Path:
    return home() / "names"


def _path(name: str) -> Path:
    return _folder() / f"{name}.json"
