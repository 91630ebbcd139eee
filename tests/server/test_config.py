"""A file of settings, several models in one server, deadlines, clients that do not read."""

import asyncio
import contextlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from headrace.backends.native.weights import packed_bytes
from headrace.cli import serve as command
from headrace.cli.app import main
from headrace.models.registry import describe
from headrace.server.engines.engine_client import EngineConnection
from headrace.server.serving import ModelSpec, open_models
from headrace.server.settings import Limits, ServerSettings
from headrace.startup.opening import open_files
from tests.server.harness import ENDLESS, ENGINE, PATIENCE, Running, in_thread, until
from tests.tiny_bert import write_tiny_bert
from tests.tiny_files import write_tiny_gguf

KEY = "a-long-enough-key"
LONG: dict[str, Any] = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What `headrace serve` would run."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(command, "_run", lambda *arguments: calls.append(arguments) or 0)
    return calls


TOML = """
host = "127.0.0.1"
port = 8123
api_key_env = "MY_KEY"
max_num_seqs = 8
model-memory = "1GiB"
trusted_proxy = "10.0.0.1, 10.1.0.0/16"
[limits]
n = 4
deadline = 30
[[models]]
model = "MODEL"
name = "small"
max_model_len = 64
preload = true
[[models]]
model = "OTHER"
"""
YAML = """
host: 127.0.0.1
port: 8123
api_key_env: MY_KEY
max_num_seqs: 8
model_memory: 1GiB
trusted_proxy: 10.0.0.1, 10.1.0.0/16
limits: {n: 4, deadline: 30}
models:
  - {model: MODEL, name: small, max_model_len: 64, preload: true}
  - {model: OTHER}
"""


