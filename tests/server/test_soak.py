"""Mixed traffic for a while: clients that leave, mistakes of every class, bodies that are too large, slow readers.

Here for 12 seconds on a tiny model; `make soak` runs it for 20 minutes on the default model (SOAK_SECONDS: for how long).
"""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams
from tests.server.harness import ENGINE, Running, until

ROOT = Path(__file__).parents[2]
SHORT, LONG = 6.0, float(os.environ.get("SOAK_SECONDS", "1200"))  # seconds
# A small KV pool: all of it has been used by the end of the warm-up, and requests are preempted.
REAL = {**ENGINE, "dtype": "auto", "backend": "auto", "kv_cache_memory": "48MiB"}
GROWTH = 1.05  # that the memory of a process may grow by after the warm-up
# MiB more in a short run: the web side shares the tests' process, where a large body may leave the allocator with new pages.
SLACK = 128.0


@dataclass
class Memory:
    """Resident memory of the web process and of the engine process, in MiB."""

    pids: list[int]
    seen: list[list[float]] = field(default_factory=list)

    def look(self) -> None:
        self.seen.append([rss(pid) for pid in self.pids])


def rss(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def jobs(model: Path, settings: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Requests with the texts that offline generation gives."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=12 + 7 * n)
        if n % 2
        else SamplingParams(temperature=0.9, top_p=0.95, seed=n, max_tokens=40)
        for n in range(12)
    ]
    prompts = [f"The mill {'by the stream ' * n}stands" for n in range(12)]
    llm = LLM(model, **settings)
    texts = [llm.generate(prompt, one)[0].outputs[0].text for prompt, one in zip(prompts, params, strict=True)]
    llm.close()
    bodies = [
        {"model": name, "prompt": prompt, "temperature": one.temperature, "top_p": one.top_p, "max_tokens": one.max_tokens}
        | ({"seed": one.seed} if one.seed is not None else {})
        for prompt, one in zip(prompts, params, strict=True)
    ]
    return [{"body": body, "text": text} for body, text in zip(bodies, texts, strict=True)]


def clients(
    server: Running, seconds: float, seed: int, expected: list[dict[str, Any]], memory: Memory | None
) -> dict[str, Any]:
    """What clients in a process of their own report."""
    spec = {"port": server.port, "model": "tiny", "seconds": seconds, "seed": seed, "jobs": expected}
    command = [sys.executable, "-m", "tests.server.soak_clients", json.dumps(spec)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.poll() is None:
        try:
            process.wait(max(0.2, seconds / 60))
        except subprocess.TimeoutExpired:
            if memory is not None:
                memory.look()
    assert process.returncode == 0
    report: dict[str, Any] = json.loads(process.stdout.read())
    return report


def books(server: Running) -> str:
    """What the engine process finds wrong with itself."""
    assert server._loop is not None
    return asyncio.run_coroutine_threadsafe(server.llm.check(), server._loop).result(60)


def soak(model: Path, settings: dict[str, Any], seconds: float, warm_up: float, slack: float = 0.0) -> None:
    expected = jobs(model, settings, "tiny")
    with Running(model, **settings, max_queued_requests=8) as server:
        assert server.llm.pid is not None
        memory = Memory([os.getpid(), server.llm.pid])
        first = clients(server, warm_up, 1, expected, None)
        memory.look()
        report = clients(server, seconds - warm_up, 2, expected, memory)
        print(json.dumps(report, indent=1), memory.seen[0], memory.seen[-1])
        assert first["wrong"] == report["wrong"] == []
        assert all(
            report["done"][name] for name in "same streamed chat leave leave_early slow bad bad_field too_big health".split()
        )
        until(lambda: not server.llm.tickets and server.llm.stats.running == server.llm.stats.waiting == 0)
        until(lambda: server.llm.stats.blocks_used == 0)
        assert books(server) == ""
        assert server.llm.waiting.requests == server.llm.waiting.tokens == 0
        assert server.health() == {"status": "ready", "detail": "", "restarts": 0}
        for before, *after in zip(*memory.seen, strict=True):
            assert max(after) < before * GROWTH + slack, memory.seen


def test_a_short_soak(tiny: Path) -> None:
    soak(tiny, ENGINE, 2 * SHORT, SHORT, SLACK)


@pytest.mark.slow
@pytest.mark.weights
def test_a_long_soak(default_model: Path) -> None:
    soak(default_model, REAL, LONG, min(180.0, LONG / 3))


def test_the_clients_notice_what_is_wrong(tiny: Path) -> None:
    """The control: with answers that are not the offline ones, and health that is not true, the report says so."""
    expected = [{"body": {"model": "tiny", "prompt": "The mill", "max_tokens": 4, "temperature": 0}, "text": "something else"}]
    with Running(tiny) as server:
        server.llm.detail = "x"
        report = clients(server, 1.5, 3, expected, None)
        assert any("another" in line for line in report["wrong"])
        assert not any("health" in line for line in report["wrong"])


def test_books_that_are_out_of_order_are_told(offline: LLM) -> None:
    """The control of `check`: a block that nobody holds and that is not free."""
    from headrace.server.engine_process import EngineLoop

    loop = EngineLoop(offline, channel=None, beat=1.0)  # type: ignore[arg-type]
    assert loop._problem() == ""
    free = offline.engine.blocks._free
    lost = free.pop()
    assert loop._problem() == "idle and held blocks do not add up"
    free.append(lost)
    assert loop._problem() == ""
    loop._open["x"] = None  # type: ignore[assignment]
    assert loop._problem() == "1 requests are open and nothing runs"
