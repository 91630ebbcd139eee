"""A server under mixed traffic for a while: `python -m tests.server.soak SPEC` is one, and says what was wrong.

SPEC is JSON, the fields of Soak. It runs in a process of its own, so that the memory that is looked at is the server's alone.
"""

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.serving import ModelSpec, open_models
from headrace.server.settings import CascadeSettings, ServerSettings
from tests.server.harness import ENGINE, NEVER, PATIENT, ROOT, Running, until

LOOKS = 60  # at the memory, in the time after the warm-up
GROWTH = 1.05  # that the memory of a process may grow by in that time
TIDY = {"MALLOC_ARENA_MAX": "1", "MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}  # of glibc
DONE = "same streamed chat leave disconnect_midway slow bad bad_field too_big attack odd_path small health".split()


@dataclass(frozen=True)
class Soak:
    """What is served, the jobs with their offline answers, and for how long. Seconds; `pause`: see soak_clients.py.

    `models`: of each its name, its file or folder, and its settings; the first one is `tiny`. `cascades`: arguments of
    CascadeSettings. `writers`: fields of requests that are asked for and left; of each its model."""

    models: list[tuple[str, str, dict[str, Any]]]
    jobs: list[dict[str, Any]]
    seconds: float
    warm_up: float
    cascades: list[tuple[str, list[str], list[float]]] = field(default_factory=list)
    writers: list[dict[str, Any]] = field(default_factory=lambda: [{"model": "tiny"}])
    pause: float = 0.0
    least: int = 150  # exchanges before and after the warm-up: on a slow machine memory takes longer to become what it stays
    again: bool = True  # send every mistake and every attack also after the warm-up, not a few of them
    tidy: bool = False  # let the C library give back at once what is freed, so that what is seen is what is held

    def run(self) -> dict[str, Any]:
        """What was done, and `wrong`: what was, line by line."""
        with self._server() as server:
            memory = Memory({"web": os.getpid(), **{one.name: one.llm.pid or 0 for one in server.models.services}})
            first = clients(server, self._spec(1, self.warm_up), self.warm_up, lambda: None)
            report = clients(server, self._spec(2, self.seconds - self.warm_up), self.seconds - self.warm_up, memory.look)
            kinds = [*DONE, *{job["kind"] for job in self.jobs}]
            missed = [f"nothing of {name}" for name in kinds if not report["done"].get(name)]
            wrong = [*first["wrong"], *report["wrong"], *missed, *at_rest(server), *memory.grown()]
            report["done"]["preempted"] = server.figure("num_preemptions_total")
            return {**report, "wrong": wrong, "processes": list(memory.pids), "memory": memory.seen}

    def in_a_process(self) -> dict[str, Any]:
        """The same, run in a process of its own."""
        command = [sys.executable, "-m", "tests.server.soak", json.dumps(asdict(self))]
        done = subprocess.run(
            command, cwd=ROOT, env=environment() | (TIDY if self.tidy else {}), stdout=subprocess.PIPE, text=True, check=True
        )
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def _server(self) -> Running:
        settings = ServerSettings("tiny", port=0, limits=PATIENT)
        more = {"stuck_after": NEVER, "max_queued_requests": 8}
        chosen = [ModelSpec(name, model, {**ENGINE, **more, **given}) for name, model, given in self.models]
        cascades = [CascadeSettings(name, tuple(tiers), tuple(least)) for name, tiers, least in self.cascades]
        return Running.of(open_models(chosen, settings, None, cascades), settings)

    def _spec(self, seed: int, seconds: float) -> dict[str, Any]:
        timing = {"seed": seed, "seconds": seconds, "least": self.least, "pause": self.pause, "all": self.again or seed == 1}
        return {**timing, "jobs": self.jobs, "writers": self.writers}


@dataclass
class Memory:
    """Resident memory of the web process and of each engine's, in MiB."""

    pids: dict[str, int]  # by whose it is
    seen: list[list[float]] = field(default_factory=list)

    def look(self) -> None:
        gc.collect()  # an error holds its frames in a circle, and those hold a long prompt
        self.seen.append([rss(pid) for pid in self.pids.values()])

    def grown(self) -> list[str]:
        """What has grown: the median of the last third of the looks beside that of the first. Large bodies and long texts that
        are under way come and go; what is never given back stays."""
        third = len(self.seen) // 3
        wrong = []
        for name, looks in zip(self.pids, zip(*self.seen, strict=True), strict=True):
            before, after = median(looks[:third]), median(looks[-third:])
            if after > before * GROWTH:
                wrong.append(f"the memory of the {name} process grew from {before:.1f} to {after:.1f} MiB")
        return wrong


def rss(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}


def clients(server: Running, spec: dict[str, Any], seconds: float, look: Callable[[], None]) -> dict[str, Any]:
    """What clients in a process of their own report; meanwhile `look` is called from time to time."""
    command = [sys.executable, "-m", "tests.server.soak_clients", json.dumps({"port": server.port, "model": "tiny", **spec})]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds / LOOKS)
        look()
    assert process.returncode == 0
    report: dict[str, Any] = json.loads(process.stdout.read())
    return report


def at_rest(server: Running) -> list[str]:
    """What is wrong with a server that has nothing to do any more."""
    found: dict[str, str] = {}
    for service in server.models.services:
        until(lambda llm=service.llm: is_idle(llm))  # type: ignore[misc]
        waiting = service.llm.queue
        found[f"the books of the engine of {service.name}"] = books(server, service.llm)
        found[f"the queue of {service.name}"] = "" if waiting.requests == waiting.tokens == 0 else str(waiting)
    health = server.health()
    found["health"] = "" if (health["status"], health["detail"], health["restarts"]) == ("ready", "", 0) else str(health)
    return [f"{name}: {problem}" for name, problem in found.items() if problem]


def is_idle(llm: AsyncLLM) -> bool:
    """Whether nobody asks, and no block is held."""
    return not llm.inflight and llm.requests.stats.running == llm.requests.stats.waiting == llm.requests.stats.blocks_used == 0


def books(server: Running, llm: AsyncLLM) -> str:
    """What an engine process finds wrong with itself."""
    assert server._loop is not None
    return asyncio.run_coroutine_threadsafe(llm.check(), server._loop).result(600)


if __name__ == "__main__":
    print(json.dumps(Soak(**json.loads(sys.argv[1])).run()))
