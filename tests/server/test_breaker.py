"""Failing steps in a real engine process: FAILURES in a row restart it, and clients receive the state."""

from pathlib import Path

import httpx2 as httpx
import pytest

from headrace.server.engines.supervision import FAILURES, PAUSES
from tests.server.failing_engine import FAULTS
from tests.server.harness import Running, in_thread, until

AT_ONCE = FAILURES + 2  # requests: the step of all of them fails, then those of FAILURES - 1, and the others are in flight
SAYS = f"{FAILURES} steps of the engine failed in a row; it is being started again"


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("headrace.server.engines.engine_client.MODULE", "tests.server.failing_engine")
    monkeypatch.setenv(FAULTS, str(tmp_path))
    return tmp_path


def at_once(server: Running, prompt: str) -> list[httpx.Response]:
    """Answers to requests that the engine takes in together."""
    bodies = [{"model": "tiny", "prompt": f"{prompt} {number}", "max_tokens": 4} for number in range(AT_ONCE)]
    with server.paused():
        asked = [in_thread(lambda body=body: server.post("/v1/completions", body)) for body in bodies]
        until(lambda: len(server.llm.inflight) == AT_ONCE)
    return [one.result() for one in asked]


def outcomes(answers: list[httpx.Response]) -> list[tuple[int, str, str | None]]:
    """Status, code and x-should-retry of each, sorted."""
    return sorted((one.status_code, one.json()["error"]["code"], one.headers.get("x-should-retry")) for one in answers)


def test_failing_steps_open_the_breaker_and_a_good_step_closes_it(tiny: Path, faults: Path) -> None:
    with Running(tiny) as server:
        (faults / "fail").touch()
        (faults / "hold").touch()
        first = server.llm.pid
        answers = at_once(server, "the mill")
        failed, lost = FAILURES - 1, AT_ONCE - FAILURES + 1
        assert outcomes(answers) == [(500, "request_failed", "false")] * failed + [(503, "engine_lost", "true")] * lost
        assert all(SAYS in one.json()["error"]["message"] for one in answers if one.status_code == 503)

        until(lambda: server.llm.pid not in (None, first))  # it is being started again, and loads nothing yet
        health = server.http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "failing", "detail": SAYS, "restarts": 1})
        assert int(health.headers["retry-after"]) > 0
        assert server.http.get("/live").status_code == 200
        assert server.http.get("/ready").json() == {"status": "failing"}
        assert server.http.get("/v1/models").json()["data"][0]["status"] == "failing"
        refused = server.post("/v1/completions", {"model": "tiny", "prompt": "a river"})
        assert outcomes([refused]) == [(503, "engine_unavailable", "true")]
        assert SAYS in refused.json()["error"]["message"]

        server.llm.replica.supervision.pauses = (3600.0,)  # the next start waits: there is time to look
        (faults / "hold").unlink()
        until(lambda: server.health()["status"] == "ready")
        assert outcomes(at_once(server, "a river")) == outcomes(answers)  # it fails still
        assert (server.health()["status"], server.llm.replica.supervision.pause) == ("failing", 3600.0)
        assert server.figure("engine_ends") == 2


def test_after_recovery_all_requests_succeed(tiny: Path, faults: Path) -> None:
    with Running(tiny) as server:
        expected = server.complete().choices[0].text
        (faults / "fail").touch()
        answers = at_once(server, "the mill")
        (faults / "fail").unlink()
        until(lambda: server.health()["status"] == "ready")
        assert server.llm.replica.supervision.pauses == PAUSES
        assert server.complete().choices[0].text == expected
        again = [server.post("/v1/completions", {"model": "tiny", "prompt": f"the mill {n}"}) for n in range(AT_ONCE)]
        assert [one.status_code for one in again] == [200] * AT_ONCE, "nobody is held to be why"
        assert len(answers) == AT_ONCE
        assert server.health() == {"status": "ready", "detail": "", "restarts": 1}
        assert server.figure("engine_failing_steps") == 0
        assert not server.llm.inflight


def test_the_control_without_a_breaker_every_request_fails_and_health_is_good(
    tiny: Path, faults: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.server.engines.replica.FAILURES", 10**9)
    with Running(tiny) as server:
        (faults / "fail").touch()
        assert {one.status_code for one in at_once(server, "the mill")} == {500}
        assert server.health() == {"status": "ready", "detail": "", "restarts": 0}
