"""Load, clients that leave, an engine that dies or hangs: clear errors, nothing leaked, ready again.

SIGSTOP holds the engine process where a test needs a moment to last; no result depends on how fast anything is.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from headrace.host import process_seconds
from headrace.server.engines.inflight import InflightRequest
from headrace.server.engines.supervision import Action, Event
from tests.server.harness import ENDLESS, PATIENCE, Running, in_thread, until
from tests.server.poisoned_engine import POISON


def aborted(server: Running) -> float:
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if "request_success_total" in line and '"abort"' in line)


def idle(server: Running) -> bool:
    return not server.llm.inflight and server.llm.requests.stats.running == 0 and server.llm.requests.stats.waiting == 0


def generated_after_leaving(server: Running) -> float:
    """A client leaves an endless stream while the engine is paused; how many tokens there were by then."""
    stream = server.complete(**ENDLESS, stream=True)
    next(stream)
    with server.paused():
        stream.close()
        until(lambda: not server.llm.inflight)
        server.caught_up()
        return server.figure("generation_tokens_total")


def test_a_disconnect_during_a_stream_frees_its_blocks_within_two_steps(long_server: Running) -> None:
    generated = generated_after_leaving(long_server)
    until(lambda: idle(long_server))
    assert long_server.llm.requests.stats.blocks_used == 0
    assert long_server.figure("generation_tokens_total") - generated <= 2


def test_a_request_without_an_abort_continues(long_server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: without the message to the engine it would fail."""
    left: list[InflightRequest] = []

    def forget(inflight: list[InflightRequest]) -> None:
        left.extend(submitted for submitted in inflight if long_server.llm.inflight.pop(submitted.request_id, None))

    monkeypatch.setattr(long_server.llm, "abort", forget)
    generated = generated_after_leaving(long_server)
    until(lambda: long_server.figure("generation_tokens_total") - generated > 2)
    assert not idle(long_server)
    monkeypatch.undo()
    long_server.llm.inflight |= {submitted.request_id: submitted for submitted in left}
    long_server.on_loop(lambda: long_server.llm.abort(left))
    until(lambda: idle(long_server))


def test_a_disconnect_before_a_complete_answer_frees_its_blocks(server: Running) -> None:
    before = aborted(server)
    body = json.dumps({"model": "tiny", "prompt": "The mill", "max_tokens": 200})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    with server.paused():
        with socket.create_connection(("127.0.0.1", server.port)) as sock:
            sock.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            until(lambda: bool(server.llm.inflight))
        until(lambda: not server.llm.inflight)
    until(lambda: aborted(server) == before + 1 and idle(server))
    assert server.llm.requests.stats.blocks_used == 0
    assert server.llm.queue.requests == server.llm.queue.tokens == 0


def test_a_full_queue_is_a_429_with_retry_after(server: Running) -> None:
    expected = server.complete().choices[0].text
    with server.paused():
        waiting = [in_thread(server.complete) for _ in range(3)]
        until(lambda: server.llm.queue.requests == 3)
        with pytest.raises(openai.RateLimitError, match="3 requests are waiting and 3 may") as refused:
            server.complete()
        with pytest.raises(openai.RateLimitError):
            server.complete(stream=True)
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    assert [one.result().choices[0].text for one in waiting] == [expected] * 3
    assert server.complete().choices[0].text == expected
    assert server.llm.queue.requests == server.llm.queue.tokens == 0


def test_several_prompts_enter_the_queue_together_or_not_at_all(server: Running) -> None:
    with server.paused():
        first = in_thread(server.complete)
        until(lambda: len(server.llm.inflight) == 1)
        with pytest.raises(openai.RateLimitError):
            server.complete(prompt=["a", "b", "c"])
        assert len(server.llm.inflight) == 1
    assert first.result().choices
    assert server.llm.queue.requests == 0
    assert not server.llm.inflight


def test_a_killed_engine_restarts_and_its_requests_go_on(endless: Path) -> None:
    with Running(endless) as server:
        expected = server.complete().choices[0].text
        more: dict[str, Any] = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}
        right = server.complete(**more).choices[0].text
        stream = server.complete(**more, stream=True)
        text = next(stream).choices[0].text
        first = server.llm.pid
        assert first is not None
        with server.paused():
            whole = in_thread(server.complete)
            until(lambda: len(server.llm.inflight) == 2)
            os.kill(first, signal.SIGKILL)
        assert text + "".join(chunk.choices[0].text for chunk in stream) == right
        assert whole.result().choices[0].text == expected
        assert server.llm.pid != first
        assert server.health() == {"status": "ready", "detail": "", "restarts": 1}
        assert server.figure("engine_restarts") == 1
        assert server.figure("request_replays_total") == 2
        assert server.complete().choices[0].text == expected
        assert not server.llm.inflight


