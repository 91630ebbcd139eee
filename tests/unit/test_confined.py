"""Confined processes: they answer, they reach nothing, what takes too much ends, and no client keeps others waiting."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.confined import child
from headrace.confined import pool as module
from headrace.confined import process as worker
from headrace.confined.pool import CLIENT, IDLE, BusyError, ConfinedPool, CpuShares, OverrunError, Task
from headrace.confined.process import ConfinedProcess
from headrace.server.http.errors import as_api_error
from tests.trap import trap
from tests.unit import confined_tasks

PATIENCE = 300.0  # seconds until a test gives up; no result depends on it


def task(function: str, **more: Any) -> Task:
    return Task(confined_tasks.__name__, function, **more)


@pytest.fixture
def pool() -> Iterator[ConfinedPool]:
    made = ConfinedPool(width=4)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared() -> Iterator[ConfinedPool]:
    made = ConfinedPool(width=4)
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(int(PATIENCE / 0.01)):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("what was waited for did not come")


@pytest.mark.parametrize(
    "value", [None, 5, "水" * 100_000, b"x" * 3_000_000, [1.5, {"a": []}]], ids=lambda value: str(value)[:8]
)
def test_a_question_is_answered(shared: ConfinedPool, value: Any) -> None:
    asked = task("echo", answer=8 << 20)
    assert shared.run(asked, value) == value
    assert asyncio.run(shared.ask(asked, value)) == value


def test_a_process_is_reused_for_its_module_and_argument(shared: ConfinedPool) -> None:
    first, other = task("pid"), task("pid", argument="other")
    assert shared.run(first, None) == shared.run(first, None) != shared.run(other, None)
    assert shared.run(task("warmed", argument="other"), None) == "other"


def test_idle_processes_are_bounded(pool: ConfinedPool) -> None:
    seen = [pool.run(task("pid", argument=str(number)), None) for number in range(IDLE + 2)]
    assert {one.pid for one in pool.workers} == set(seen[-IDLE:])


def test_an_answer_is_cached_if_the_task_allows(pool: ConfinedPool) -> None:
    asked = task("pid", remembered=True)
    first = pool.run(asked, 1)
    pool.close()
    until(lambda: not pool.workers)
    assert pool.run(asked, 1) == first  # though that process has gone
    assert pool.run(asked, 2) != first  # another question, another process
    assert pool.run(task("pid"), 1) != first


# -- what they may use -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("function", ["spin", "hang"])
def test_the_deadline_is_of_cpu_time_and_ends_one_question(shared: ConfinedPool, function: str) -> None:
    with pytest.raises(OverrunError) as caught:
        shared.run(task(function, seconds=0.2), None)
    assert not caught.value.in_time
    assert shared.run(task("echo"), "next") == "next"


def test_a_stopped_process_uses_no_time(pool: ConfinedPool) -> None:
    """The control of a clock: one that stands still, as on a busy machine, for longer than its deadline is answered."""
    number = pool.run(task("pid"), None)
    os.kill(number, 19)  # SIGSTOP
    threading.Timer(1.0, os.kill, (number, 18)).start()
    assert pool.run(task("pid", seconds=0.2), None) == number


def test_memory_is_bounded_by_question(shared: ConfinedPool) -> None:
    with pytest.raises(OverrunError) as caught:
        shared.run(task("fill", memory=300 << 20), 400 << 20)
    assert caught.value.in_time
    assert shared.run(task("fill", memory=800 << 20), 400 << 20) == 400 << 20
    with pytest.raises(OverrunError):
        shared.run(task("fill", memory=1 << 40), child.CEILING)  # whatever a question is given


def test_a_process_that_has_grown_is_replaced(pool: ConfinedPool) -> None:
    small = pool.run(task("keep"), 1)
    assert pool.run(task("keep", memory=1 << 30), worker.KEPT) == small
    assert pool.run(task("pid"), None) != small


def test_a_process_that_was_large_when_it_was_ready_stays(pool: ConfinedPool) -> None:
    large = task("pid", argument=str(worker.KEPT), memory=1 << 30)
    assert pool.run(large, None) == pool.run(large, None)


def test_an_answer_is_bounded(shared: ConfinedPool) -> None:
    with pytest.raises(OverrunError):
        shared.run(task("echo", answer=1000), b"x" * 1000)
    assert shared.run(task("echo", answer=1100), b"x" * 1000) == b"x" * 1000


def test_an_exception_ends_its_request(shared: ConfinedPool) -> None:
    with pytest.raises(OverrunError) as caught:
        shared.run(task("fail"), None)
    assert caught.value.in_time


def test_a_long_task_lowers_its_priority_and_is_replaced(pool: ConfinedPool) -> None:
    """Short questions are worked at as anything else; on a busy machine they would wait for seconds else."""
    assert pool.run(task("work"), 0.01) == os.getpriority(os.PRIO_PROCESS, 0)
    number = pool.run(task("pid"), None)
    assert pool.run(task("work", seconds=60.0), worker.EASY + 3 * worker.LOOK) == 19
    assert pool.run(task("pid"), None) != number


# -- what they may reach -----------------------------------------------------------------------------------------------
def reached(pool: ConfinedPool | None, tmp_path: Path) -> dict[str, str]:
    """What comes of reaching for everything, in a confined process or in this one."""
    known, new = tmp_path / "known", tmp_path / "new"
    known.write_text("x")
    with trap() as (url, got):
        port = url.rpartition(":")[2].partition("/")[0]
        places = {"read": known, "write": new, "connect": port, "run": "/bin/true", "descriptor": "", "remove": known}
        wanted = [(what, str(where)) for what, where in places.items()]
        ask = confined_tasks.reach if pool is None else lambda question: pool.run(task("reach"), question)
        said = {question[0]: ask(question) for question in wanted}
        if pool is not None:
            assert got == []
    if pool is not None:
        assert known.exists()
        assert not new.exists()
    return said


def test_nothing_can_be_reached(shared: ConfinedPool, tmp_path: Path) -> None:
    """No file, no other host, no other process; the same calls reach all of it from here."""
    said = reached(shared, tmp_path)
    assert all(answer.startswith(("PermissionError", "OSError: [Errno 24]")) for answer in said.values()), said
    assert set(reached(None, tmp_path).values()) == {"done"}


def test_the_kernel_refuses_new_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The audit hook is the second lock: without it the first one holds."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.addaudithook = lambda hook: None\n")
    monkeypatch.syspath_prepend(tmp_path)
    pool = ConfinedPool()
    places = {"read": __file__, "write": str(tmp_path / "new"), "connect": "9", "run": "/bin/true", "descriptor": ""}
    said = {what: pool.run(task("reach"), (what, where)) for what, where in places.items()}
    pool.close()
    assert all("[Errno 24]" in answer for answer in said.values()), said


def test_confined_processes_see_only_the_needed_environment(monkeypatch: pytest.MonkeyPatch, pool: ConfinedPool) -> None:
    monkeypatch.setenv("HEADRACE_SECRET", "s3cret")
    found = pool.run(task("environ"), None)
    assert "PYTHONPATH" in found
    assert "s3cret" not in str(found)


# -- ends --------------------------------------------------------------------------------------------------------------
def test_a_process_that_died_is_replaced(pool: ConfinedPool) -> None:
    first = pool.run(task("pid"), None)
    (process,) = pool.workers
    process.kill()
    until(lambda: not process.alive)
    assert pool.run(task("pid"), None) != first
    pool.close()
    pool.close()
    assert pool.run(task("echo"), 1) == 1  # closing is no end


def test_dropping_a_pool_ends_its_processes() -> None:
    pool = ConfinedPool()
    pool.run(task("echo"), 1)
    (process,) = pool.workers
    until(lambda: not [one for one in threading.enumerate() if one.name == "confined"])
    del pool
    assert not process.alive


def test_a_fork_starts_its_own_processes(pool: ConfinedPool) -> None:
    first, held = pool.run(task("pid"), None), list(pool.workers)  # the other process keeps its end of the pipes
    pool._owner = -1  # as if this were another process than the one that started it
    assert pool.run(task("pid"), None) != first
    os.kill(first, 0)  # which still runs
    for one in held:
        one.kill()


def test_a_cancellation_ends_the_work(pool: ConfinedPool) -> None:
    async def leave() -> None:
        await pool.ask(task("echo"), 1)
        (worker,) = pool.workers
        started = worker.used
        asked = asyncio.ensure_future(pool.ask(task("spin", seconds=600.0), None))
        while worker.used < started + 0.05:
            await asyncio.sleep(0.01)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(leave())
    until(lambda: not pool.workers)


def test_a_cancellation_during_the_start_leaves_a_usable_process(pool: ConfinedPool) -> None:
    async def leave() -> None:
        asked = asyncio.ensure_future(pool.ask(task("spin", seconds=600.0), None))
        while not pool.workers:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)

    asyncio.run(leave())
    until(lambda: bool(pool._idle))
    (started,) = pool.workers
    assert asyncio.run(pool.ask(task("echo"), 2)) == 2
    assert pool.workers == {started}


def test_a_cancelled_request_in_the_queue_never_runs(pool: ConfinedPool) -> None:
    async def leave() -> list[Any]:
        busy = [asyncio.ensure_future(pool.ask(task("spin", seconds=600.0), None)) for _ in range(3)]
        left = asyncio.ensure_future(pool.ask(task("fail"), None))
        await asyncio.sleep(0)
        for one in (left, *busy):
            one.cancel()
        return await asyncio.gather(left, *busy, return_exceptions=True)

    assert all(isinstance(one, asyncio.CancelledError) for one in asyncio.run(leave()))
    until(lambda: not pool._working and not pool._waiting)
    assert all(one.used < 60 for one in pool.workers), "a cancelled question ran"


# -- clients -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("fair", [True, False])
def test_one_client_does_not_block_others(fair: bool) -> None:
    """With a hundred endless questions of one, another's are answered at once; without the share of each they never would."""
    pool = ConfinedPool(width=4)
    if not fair:
        pool._each = 4

    async def run_requests() -> list[Any]:
        CLIENT.set("one")
        hogs = [asyncio.ensure_future(pool.ask(task("spin", seconds=600.0), None)) for _ in range(100)]
        await asyncio.sleep(0)
        CLIENT.set("other")
        try:
            while not fair and pool._working["one"] < 4:  # all places are taken by questions that never end
                await asyncio.sleep(0.01)
            async with asyncio.timeout(PATIENCE if fair else 0.2):
                return [await pool.ask(task("echo"), number) for number in range(20)]
        except TimeoutError:
            return []
        finally:
            for hog in hogs:
                hog.cancel()
            await asyncio.gather(*hogs, return_exceptions=True)

    assert asyncio.run(run_requests()) == (list(range(20)) if fair else [])
    pool.close()


