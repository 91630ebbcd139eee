"""Send a workload: at scheduled times (open loop), or a fixed number of requests at once (closed loop)."""

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.bench.load.client import PendingRequest, Target, TimedAnswer
from headrace.bench.load.workload import ScheduledRequest
from headrace.host import process_seconds

# Seconds before the first request, in which the event loop becomes idle.
LEAD = 0.2


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Answers of one load; seconds of wall time, and of CPU time in the client and in the watched processes (by pid)."""

    answers: list[TimedAnswer]
    seconds: float
    client_cpu: float
    watched_cpu: dict[int, float]


# Receives the number of finished answers.
Done = Callable[[int], None]


def ignore_progress(count: int) -> None:
    """Progress callback that does nothing."""


def drive(
    target: Target,
    requests: Sequence[ScheduledRequest],
    at_once: int | None = None,
    watch: Sequence[int] = (),
    done: Done = ignore_progress,
) -> LoadRun:
    """Send requests at their due times, or with `at_once` keep that many running.

    watch: ids of processes whose CPU time is measured. done: called after every answer.
    """
    target.address()
    pending = [PendingRequest(target, request) for request in requests]
    gc.collect()
    # The garbage collector does not traverse existing objects during the measurement.
    gc.freeze()
    try:
        before = {pid: process_seconds(pid) for pid in watch}
        cpu = time.process_time()
        begun, ended = asyncio.run(_open(pending, requests, done) if at_once is None else _closed(pending, at_once, done))
        client = time.process_time() - cpu
        after = {pid: process_seconds(pid) - before[pid] for pid in watch}
    finally:
        gc.unfreeze()
    return LoadRun([sender.read() for sender in pending], ended - begun, client, after)


async def _open(
    pending: list[PendingRequest], requests: Sequence[ScheduledRequest], done: Done = ignore_progress
) -> tuple[float, float]:
    start = time.perf_counter() + LEAD
    tasks = []
    for sender, request in zip(pending, requests, strict=True):
        due = start + request.at
        while (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(_run(sender, due, done)))
    await asyncio.gather(*tasks)
    return start, time.perf_counter()


async def _closed(pending: list[PendingRequest], at_once: int, done: Done = ignore_progress) -> tuple[float, float]:
    waiting = iter(pending)
    start = time.perf_counter()

    async def worker() -> None:
        for sender in waiting:
            await _run(sender, time.perf_counter(), done)

    await asyncio.gather(*(worker() for _ in range(min(at_once, len(pending)))))
    return start, time.perf_counter()


async def _run(sender: PendingRequest, due: float, done: Done) -> None:
    await sender.run(due)
    done(1)


def warm_up(target: Target, requests: Sequence[ScheduledRequest], say: Callable[[str], None]) -> None:
    """Send requests that are not measured. Raises ValueError if none is answered."""
    if not requests:
        return
    answers = drive(target, requests, at_once=4).answers
    failed = [answer.error for answer in answers if answer.error is not None]
    if len(failed) == len(answers):
        raise ValueError(f"the server answers none of {len(answers)} requests: {failed[0]}")
    say(f"warm: {len(answers) - len(failed)} answers")