def test_a_request_that_ended_the_engine_twice_is_refused(endless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.engines.engine_client.MODULE", "tests.server.poisoned_engine")
    with Running(endless) as server:
        expected = server.complete(prompt="a river").choices[0].text
        poison: dict[str, Any] = {"extra_body": {"priority": POISON}}
        with pytest.raises(openai.InternalServerError, match="the engine process ended \\(signal SIGKILL\\)") as lost:
            server.complete(**poison)
        assert (lost.value.status_code, lost.value.code) == (503, "engine_lost")
        assert lost.value.response.headers["x-should-retry"] == "true"
        assert int(lost.value.response.headers["retry-after"]) > 0
        until(lambda: server.health()["status"] == "ready")
        with pytest.raises(openai.UnprocessableEntityError, match="ended 2 times while it had this request") as refused:
            server.complete(**poison)
        assert refused.value.code == "request_quarantined"
        assert server.complete(prompt="a river").choices[0].text == expected
        assert server.figure("requests_quarantined") == 1
        assert server.figure("engine_ends") == 2
        lines = server.http.get("/metrics").text.splitlines()
        assert [line for line in lines if "engine_state{" in line and line.endswith(" 1.0")] == [
            'headrace:engine_state{model_name="tiny",state="ready"} 1.0'
        ]
        assert server.http.get("/v1/models").json()["data"][0]["status"] == "ready"


def test_a_stuck_engine_is_killed_and_health_reports_it(tiny: Path) -> None:
    with Running(tiny, stuck_after=16.0) as server:
        expected = server.complete().choices[0].text
        server.llm.replica.supervision.pauses = (3600.0,)  # it is not started again while the test looks
        pid = server.llm.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        server.llm.replica.stuck_after = 0.8  # only now: an engine that was slow on a busy machine was not stuck
        waiting = in_thread(server.complete)
        until(lambda: server.health()["status"] == "stuck")
        assert server.http.get("/v1/models").json()["data"][0]["status"] == "stuck"
        assert server.http.get("/ready").json() == {"status": "stuck"}
        health = server.http.get("/health")
        assert health.status_code == 503
        assert health.json()["status"] == "stuck"
        assert "retry-after" in health.headers
        until(lambda: server.llm.pid is None)
        until(lambda: not Path(f"/proc/{pid}").exists())
        with pytest.raises(openai.InternalServerError, match=r"no sign of life for 0\.8 s") as failed:
            server.complete()
        assert failed.value.status_code == 503
        assert waiting.running, "the request that the engine had waits for the next engine"
        server.llm.replica.stuck_after = 3600.0
        server.on_loop(lambda: end_pause(server))
        assert waiting.result().choices[0].text == expected


def end_pause(server: Running) -> None:
    """End the pause before the engine is started again: the replica supervises anew."""
    replica = server.llm.replica
    assert replica._supervisor is not None
    replica._supervisor.cancel()
    assert replica._on(Event.RESUME).action is Action.START
    replica._supervisor = asyncio.get_running_loop().create_task(replica._supervise())


def test_a_shutdown_finishes_all_parts_of_a_started_request(tiny: Path) -> None:
    """Embeddings of more texts than are asked for together: when the first have been, the server already shuts down."""
    with Running(tiny, grace=PATIENCE) as server:
        body = {"model": "tiny", "input": [f"text {number}" for number in range(40)]}
        with server.paused():
            whole = in_thread(lambda: server.post("/v1/embeddings", body))
            until(lambda: len(server.llm.inflight) == 32)
            server.drain()
            until(lambda: server.llm.state == "draining")
        answer = whole.result()
        assert (answer.status_code, len(answer.json()["data"])) == (200, 40)
        server.join()


def test_requests_beyond_the_grace_period_fail(endless: Path) -> None:
    with Running(endless, grace=0.0) as server:
        stream = server.complete(**ENDLESS, stream=True)
        next(stream)
        with server.paused():
            server.drain()
            with pytest.raises(openai.APIError, match="the server has shut down"):
                list(stream)
        server.join()


def test_a_model_that_cannot_be_opened_ends_the_server(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 100)
    with Running(broken, wait=False) as server:
        until(lambda: server.error is not None)
        assert "broken.gguf" in str(server.error)


@pytest.mark.weights
def test_a_killed_engine_of_a_real_model_is_ready_again_within_seconds(default_model: Path) -> None:
    """Its CPU time until it is ready, which on an idle machine is the time that passes (1.5 s); 5 s are allowed, and as
    much more as a slower machine takes to import torch (0.9 s)."""
    slower = max(1.0, torch_seconds() / 0.9)
    with Running(default_model, dtype="auto", backend="auto", kv_cache_memory="256MiB") as server:
        more: dict[str, Any] = {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
        right = server.complete(**more).choices[0].text
        stream = server.complete(**more, stream=True)
        text = next(stream).choices[0].text
        first = server.llm.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert text + "".join(chunk.choices[0].text for chunk in stream) == right
        assert server.llm.pid is not None
        assert process_seconds(server.llm.pid) < 8.0 * slower, "with the rest of the answer"
        assert server.health()["restarts"] == 1


def torch_seconds() -> float:
    """CPU time of a process that imports torch."""
    code = "import time, torch; print(time.process_time())"
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True).stdout)
