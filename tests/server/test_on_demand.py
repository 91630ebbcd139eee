"""Three models and memory for two, over HTTP: answers, names, keys, the operator's routes, and the folder of models."""

import contextlib
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from headrace.cli.app import main
from headrace.cli.serve_options import parse_seconds
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.server.engines import room
from headrace.server.serving import ModelSpec, open_models, plan_bytes
from headrace.server.settings import Mode, ServerSettings
from headrace.startup.model_folder import models_in
from tests.server.harness import ENGINE, PATIENCE, PATIENT, Running, in_thread, until
from tests.tiny_files import write_tiny_gguf

KEYS = """
[root]
key = "the-key-of-root"
operator = true
[ann]
key = "the-key-of-ann"
[bob]
key = "the-key-of-bob"
models = ["second", "nick"]
"""
BODY = {"model": "first", "prompt": "a"}
NAMES = ("first", "second", "third")
SETTINGS = {**ENGINE, "max_model_len": 64, "kv_cache_memory": "1MiB"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_tiny_gguf(folder / f"{name}.gguf", seed=seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def server(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The first is pinned; the third has another name, too."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    settings = ServerSettings("first", port=0, keys=keys, limits=PATIENT)
    chosen = [
        ModelSpec("first", str(files["first"]), SETTINGS, mode=Mode.PINNED),
        ModelSpec("second", str(files["second"]), SETTINGS, preload=False),
        ModelSpec("third", str(files["third"]), SETTINGS, preload=False, aliases=("nick",)),
    ]
    size = plan_bytes(str(files["first"]), SETTINGS, 1 << 40).total
    with Running.of(open_models(chosen, settings, size * 5 // 2), settings) as running:
        until(lambda: running.health()["status"] == "ready")
        yield running


def as_client(server: Running, name: str) -> openai.OpenAI:
    plain = httpx.Client(timeout=300, trust_env=False)
    return openai.OpenAI(base_url=f"{server.base}/v1", api_key=f"the-key-of-{name}", max_retries=0, http_client=plain)


def send(server: Running, name: str, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer the-key-of-{name}"}
    address = f"{server.base}{path}"
    with httpx.Client(timeout=300, trust_env=False, headers=headers) as client:
        return client.get(address) if body is None else client.post(address, json=body)


def test_random_requests_over_three_models_have_the_texts_of_each_alone(
    server: Running, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "MIN_TURN", 0.0)
    monkeypatch.setattr(room, "LOADS_PER_TURN", 0.0)
    prompts = ["The mill", "a river runs", "wheels turn"]
    expected: dict[tuple[str, str], str] = {}
    for name, file in files.items():
        with LLM(str(file), **SETTINGS) as llm:
            for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8)):
                expected[name, str(output.prompt)] = output.outputs[0].text
    drawn = random.Random(36)
    asked = [(drawn.choice(NAMES), drawn.choice(prompts)) for _ in range(24)]
    client = as_client(server, "ann")

    def ask(one: tuple[str, str]) -> str:
        made = client.completions.create(model=one[0], prompt=one[1], temperature=0, max_tokens=8)
        return str(made.choices[0].text)

    with ThreadPoolExecutor(4) as clients:
        assert list(clients.map(ask, asked)) == [expected[one] for one in asked]
    states = {one["id"]: one["state"] for one in send(server, "root", "/models").json()["data"]}
    assert states["first"] == "loaded"
    assert sum(state == "loaded" for state in states.values()) == 2
    metrics = send(server, "root", "/metrics").text
    assert 'headrace:model_state{model_name="first",state="loaded"} 1.0' in metrics
    assert "headrace:model_load_seconds_count" in metrics


def test_an_unknown_model_gets_a_404_with_the_names_of_its_key(server: Running) -> None:
    for who, names in (("ann", "'first', 'second', 'third'"), ("bob", "'second', 'third'")):
        with pytest.raises(openai.NotFoundError, match=f"'fourth' is not served here; use {names}$") as caught:
            as_client(server, who).completions.create(model="fourth", prompt="a")
        assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="'first' is not served here; use 'second', 'third'"):
        as_client(server, "bob").completions.create(model="first", prompt="a")
    assert [one.id for one in as_client(server, "bob").models.list()] == ["second", "third"]
    made = as_client(server, "bob").completions.create(model="nick", prompt="a", max_tokens=2)
    assert made.model == "third"
    assert send(server, "bob", "/v1/models/nick").json()["id"] == "third"
    assert send(server, "bob", "/v1/models/first").status_code == 404


def test_only_an_operator_manages_models(server: Running) -> None:
    for path, body in (
        ("/models", None),
        ("/models/load", {"model": "second"}),
        ("/models/unload", {"model": "first"}),
        ("/models/mode", {"model": "first", "mode": "off"}),
    ):
        refused = send(server, "ann", path, body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_operator")
    assert httpx.get(f"{server.base}/models", trust_env=False).status_code == 401
    loaded = send(server, "root", "/models/load", {"model": "second"}).json()
    assert (loaded["id"], loaded["state"], loaded["mode"]) == ("second", "loaded", "on demand")
    assert send(server, "root", "/models/unload", {"model": "second"}).json()["state"] == "unloaded"
    assert send(server, "root", "/models/mode", {"model": "second", "mode": "pinned"}).json()["state"] == "loaded"
    refused = send(server, "ann", "/v1/completions", {"model": "third", "prompt": "a"})
    assert refused.status_code == 503
    assert "third takes " in refused.json()["error"]["message"]
    assert "pinned models first, second" in refused.json()["error"]["message"]
    assert send(server, "root", "/models/mode", {"model": "second", "mode": "on demand"}).json()["mode"] == "on demand"
    assert send(server, "root", "/models/mode", {"model": "second", "mode": "sometimes"}).status_code == 400
    assert send(server, "root", "/models/load", {"model": "../third.gguf"}).status_code == 404


def test_the_list_of_models_tells_what_is_in_memory(server: Running) -> None:
    send(server, "root", "/models/unload", {"model": "third"})
    listed = {one["id"]: one for one in send(server, "ann", "/v1/models").json()["data"]}
    assert listed["first"]["state"] == "loaded"
    assert listed["first"]["mode"] == "pinned"
    assert listed["third"]["state"] == "unloaded"
    assert listed["third"]["aliases"] == ["nick"]
    assert listed["third"]["bytes"] > 0
    assert send(server, "ann", "/models/load", {"model": "third"}).status_code == 403


def test_a_model_that_left_the_disk_fails_alone(server: Running, files: dict[str, Path]) -> None:
    send(server, "root", "/models/unload", {"model": "third"})
    aside = files["third"].rename(files["third"].with_suffix(".aside"))
    try:
        refused = send(server, "ann", "/v1/completions", {"model": "third", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unusable")
        assert str(files["third"]) not in refused.text
        assert int(refused.headers["retry-after"]) > 0
        assert send(server, "ann", "/v1/completions", {"model": "first", "prompt": "a"}).status_code == 200
    finally:
        aside.rename(files["third"])
    server.models.loader.entries["third"].retry = 0.0
    assert send(server, "ann", "/v1/completions", {"model": "third", "prompt": "a", "max_tokens": 2}).status_code == 200


def test_the_command_lists_and_loads(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "the-key-of-root")
    assert main(["models", "--url", server.base]) == 0
    out = capsys.readouterr().out
    assert "third, nick" in out
    assert "pinned" in out
    assert main(["models", "load", "second", "--url", server.base]) == 0
    assert "second: loaded, on demand" in capsys.readouterr().err
    assert main(["models", "unload", "nothing", "--url", server.base]) == 1
    assert "'nothing' is not listed here; use 'first'" in capsys.readouterr().err
    assert main(["models", "load", "--url", server.base]) == 2
    (tmp_path / "key").write_text("the-key-of-ann")
    assert main(["models", "--url", server.base, "--api-key-file", str(tmp_path / "key")]) == 1
    assert "operator = true" in capsys.readouterr().err
    assert main(["models", "--url", "http://127.0.0.1:9"]) == 1
    assert "start the server, or name it with --url" in capsys.readouterr().err


def test_a_folder_of_models_skips_what_is_no_model(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "good.gguf")
    write_tiny_gguf(tmp_path / "twice.gguf")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (tmp_path / "empty").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "link.gguf").symlink_to(tmp_path / "nowhere.gguf")
    found = models_in(tmp_path)
    assert found.models == {"good": tmp_path / "good.gguf", "twice": tmp_path / "twice.gguf"}
    lines = "\n".join(found.skipped)
    for name in ("notes.txt", "broken.gguf", "empty", "link.gguf"):
        assert f"{name} is not served: " in lines
    assert len(found.skipped) == 4
    (tmp_path / "good").symlink_to(write_tiny_gguf(tmp_path / "twice.gguf"))
    with pytest.raises(ValueError, match="choose another --models-dir"):
        models_in(tmp_path / "nowhere")


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400), ("2d", 172800)])
def test_times_have_units(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "-1", "10 minutes", "m", "1e3", "nan"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a time above 0"):
        parse_seconds(text)


def test_nothing_is_left_of_a_load_that_the_end_interrupts(files: dict[str, Path]) -> None:
    settings = ServerSettings("first", port=0, limits=PATIENT)
    models = open_models([ModelSpec("first", str(files["first"]), SETTINGS, preload=False)], settings, "1GiB")
    with Running.of(models, settings) as running:
        until(lambda: running.health()["status"] == "ready")
        asked = in_thread(lambda: httpx.post(f"{running.base}/v1/completions", json=BODY, trust_env=False, timeout=PATIENCE))
        until(lambda: models.services[0].llm.running)
    with contextlib.suppress(httpx.HTTPError):  # the server may close the connection before it answers
        assert asked.result().status_code in (200, 503)
    assert models.services[0].llm.pid is None


@pytest.mark.parametrize("kv", [None, "4MiB"])
def test_the_plan_has_the_kv_cache_of_each_replica(files: dict[str, Path], kv: str | None) -> None:
    arguments = {**SETTINGS, "kv_cache_memory": kv}
    one, three = (plan_bytes(str(files["first"]), {**arguments, "replicas": count}, 1 << 40) for count in (1, 3))
    cache = one.kv if kv is None else 4 << 20
    assert cache > 0
    assert three.total - one.total == 2 * cache
    assert three.kv == one.kv
