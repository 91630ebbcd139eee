"""Adapters on the server: each is a model name; several in one batch; what keys may use; /v1/models."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace import core
from headrace.llm import LLM
from headrace.server.settings import SettingsError
from tests.e2e.test_adapters import write_base
from tests.server.harness import Running
from tests.tiny_adapters import write_adapter

pytestmark = pytest.mark.skipif(not core.available(), reason=core.reason())
PROMPT = [5, 9, 60, 7, 33, 12]
NAMES = ("tiny", "one", "two")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("served")
    base = write_base(folder / "base", "llama-gqa")
    for seed, name in enumerate(NAMES[1:]):
        write_adapter(folder / name, base, seed)
    return folder / "base", f"one={folder / 'one'},two={folder / 'two'}"


@pytest.fixture(scope="module")
def server(given: tuple[Path, str]) -> Iterator[Running]:
    with Running(given[0], threads=1, adapter=given[1]) as running:
        yield running


def asked(name: str) -> dict[str, Any]:
    return {"model": name, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 0}


def test_requests_of_several_adapters_equal_those_of_the_llm(server: Running, given: tuple[Path, str]) -> None:
    folder, adapters = given
    with LLM(folder, threads=1, adapter=adapters) as llm:
        expected = {
            name: llm.generate([PROMPT], adapter="" if name == "tiny" else name, temperature=0, max_tokens=8, ignore_eos=True)
            for name in NAMES
        }
        embedded = llm.embed([PROMPT], adapter="two")[0].values
    texts = {name: each[0].outputs[0].text for name, each in expected.items()}
    assert len(set(texts.values())) == 3
    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda name: server.post("/v1/completions", asked(name)).json(), NAMES * 3))
    for name, answer in zip(NAMES * 3, answers, strict=True):
        assert (answer["model"], answer["choices"][0]["text"]) == (name, texts[name])
    answer = server.post("/v1/embeddings", {"model": "two", "input": PROMPT, "encoding_format": "float"}).json()
    assert answer["data"][0]["embedding"] == embedded


def test_adapters_are_listed_with_their_model(server: Running) -> None:
    listed = {one["id"]: one for one in server.http.get("/v1/models").json()["data"]}
    assert list(listed) == list(NAMES)
    assert (listed["one"]["parent"], listed["one"]["root"]) == ("tiny", "one")
    assert "parent" not in listed["tiny"]
    assert server.http.get("/v1/models/two").json()["id"] == "two"
    answer = server.post("/v1/completions", asked("three"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "use 'tiny', 'one', 'two'" in answer.json()["error"]["message"]


def test_a_name_that_is_taken_is_refused(given: tuple[Path, str]) -> None:
    with pytest.raises(SettingsError, match="two models have one name .tiny."):
        Running(given[0], threads=1, adapter=f"tiny={given[0].parent / 'one'}", begin=False).__enter__()


@pytest.fixture(scope="module")
def changing(given: tuple[Path, str]) -> Iterator[Running]:
    """A server that starts without adapters, whose operators may load those in one folder."""
    (given[0].parent / "dense").write_text("no adapter")
    with Running(given[0], threads=1, adapters_from=given[0].parent) as running:
        yield running


def test_adapters_are_loaded_and_unloaded_while_requests_run(changing: Running, server: Running) -> None:
    """A request in flight ends as it would have, and the adapter answers as on a server that began with it."""
    expected = {name: server.post("/v1/completions", asked(name)).json()["choices"][0]["text"] for name in NAMES}
    assert changing.post("/v1/completions", asked("one")).status_code == 404
    long = {**asked("tiny"), "max_tokens": 60}
    whole = server.post("/v1/completions", {**long}).json()["choices"][0]["text"]
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(changing.post, "/v1/completions", long)
        loaded = changing.post("/v1/load_lora_adapter", {"lora_name": "one", "lora_path": "one"})
        assert loaded.status_code == 200, loaded.text
        assert (loaded.json()["id"], loaded.json()["parent"], loaded.json()["root"]) == ("one", "tiny", "one")
        assert running.result().json()["choices"][0]["text"] == whole
    assert changing.post("/v1/load_lora_adapter", {"lora_name": "two", "lora_path": "two"}).status_code == 200
    for name in NAMES:
        assert changing.post("/v1/completions", asked(name)).json()["choices"][0]["text"] == expected[name]
    gone = changing.post("/v1/unload_lora_adapter", {"lora_name": "one"})
    assert (gone.status_code, gone.json()["id"]) == (200, "tiny")
    assert changing.post("/v1/completions", asked("one")).status_code == 404
    for name in ("tiny", "two"):
        assert changing.post("/v1/completions", asked(name)).json()["choices"][0]["text"] == expected[name]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"lora_name": "a", "lora_path": "../base"}, "must be an adapter in the folder"),
        ({"lora_name": "a", "lora_path": "/etc"}, "must be an adapter in the folder"),
        ({"lora_name": "a", "lora_path": "missing"}, "must be an adapter in the folder"),
        ({"lora_name": "a", "lora_path": "dense"}, "is no adapter"),
        ({"lora_name": "a", "lora_path": "base"}, "adapter_config.json"),
        ({"lora_name": "tiny", "lora_path": "one"}, "the name 'tiny' is taken"),
        ({"lora_name": "a b", "lora_path": "one"}, "a name has letters"),
        ({"lora_name": "a", "lora_path": "one", "base_model": "x"}, "not listed here"),
    ],
)
def test_what_cannot_be_loaded_is_refused_and_the_model_stays(changing: Running, body: dict[str, Any], says: str) -> None:
    answer = changing.post("/v1/load_lora_adapter", body)
    assert answer.status_code in (400, 404)
    assert says in answer.json()["error"]["message"]
    assert "\n" not in answer.json()["error"]["message"]
    assert changing.post("/v1/completions", asked("tiny")).status_code == 200


def test_the_routes_need_the_folder(server: Running) -> None:
    """Without --adapters-from there is no such route."""
    assert server.post("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "one"}).status_code == 404
    assert server.post("/v1/unload_lora_adapter", {"lora_name": "one"}).status_code == 404
