"""What holds for every test."""

import logging
import os
import random
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

# Before torch is imported: tests run side by side, and each on one core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from tests import examples, places

THREADS = torch.get_num_threads()

examples.settle()


@pytest.fixture(scope="session")
def models_dir() -> Path:
    """The folder with real models (HEADRACE_TEST_MODELS)."""
    if not places.MODELS.is_dir():
        pytest.skip(f"there is no folder {places.MODELS} (HEADRACE_TEST_MODELS)")
    return places.MODELS


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder with real data (HEADRACE_TEST_DATA)."""
    if not places.DATA.is_dir():
        pytest.skip(f"there is no folder {places.DATA} (HEADRACE_TEST_DATA)")
    return places.DATA


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The weights file of the default model."""
    return places.default_model()


def pytest_sessionstart() -> None:
    """A runner that was started in the background hands on an ignored SIGINT; the tests of Ctrl-C need the usual one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, optionalhook=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than there are cores: tests wait for servers and commands that start."""
    return 1 + (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


@pytest.fixture(autouse=True, scope="session")
def one_core() -> Iterator[None]:
    """Tests run side by side: a core without a number of threads has one here. Threads that wait for each other on busy cores
    mostly wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.core.processors", lambda: 1)
        yield


@pytest.fixture(autouse=True)
def own_torch() -> None:
    """A model sets torch's threads for its process, and draws go on where the last ended: the test after must not notice."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_seeds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request without a seed is given one by chance; here by the test's name, so that it draws the same in every run."""
    seeds = random.Random(request.node.nodeid)
    monkeypatch.setattr("headrace.engine.engine.secrets", SimpleNamespace(randbits=seeds.getrandbits))


@pytest.fixture(autouse=True)
def fresh_log() -> Iterator[None]:
    """A command sets the level of the log for its process; a test must not do so for those after it."""
    log = logging.getLogger("headrace")
    before = log.level, list(log.handlers), log.propagate, log.disabled
    log.setLevel(logging.NOTSET)
    log.handlers, log.propagate, log.disabled = [], True, False
    yield
    log.setLevel(before[0])
    log.handlers, log.propagate, log.disabled = before[1:]