def test_clients_alternate(pool: ConfinedPool) -> None:
    """A question of another client comes before the second of one with many."""
    pool._width, pool._each = 1, 1
    order: list[str] = []

    async def run_requests() -> None:
        async def one(client: str) -> None:
            CLIENT.set(client)
            await pool.ask(task("echo"), client)
            order.append(client)

        async def first() -> None:  # so that all others are there before one of them is taken
            CLIENT.set("z")
            await pool.ask(task("work"), 0.3)

        await asyncio.gather(first(), *(one(client) for client in ("a", "a", "a", "a", "b", "c", "b")))

    asyncio.run(run_requests())
    assert order == ["a", "b", "c", "a", "b", "a", "a"]


def test_a_client_fills_at_most_half_of_the_queue() -> None:
    """Beyond it, that client is refused and another one is not."""
    pool = ConfinedPool(width=1, most=4)

    async def run_requests() -> None:
        CLIENT.set("one")
        hogs = []
        for waiting in (0, 1, 2):  # the first one is worked at
            hogs.append(asyncio.ensure_future(pool.ask(task("spin", seconds=600.0), None)))
            await asyncio.sleep(0)
            while len(pool._waiting) != waiting:
                await asyncio.sleep(0.01)
        with pytest.raises(BusyError, match="2 questions of this client wait, 2 of all, and 4 may"):
            await pool.ask(task("echo"), 1)
        CLIENT.set("other")
        hogs.append(asyncio.ensure_future(pool.ask(task("echo"), 1)))
        await asyncio.sleep(0)
        assert len(pool._waiting) == 3
        for hog in hogs:
            hog.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)
        assert await pool.ask(task("echo"), 1) == 1

    asyncio.run(run_requests())
    pool.close()


