"""Where real models and data lie, which are not in the repository; a test that needs what is not here skips and says why."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest

from headrace.weights import catalog
from headrace.weights.store import RECORD, Record, Store, StoredFile, catalog_entry

MODELS = Path(os.environ.get("HEADRACE_TEST_MODELS") or "~/.cache/headrace-test-models").expanduser()
DATA = Path(os.environ.get("HEADRACE_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data").expanduser()
STORE = Store()  # made here, before a test sets HEADRACE_HOME


def model_file(name: str) -> Path:
    """A file of the models folder; the default model's is also taken from where `make run` puts it."""
    pulled = STORE.find(catalog.DEFAULT)
    for path in (MODELS / name, *([STORE.path(pulled)] if pulled else [])):
        if path.name == name and path.exists():
            return path
    pytest.skip(f"{name} is not in {MODELS} (HEADRACE_TEST_MODELS)")


def default_model() -> Path:
    """The weights of the model that `make run` uses."""
    return model_file(catalog.load()[catalog.DEFAULT].file)


def peer_python(package: str) -> str:
    """An interpreter that has an engine's package: HEADRACE_PEER_PYTHON, or this one."""
    if named := os.environ.get("HEADRACE_PEER_PYTHON"):
        return named
    if find_spec(package) is None:
        pytest.skip(f"needs {package} here (extra `peers`) or HEADRACE_PEER_PYTHON naming a Python that has it")
    return sys.executable


def data_path(name: str) -> Path:
    """A file or folder of the data folder."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{name} is not in {DATA} (HEADRACE_TEST_DATA)")
    return path


def catalog_file(name: str) -> Path:
    """The file of a catalog model: from the store, or a file of the models folder with the same SHA-256 under any name."""
    if pulled := STORE.find(name):
        return STORE.path(pulled)
    entry = catalog.load()[name]
    for path in sorted(MODELS.glob("*.gguf")):
        if catalog_entry(path, {name: entry}):
            return path
    pytest.skip(f"{name} is neither in {STORE.root} (headrace pull {name}) nor in {MODELS} (HEADRACE_TEST_MODELS)")


def link_model(models: Path, name: str) -> None:
    """Put a catalog model into the store `models` by a link to its file, which `catalog_file` finds."""
    entry, path = catalog.load()[name], catalog_file(name)
    folder = models / name
    folder.mkdir(parents=True)
    (folder / entry.file).symlink_to(path)
    stored = StoredFile(entry.file, path.stat().st_size, entry.sha256 or "")
    (folder / RECORD).write_bytes(msgspec.json.encode(Record(name, (stored,), entry.file, licence=entry.licence)))
