"""Sending a workload: at scheduled times whatever the server does (open loop), or so many at once (closed loop)."""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.bench.load.client import Answer, Pending, Target
from headrace.bench.load.workload import Job
from headrace.host import process_seconds

LEAD = 0.2  # seconds from the start to the first request, for the event loop to be idle


@dataclass(frozen=True, slots=True)
class Run:
    """Answers of one load. Seconds: of the whole, and of CPU in the client and in the watched processes."""

    answers: list[Answer]
    seconds: float
    client_cpu: float
    watched_cpu: dict[int, float]


Done = Callable[[int], None]  # told of every answer


def nobody(count: int) -> None:
    """Is told."""


def drive(
    target: Target,
    jobs: Sequence[Job],
    at_once: int | None = None,
    watch: Sequence[int] = (),
    done: Done = nobody,
) -> Run:
    """Send `jobs` when they are due, or `at_once` of them at any time. `watch`: processes whose CPU time is counted; `done` is
    told of every answer."""
    target.address()
    pending = [Pending(target, job) for job in jobs]  # made before the clock starts
    gc.collect()
    gc.freeze()  # what is there is not walked through while the clock runs
    try:
        before = {pid: process_seconds(pid) for pid in watch}
        cpu = time.process_time()
        begun, ended = asyncio.run(_open(pending, jobs, done) if at_once is None else _closed(pending, at_once, done))
        client = time.process_time() - cpu
        after = {pid: process_seconds(pid) - before[pid] for pid in watch}
    finally:
        gc.unfreeze()
    return Run([one.read() for one in pending], ended - begun, client, after)


async def _open(pending: list[Pending], jobs: Sequence[Job], done: Done = nobody) -> tuple[float, float]:
    start = time.perf_counter() + LEAD
    tasks = []
    for one, job in zip(pending, jobs, strict=True):
        due = start + job.at
        while (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(_run(one, due, done)))
    await asyncio.gather(*tasks)
    return start, time.perf_counter()


async def _closed(pending: list[Pending], at_once: int, done: Done = nobody) -> tuple[float, float]:
    waiting = iter(pending)
    start = time.perf_counter()

    async def worker() -> None:
        for one in waiting:
            await _run(one, time.perf_counter(), done)

    await asyncio.gather(*(worker() for _ in range(min(at_once, len(pending)))))
    return start, time.perf_counter()


async def _run(one: Pending, due: float, done: Done) -> None:
    await one.run(due)
    done(1)


def warm_up(target: Target, jobs: Sequence[Job], say: Callable[[str], None]) -> None:
    """Send requests that are not counted. Raises ValueError where none is answered: the load would measure nothing."""
    if not jobs:
        return
    answers = drive(target, jobs, at_once=4).answers
    failed = [answer.error for answer in answers if answer.error is not None]
    if len(failed) == len(answers):
        raise ValueError(f"the server answers none of {len(answers)} requests: {failed[0]}")
    say(f"warm: {len(answers) - len(failed)} answers")