@pytest.mark.parametrize(("name", "text"), [("server.toml", TOML), ("server.yaml", YAML)])
def test_a_file_holds_every_option(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[tuple[Any, ...]], name: str, text: str
) -> None:
    other = write_tiny_bert(tmp_path / "bert")
    file = tmp_path / name
    file.write_text(text.replace("MODEL", str(tiny)).replace("OTHER", str(other)))
    monkeypatch.setenv("MY_KEY", KEY)
    assert main(["serve", "--config", str(file), "--port", "9000"]) == 0
    ((settings, entries, queue, memory, cascades, idle),) = started
    assert (settings.port, settings.key, settings.limits.n, settings.limits.deadline) == (9000, KEY, 4, 30)  # flags win
    assert [str(one) for one in settings.proxies.networks] == ["10.0.0.1/32", "10.1.0.0/16"]
    assert "MY_KEY" not in os.environ, "a child process must not see the key"
    assert (queue["max_num_seqs"], queue["max_queued_requests"], memory) == (8, 256, "1GiB")
    assert [(name, entry.preload, options["max_model_len"]) for name, entry, options in entries] == [
        ("small", True, 64),
        ("bert", False, None),
    ]
    assert (cascades, idle) == ([], None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("prot = 1", "no setting 'prot'; did you mean port or route?"),
        ("config = 'x'", "no setting 'config'"),
        ("[limits]\nm = 3", "no setting 'limit_m'"),
        ("host = ", "cannot be read"),
        ("port = 70000\nmodel = 'x'", "'--port'"),
        ("[[models]]\nname = 'x'", "each with a model"),
        ("models = 3", "each with a model"),
        ("[[models]]\nmodel = 'x'\nfrobnicate = 3", "no setting 'frobnicate'"),
        ("[[models]]\nmodel = 'x'\nmax_model_len = 'many'", "'--max-model-len'"),
        ("[[models]]\nmodel = 'x'\npreload = 3", "preload true or false"),
        ("[[models]]\nmodel = 'x'\n[[models]]\nmodel = 'x'", "two models have one name"),
        ("limits = 3", "limits must be a table"),
        (f"grace = 1{'0' * 400}", "grace must be a finite number"),
        ("port = inf", "port must be a finite number"),
        ("port = 2020-01-01", "port must be a text, a number"),
        (f"port = 1{'0' * 5000}", "a.toml cannot be read"),
        (f"[[models]]\nmodel = 'x'\nmax_model_len = 1{'0' * 400}", "max_model_len must be a finite number"),
        ("[[models]]\nmodel = 'x'\nthreads = [1]", "threads must be a text, a number"),
        (f"[[cascades]]\nname = 'a'\ntiers = ['b', 'c']\nthreshold = 1{'0' * 400}\n[[models]]\nmodel = 'MODEL'", "from 0 to 1"),
    ],
)
def test_an_invalid_file_is_a_one_line_error(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    (tmp_path / "a.toml").write_text(text.replace("MODEL", str(tiny)))
    assert main(["serve", "--config", str(tmp_path / "a.toml")]) in (1, 2)
    err = capsys.readouterr().err
    assert says in err
    assert "a bug in Headrace" not in err


def test_each_model_of_a_file_has_its_own_classifier(
    tiny: Path, tmp_path: Path, started: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    bert, file = write_tiny_bert(tmp_path / "bert"), tmp_path / "a.toml"
    text = '[[models]]\nmodel = "MODEL"\n[[models]]\nmodel = "BERT"\nclassifier = "FOLDER"\n'
    text = text.replace("MODEL", str(tiny)).replace("BERT", str(bert))
    file.write_text(text.replace("FOLDER", str(tmp_path)))
    assert main(["serve", "--config", str(file)]) == 0
    ((_, entries, *_),) = started
    assert [options.get("classifier") for _, _, options in entries] == [None, str(tmp_path)]
    file.write_text(text.replace("FOLDER", str(tmp_path / "nowhere")))
    assert main(["serve", "--config", str(file)]) == 2
    assert "--classifier" in capsys.readouterr().err


def test_models_beyond_the_memory_are_refused_before_the_server_listens(
    tiny: Path,
    tmp_path: Path,
    started: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Memory for one model and a half: one is served, two are refused in a line, and two that come when asked for are not."""
    write_tiny_gguf(tmp_path / "other.gguf", seed=1)
    file, opened = tmp_path / "a.toml", open_files(tiny)
    need = packed_bytes(describe(opened.config), opened.source)
    monkeypatch.setattr("headrace.host.free_memory", lambda: need * 3 // 2)
    both = f"[[models]]\nmodel = '{tiny}'\n[[models]]\nmodel = '{tmp_path / 'other.gguf'}'\n"
    file.write_text(both)
    assert main(["serve", str(tiny)]) == 0
    assert main(["serve", "--config", str(file)]) == 1
    assert len(started) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "for their weights" in line)
    assert f"{tiny} and {tmp_path / 'other.gguf'} need " in line
    file.write_text(f"model_memory = '8GiB'\n{both}")
    assert main(["serve", "--config", str(file)]) == 0


def test_a_model_that_would_never_be_loaded_is_refused(tiny: Path) -> None:
    settings = ServerSettings("tiny", port=0)
    for preload in (False, True):
        with pytest.raises(ValueError, match="so it would never be loaded; raise model_memory"):
            open_models([ModelSpec("tiny", str(tiny), ENGINE, preload=preload)], settings, 1000)


@pytest.fixture(scope="module")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two models and memory for one of them."""
    other = write_tiny_gguf(tmp_path_factory.mktemp("other") / "other.gguf", seed=1)
    settings = ServerSettings("tiny", port=0)
    chosen = [
        ModelSpec("tiny", str(tiny), ENGINE),
        ModelSpec("other", str(other), {**ENGINE, "max_model_len": 64}, preload=False),
    ]
    models = open_models(chosen, settings, "8GiB")
    with Running.of(models, settings) as running:
        first, second = models._entries.values()
        second.size = first.size  # which was measured; the second is of the same shape
        models.loader.budget = first.size * 3 // 2
        yield running


def states(server: Running) -> dict[str, str]:
    return dict(server.health()["models"])


def test_models_are_loaded_on_request_and_unload_others(two: Running) -> None:
    assert [model.id for model in two.openai.models.list()] == ["tiny", "other"]
    assert states(two) == {"tiny": "ready", "other": "closed"}
    first = two.complete().choices[0].text
    second = two.complete(model="other").choices[0].text
    assert first != second
    assert states(two) == {"tiny": "closed", "other": "ready"}
    assert two.health()["status"] == "ready"
    assert two.complete().choices[0].text == first
    assert states(two) == {"tiny": "ready", "other": "closed"}
    with pytest.raises(openai.NotFoundError, match="'tiny', 'other'"):
        two.complete(model="third")
    text = two.http.get("/metrics").text
    assert 'headrace:generation_tokens_total{model_name="tiny"} 16.0' in text
    assert 'headrace:generation_tokens_total{model_name="other"} 8.0' in text


def test_a_model_that_is_answering_is_not_unloaded(two: Running) -> None:
    """A request for another model waits until it has answered."""
    two.complete()
    with two.paused_of("tiny"):
        answer = in_thread(lambda: two.complete(**LONG))
        until(lambda: two.models.open == 1)
        other = in_thread(lambda: two.complete(model="other"))
        until(lambda: listed(two)["other"]["waiting"] == 1)
        assert other.running
        assert states(two) == {"tiny": "ready", "other": "closed"}
    assert answer.result().choices[0].finish_reason == "length"
    assert other.result().choices[0].finish_reason == "length"


def test_a_model_with_an_undelivered_answer_is_not_unloaded(two: Running) -> None:
    """A stream may still be sent when the engine has written all of it, and its tokens are spelled on the way."""
    two.complete()
    llm = two.models.services[0].llm
    llm._undelivered.add("a stream")
    assert not llm.inflight
    other = in_thread(lambda: two.complete(model="other"))
    until(lambda: listed(two)["other"]["waiting"] == 1)
    assert states(two) == {"tiny": "ready", "other": "closed"}
    llm._undelivered.discard("a stream")
    assert other.result().choices[0].finish_reason == "length"


def listed(server: Running) -> dict[str, dict[str, Any]]:
    """The models as the operator sees them."""
    return {one["id"]: one for one in server.http.get("/models").json()["data"]}


def test_requests_during_loading_get_a_503_with_retry_after(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address answers at once, whatever loading takes."""
    go_on, start = threading.Event(), EngineConnection.start

    async def slow(load: Any) -> EngineConnection:
        assert await asyncio.to_thread(go_on.wait, PATIENCE)
        return await start(load)

    monkeypatch.setattr(EngineConnection, "start", slow)
    with Running(tiny, wait=False) as server:
        answer = server.http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        refused = server.post("/v1/completions", {"model": "tiny", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the model is being loaded")
        assert int(refused.headers["retry-after"]) > 0
        assert server.http.get("/").status_code == 200
        go_on.set()
        until(lambda: server.health()["status"] == "ready")


def test_a_request_ends_at_its_deadline(server: Running) -> None:
    with server.paused():
        for call in (lambda: server.complete(extra_body={"deadline": 0.05}), lambda: embed(server, 0.05)):
            with pytest.raises(openai.APIStatusError, match=r"deadline of 0\.05 s") as caught:
                call()
            assert (caught.value.status_code, caught.value.code) == (408, "deadline_exceeded")
        asked: list[Any] = []
        with httpx.Client(timeout=PATIENCE, trust_env=False, event_hooks={"request": [asked.append]}) as plain:
            again = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", http_client=plain)  # asks twice more by itself
            with pytest.raises(openai.APIStatusError, match=r"deadline of 0\.05 s"):
                again.completions.create(model="tiny", prompt="a", extra_body={"deadline": 0.05})
        assert len(asked) == 1  # but not where the same would come of it
    until(lambda: server.figure("num_requests_running") == 0)
    assert server.complete(extra_body={"deadline": 1000}).choices[0].finish_reason == "length"
    for wrong in (0, -1, 1e9, "soon"):
        with pytest.raises(openai.BadRequestError, match="deadline"):
            server.complete(extra_body={"deadline": wrong})


def embed(server: Running, deadline: float) -> Any:
    return server.openai.embeddings.create(model="tiny", input="a", extra_body={"deadline": deadline})


def test_a_stream_ends_at_the_servers_deadline(endless: Path) -> None:
    """Its clock is set to the server's deadline; here it strikes when the stream is under way, not after so many seconds."""
    with Running(endless, limits=Limits(deadline=3600)) as server:
        stream = server.complete(stream=True, **ENDLESS)
        next(stream)
        (submitted,) = server.llm.inflight.values()
        assert submitted.timer is not None
        assert 0 < submitted.timer.when() - server.on_loop(lambda: asyncio.get_running_loop().time()) <= 3600
        server.on_loop(lambda: strike(submitted.timer))
        with pytest.raises(openai.APIError, match="deadline of 3600 s"):
            list(stream)
        until(lambda: server.figure("num_requests_running") == 0)


def strike(timer: asyncio.TimerHandle) -> None:
    """What a timer does at its time, now."""
    callback, arguments = timer._callback, timer._args  # type: ignore[attr-defined]
    timer.cancel()
    callback(*arguments)


def test_a_client_that_does_not_read_is_disconnected(tiny: Path) -> None:
    with Running(tiny, limits=Limits(send_seconds=0.2), max_model_len=256) as server:
        server.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # that of connections to come
        body = {"model": "tiny", "prompt": "a", "stream": True, "max_tokens": 100, "n": 8, "temperature": 5, "logprobs": 20}
        data = json.dumps({**body, "ignore_eos": True}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            sock.recv(1)  # the answer has begun
            me, there = sock.getsockname(), server.server.server_state.connections
            until(lambda: not any(one.client == me for one in list(there)))
            assert b"[DONE]" not in everything(sock)
        until(lambda: server.figure("num_requests_running") == 0)


def everything(sock: socket.socket) -> bytes:
    """What can be read until the connection ends, however it does."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)
