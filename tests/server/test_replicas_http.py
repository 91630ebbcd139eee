"""Two replicas through HTTP, in processes: one is killed or stopped under streams, then all are restarted."""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import host
from tests.server.harness import PATIENCE, Running, in_thread, until

STREAMS, TOKENS = 6, 2000


@pytest.fixture(scope="module")
def server(endless: Path) -> Iterator[Running]:
    with Running(endless, replicas=2, grace=0.0) as running:
        for engine in running.llm.replicas.engines:
            engine.replica.supervision.pauses = (0.0,)
        until(lambda: all_ready(running))
        yield running


def all_ready(server: Running) -> bool:
    return list(server.health()["replicas"]["tiny"].values()) == ["ready", "ready"]


def pids(server: Running) -> list[int]:
    found = [engine.replica.pid for engine in server.llm.replicas.engines]
    assert None not in found
    return found  # type: ignore[return-value]


def stream(server: Running, seed: int, begun: threading.Semaphore | None = None) -> str:
    more: dict[str, Any] = {"prompt": f"Mill {seed}", "max_tokens": TOKENS, "temperature": 1.0, "seed": seed}
    chunks = server.openai.completions.create(model="tiny", stream=True, extra_body={"ignore_eos": True}, **more)
    texts = []
    for chunk in chunks:
        texts += [choice.text for choice in chunk.choices]
        if begun is not None and len(texts) == 3:
            begun.release()
    return "".join(texts)


def under_streams(server: Running, event: Any) -> list[str]:
    """The answers of all streams; `event` happens when half of them have their third chunk.

    The clients say when, since a look at the running requests may come after the first of them have ended.
    """
    begun = threading.Semaphore(0)
    waiting = [in_thread(lambda seed=seed: stream(server, seed, begun)) for seed in range(STREAMS)]  # type: ignore[misc]
    for _ in range(STREAMS // 2):
        assert begun.acquire(timeout=PATIENCE)
    assert server.llm.inflight, "every stream ended before the event"
    event()
    return [one.result() for one in waiting]


def test_a_killed_replica_and_a_restart_of_all_change_no_answer(server: Running) -> None:
    expected = [stream(server, seed) for seed in range(STREAMS)]
    first = pids(server)
    assert under_streams(server, lambda: os.kill(first[0], signal.SIGKILL)) == expected
    until(lambda: all_ready(server))
    assert server.health()["restarts"] == 1
    assert under_streams(server, lambda: server.on_loop(server.server.renew)) == expected
    until(lambda: server.health()["restarts"] == 3 and all_ready(server))
    assert not set(first) & set(pids(server))
    assert server.llm.quarantine.banned == 0
    assert server.figure("replica_ready") == 2


@pytest.mark.slow
def test_a_stopped_replica_is_ended_and_its_requests_go_on(server: Running) -> None:
    expected = [stream(server, seed) for seed in range(STREAMS)]
    replica = server.llm.replicas.engines[1].replica
    until(lambda: all_ready(server))
    replica.stuck_after = 8.0  # of the next process
    restarts = server.health()["restarts"]
    server.on_loop(server.server.renew)
    until(lambda: server.health()["restarts"] == restarts + 2 and all_ready(server))
    pid = pids(server)[1]
    assert under_streams(server, lambda: os.kill(pid, signal.SIGSTOP)) == expected
    until(lambda: all_ready(server) and pids(server)[1] != pid)
    assert server.health()["restarts"] == restarts + 3
    replica.stuck_after = 3600.0


def test_replicas_map_the_weights_once_and_divide_the_cores(server: Running) -> None:
    until(lambda: all_ready(server))
    maps = [Path(f"/proc/{pid}/maps").read_text().splitlines() for pid in pids(server)]
    shared = [[line.split() for line in lines if "memfd:headrace-weights" in line] for lines in maps]
    assert all(shared)
    assert {line[4] for lines in shared for line in lines} == {shared[0][0][4]}  # one inode
    assert {line[1] for line in shared[1]} == {"r--s"}
    cores = [os.sched_getaffinity(pid) for pid in pids(server)]
    assert set.union(*cores) <= set(host.processors())
    if host.cores() > 1:
        assert not cores[0] & cores[1]
