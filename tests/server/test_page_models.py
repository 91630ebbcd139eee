"""The page of a server with models on demand, in a real Chromium: their states, and an answer of one that is not in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.server.serving import ModelSpec, open_models, plan_bytes
from headrace.server.settings import Mode, ServerSettings
from tests.server.browser import answers, opened, send_message
from tests.server.harness import ENGINE, PATIENT, Running, until
from tests.tiny_files import write_tiny_gguf

NAMES = ("first", "second", "third")
SETTINGS = {**ENGINE, "max_model_len": 64, "kv_cache_memory": "1MiB"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Memory for two models. The first is pinned, so the others make room for each other."""
    folder = tmp_path_factory.mktemp("models")
    files: dict[str, Path] = {name: write_tiny_gguf(folder / f"{name}.gguf", seed=at) for at, name in enumerate(NAMES)}
    settings = ServerSettings("first", port=0, limits=PATIENT)
    chosen = [ModelSpec("first", str(files["first"]), SETTINGS, mode=Mode.PINNED)]
    chosen += [ModelSpec(name, str(files[name]), SETTINGS, preload=False) for name in NAMES[1:]]
    size = plan_bytes(str(files["first"]), SETTINGS, 1 << 40).total
    with Running.of(open_models(chosen, settings, size * 5 // 2), settings) as running:
        until(lambda: running.health()["status"] == "ready")
        yield running


def shown(page: Any) -> list[str]:
    """The entries of the list of models."""
    return [text.strip() for text in page.locator("#models option").all_inner_texts()]


def test_a_model_that_is_not_in_memory_is_marked_and_answers(chromium: Any, models: Running) -> None:
    for page in opened(chromium, models):
        page.wait_for_selector("#status[data-state=ready]")
        assert shown(page) == ["first", "second · not in memory", "third · not in memory"]
        for name, other in (("second", "third"), ("third", "second")):
            page.select_option("#models", name)
            send_message(page, "a", limit=4)
            assert answers(page)[-1]
            page.wait_for_selector(f"#models option:text-is('{name}')", state="attached")
            assert shown(page) == [entry if other not in entry else f"{other} · not in memory" for entry in shown(page)]


def test_the_load_of_a_model_is_shown_while_a_message_waits(chromium: Any, models: Running) -> None:
    """The list of models says how far a load is; the page shows it in place of the server's state."""
    for page in opened(chromium, models):
        page.wait_for_selector("#status[data-state=ready]")

        def loading(route: Any) -> None:
            listed = route.fetch().json()
            for one in listed["data"]:
                if one["id"] == "second":
                    one |= {"state": "loading", "progress": 0.42}
            route.fulfill(json=listed)

        page.route("**/v1/models", loading)
        page.select_option("#models", "second")
        page.wait_for_selector("#status span:text-is('second loads, 42 %')")
        assert "second · loading" in shown(page)
        page.unroute_all(behavior="wait")
