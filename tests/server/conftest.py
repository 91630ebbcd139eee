"""One tiny model, one server of it, and the same model offline."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.llm import LLM
from tests import audit
from tests.server.browser import CHROMIUM, MILLISECONDS, opened
from tests.server.harness import ENGINE, Running
from tests.tiny_files import write_tiny_gguf

HOSTILE = ("bad_inputs", "fuzz", "hostile", "page", "structured", "tools", "torch_engine")  # whose requests are


@pytest.fixture(scope="session", autouse=True)
def audit_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the servers of these tests, and their processes, do to the world around them."""
    return audit.install(tmp_path_factory.mktemp("audit"))


@pytest.fixture(autouse=True)
def watched(request: pytest.FixtureRequest, audit_log: Path) -> Iterator[None]:
    """No hostile request makes them do anything; a server that is started for the test may be starting still."""
    hostile = request.node.path.stem.removeprefix("test_") in HOSTILE
    with audit.assert_nothing_logged(audit_log) if hostile else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("served") / "tiny.gguf")


@pytest.fixture(scope="session")
def server(tiny: Path) -> Iterator[Running]:
    """Shared by tests that leave it as it was."""
    with Running(tiny, max_queued_requests=3) as running:
        yield running


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers (ENDLESS) outlast every test: what is to happen in the middle of one does."""
    return write_tiny_gguf(tmp_path_factory.mktemp("endless") / "endless.gguf", context=100_000)


@pytest.fixture(scope="session")
def long_server(endless: Path) -> Iterator[Running]:
    """Shared by tests that end what they began."""
    with Running(endless) as running:
        yield running


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Its context holds what is said of tools; shared as `server` is."""
    with Running(write_tiny_gguf(tmp_path_factory.mktemp("wide") / "tiny.gguf", context=1024)) as running:
        yield running


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker of batches that tries again at once."""
    monkeypatch.setattr("headrace.server.storage.batch_worker.RETRY_SECONDS", (0.02, 0.05))


@pytest.fixture(scope="session")
def offline(tiny: Path) -> Iterator[LLM]:
    """What the server must be equal to."""
    llm = LLM(tiny, **ENGINE)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """As long as a module: while it runs, so does an event loop of its driver, beside which no other may begin."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium; install it with: apt install chromium")
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed (extra `dev`)")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"], timeout=MILLISECONDS
        )
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Any, server: Running) -> Iterator[Any]:
    yield from opened(chromium, server)