def test_a_client_over_its_share_runs_at_idle_priority() -> None:
    """Its questions are answered, in processes that others come before; clients over their share have a part of them."""
    pool = ConfinedPool(width=4, shares=CpuShares(rate=1e-9))
    pool.shares.charge("costly", 10.0)

    async def priority(client: str) -> int:
        CLIENT.set(client)
        answer: int = await pool.ask(task("work"), 0.0)
        return answer

    async def run_requests() -> None:
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert [await priority("costly"), await priority("honest"), await priority("costly")] == [19, own, 19]
        pool.shares.charge("other", 10.0)
        hogs = []
        for client in ("costly", "costly", "other", "other"):
            CLIENT.set(client)
            hogs.append(asyncio.ensure_future(pool.ask(task("spin", seconds=600.0), None)))
            await asyncio.sleep(0)
        while pool._working_idle < 3:
            await asyncio.sleep(0.01)
        assert await priority("honest") == own  # in the fourth process, which the waiting question may not have
        assert len(pool._waiting) == 1
        for hog in hogs:
            hog.cancel()
        await asyncio.gather(*hogs, return_exceptions=True)

    asyncio.run(run_requests())
    pool.close()


@pytest.mark.parametrize("over", [True, False])
def test_a_client_over_its_share_is_refused_with_retry_after(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It learns when it will be within its share again, and its question ends. A client within its share gets its answer."""
    monkeypatch.setattr(module, "LONGEST_WAIT", 0.05)
    pool = ConfinedPool(width=1, shares=CpuShares(rate=0.1, clock=lambda: 0.0))
    pool.shares.charge("costly", 1.5 if over else 0.5)

    async def run_requests() -> Any:
        CLIENT.set("costly")
        try:
            return await pool.ask(task("work"), 0.2)
        except BusyError as error:
            return as_api_error(error)

    answer = asyncio.run(run_requests())
    if over:
        assert (answer.status, answer.retry_after) == (429, 5)  # 0.495 s over BURST, at 0.1 s of CPU time a second
        assert "used up its share of CPU time, and this one has waited 0.05 s; try again in 5 s" in answer.message
        until(lambda: not pool._working and not pool._waiting)
    else:
        assert isinstance(answer, int)
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no priority of threads, and no /proc")
@pytest.mark.parametrize("over", [True, False], ids=["over its share", "a long question"])
def test_idle_priority_is_of_all_threads_and_of_the_scheduling_group(over: bool) -> None:
    """Linux schedules a session as a group: the niceness of its threads alone leaves it the share of any other session."""
    pool = ConfinedPool(width=1, shares=CpuShares(rate=1e-9 if over else 1e9))
    pool.shares.charge("client", 10.0)

    async def run_requests() -> None:
        CLIENT.set("client")
        threaded = task("pid", argument="thread")
        process = Path(f"/proc/{await pool.ask(threaded, None)}")
        spinning = asyncio.ensure_future(pool.ask(task("spin", argument="thread", seconds=600.0), None))
        group = process / "autogroup"
        while group.exists() and not group.read_text().endswith("nice 19\n"):
            await asyncio.sleep(0.01)
        threads = [int(one.name) for one in (process / "task").iterdir()]
        assert len(threads) == 2
        assert {os.getpriority(os.PRIO_PROCESS, one) for one in threads} == {19}
        spinning.cancel()
        await asyncio.gather(spinning, return_exceptions=True)

    asyncio.run(run_requests())
    pool.close()


def test_the_start_of_a_process_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first question starts a process, which takes longer than the question: the client is charged for its question."""
    charged: list[float] = []

    class Recorded(CpuShares):
        def charge(self, client: str, seconds: float) -> None:
            charged.append(seconds)

    pool = ConfinedPool(width=1, shares=Recorded(rate=1.0))
    started: list[float] = []
    start = ConfinedProcess.start

    def timed(worker: ConfinedProcess) -> None:
        start(worker)
        started.append(worker.used)

    monkeypatch.setattr(ConfinedProcess, "start", timed)
    pool.run(task("echo"), 1)
    (worker,) = pool.workers
    assert charged[0] == pytest.approx(worker.used - started[0], abs=1e-3)
    assert charged[0] < started[0]
    pool.close()


def test_threads_get_their_own_answers(pool: ConfinedPool) -> None:
    answers: dict[int, Any] = {}

    def run_echo(number: int) -> None:
        answers[number] = pool.run(task("echo"), str(number) * 1000)

    threads = [threading.Thread(target=run_echo, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: str(number) * 1000 for number in range(16)}
