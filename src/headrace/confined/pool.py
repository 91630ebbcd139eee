"""A pool of confined processes for work whose cost a client chooses, for asyncio and for threads.

At normal priority, each client has a share of the CPU time.
"""

import asyncio
import functools
import hashlib
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace import host
from headrace.confined.process import ConfinedProcess, OverrunError, Task

__all__ = ["CLIENT", "BusyError", "ConfinedPool", "OverrunError", "Task", "shared_pool"]

WIDTH = 8  # processes with a question; long questions run at idle priority
IDLE = 4  # processes kept for the next question
MOST = 512  # waiting questions; one client may have as many as it leaves free, so half
REMEMBERED = 256  # answers kept
CLIENT: ContextVar[str] = ContextVar("CLIENT", default="")  # client of the current request; "": this program itself

SHARE = 0.03  # fraction of all processors for one client
BURST = 1.0  # seconds of CPU time that a client may use ahead of its share
FREE = 0.005  # seconds of each question that are not charged: templates of ordinary chats take less
LONGEST_WAIT = 60.0  # seconds of the clock for a question of a client over its share
CLIENTS = 4096  # above this number, clients without a debt are forgotten


@dataclass(eq=False, slots=True)
class CpuShares:
    """CPU time that clients have used beyond their share.

    Each client has a time until which its share is used up (generic cell rate algorithm, ATM Forum 1996). A client over its
    share is not refused: the pool runs its questions at idle priority, in three quarters of the processes. On a busy machine
    such a question may wait long; after `LONGEST_WAIT` the client learns when it will be within its share again.
    """

    rate: float = field(default_factory=lambda: SHARE * host.cores())  # seconds of CPU time a second
    clock: Callable[[], float] = time.monotonic
    _until: dict[str, float] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def charge(self, client: str, seconds: float) -> None:
        """Charge a client for `seconds` of CPU time. The empty name is this program itself, which has no limit."""
        if seconds <= FREE or not client:
            return
        with self._lock:
            now = self.clock()
            if len(self._until) >= CLIENTS:
                self._until = {name: until for name, until in self._until.items() if until > now}
            self._until[client] = max(now, self._until.get(client, now)) + (seconds - FREE) / self.rate

    def used_up(self, client: str) -> bool:
        """Return whether a client is over its share, including BURST."""
        return self.wait(client) > 0

    def wait(self, client: str) -> float:
        """Seconds until a client is within its share, including BURST; 0 if it is."""
        return max(0.0, self._until.get(client, 0.0) - self.clock() - BURST / self.rate)


class BusyError(Exception):
    """Too many questions wait, or one waited too long; ask again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(eq=False, slots=True)
class PendingTask:
    """A question that waits or runs."""

    task: Task
    frame: bytes
    client: str
    future: "Future[Any]" = field(default_factory=Future)
    idle: bool = False  # its client was over its share when the question began
    worker: ConfinedProcess | None = None
    gone: bool = False  # the caller was cancelled


class ConfinedPool:
    """Runs questions in at most `width` processes.

    The client with the fewest running questions comes next, and among those the one that was served longest ago. One client has
    three quarters of the processes at most. So have all clients over their share of CPU time together; their questions run at
    idle priority. A process loads one module and is kept for further questions; its end costs one question. Thread-safe; after
    a fork the new process starts its own.
    """

    def __init__(self, width: int = WIDTH, most: int = MOST, shares: CpuShares | None = None) -> None:
        self._width, self._each, self._most = width, max(1, width * 3 // 4), most
        self.shares = shares or CpuShares()
        self._begin()

    def _begin(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._threads = 0
        self._waiting: list[PendingTask] = []
        self._working: Counter[str] = Counter()  # running questions by client
        self._working_idle = 0  # running questions of clients over their share
        self._idle: list[ConfinedProcess] = []  # the most recently used one is last
        self._known: dict[bytes, Any] = {}
        self.workers: set[ConfinedProcess] = set()  # all processes
        self._end = weakref.finalize(self, _end_all, self.workers)

    def run(self, task: Task, question: Any) -> Any:
        """Run a question and return its answer; blocks the thread. Raises OverrunError."""
        job = self._put(task, question)
        try:
            return job.future.result()
        except BaseException:
            self._leave(job)
            raise

    async def ask(self, task: Task, question: Any) -> Any:
        """`run` for asyncio. Cancelling it ends the question, and its process if that has started.

        Raises OverrunError, and BusyError if too many questions wait or a client over its share has waited LONGEST_WAIT.
        """
        job = self._put(task, question, self._most)
        answer = asyncio.wrap_future(job.future)
        try:
            done, _ = await asyncio.wait([answer], timeout=LONGEST_WAIT)
            if not done and (rest := math.ceil(self.shares.wait(job.client))):
                used_up = "earlier requests of this client used up its share of CPU time"
                raise BusyError(f"{used_up}, and this one has waited {LONGEST_WAIT:g} s", rest)
            return await answer
        except (asyncio.CancelledError, BusyError):
            answer.cancel()
            self._leave(job)
            raise

    def close(self) -> None:
        """End all processes and their questions; the next question starts new ones."""
        with self._lock:
            idle, self._idle = self._idle, []
            self.workers.difference_update(idle)
            for worker in self.workers:
                worker.kill()
        for worker in idle:
            worker.end()

    def _put(self, task: Task, question: Any, most: float = float("inf")) -> PendingTask:
        # After a fork there are neither threads nor processes.
        if self._owner != os.getpid():
            self._end.detach()
            self._begin()
        frame = msgspec.msgpack.encode((task.function, task.seconds, task.memory, question))
        job = PendingTask(task, frame, CLIENT.get())
        with self._lock:
            if task.remembered and (known := self._known.get(_name(job))) is not None:
                job.future.set_result(known)
                return job
            own = sum(one.client == job.client for one in self._waiting)
            if own >= most - len(self._waiting):
                raise BusyError(f"{own} questions of this client wait, {len(self._waiting)} of all, and {most} may")
            self._waiting.append(job)
            if self._threads < self._width:
                self._threads += 1
                threading.Thread(target=self._serve, name="confined", daemon=True).start()
        return job

    def _serve(self) -> None:
        """Run questions until none may begin; the body of one thread."""
        while (job := self._next()) is not None:
            try:
                if job.future.set_running_or_notify_cancel():
                    job.future.set_result(self._answer(job))
            except BaseException as error:
                job.future.set_exception(error)
            finally:
                with self._lock:
                    self._working -= Counter([job.client])
                    self._working_idle -= job.idle

    def _next(self) -> PendingTask | None:
        with self._lock:
            may = [job for job in self._waiting if self._may_begin(job)]
            if not may:
                self._threads -= 1
                return None
            job = min(may, key=lambda job: self._working[job.client])
            self._waiting.remove(job)
            # The client's other questions move behind those of other clients.
            self._waiting.sort(key=lambda other: other.client == job.client)
            self._working[job.client] += 1
            job.idle = self.shares.used_up(job.client)
            self._working_idle += job.idle
            return job

    def _may_begin(self, job: PendingTask) -> bool:
        free = not self.shares.used_up(job.client) or self._working_idle < self._each
        return free and self._working[job.client] < self._each

    def _answer(self, job: PendingTask) -> Any:
        worker = self._worker(job)
        began: float | None = None
        try:
            worker.start()
            with self._lock:
                # A client that leaves during the start ends no process: its next question would start another one.
                if job.gone:
                    return None
                job.worker = worker
            # The start of the process is not charged to the client.
            began = worker.used
            answer = worker.ask(job.task, job.frame)
        except BaseException:
            worker.worn = True
            raise
        finally:
            if began is not None:
                self.shares.charge(job.client, worker.used - began)
            self._back(job, worker)
        if job.task.remembered:
            self._remember(_name(job), answer)
        return answer

    def _worker(self, job: PendingTask) -> ConfinedProcess:
        """Return an idle process for this question, or a new one. Raises OverrunError if none can be started."""
        kind = (job.task.module, job.task.argument, job.idle)
        with self._lock:
            fit = next((one for one in reversed(self._idle) if one.kind == kind and one.alive), None)
            if fit is not None:
                self._idle.remove(fit)
                return fit
        try:
            worker = ConfinedProcess(job.task, job.idle)
        except OSError as error:
            raise OverrunError(error.errno or 1) from None
        with self._lock:
            self.workers.add(worker)
        return worker

    def _back(self, job: PendingTask, worker: ConfinedProcess) -> None:
        """Keep a process for the next question, or end it if it is worn. Above IDLE kept processes the oldest ends."""
        with self._lock:
            job.worker = None
            if not worker.worn:
                self._idle.append(worker)
            old = [worker] if worker.worn else self._idle[: -IDLE or None]
            del self._idle[: -IDLE or None]
            self.workers.difference_update(old)
        for one in old:
            one.end()

    def _leave(self, job: PendingTask) -> None:
        """End a question whose caller was cancelled."""
        with self._lock:
            job.gone = True
            if job in self._waiting:
                self._waiting.remove(job)
            if not job.future.cancel() and job.worker is not None:
                job.worker.kill()

    def _remember(self, name: bytes, answer: Any) -> None:
        with self._lock:
            while len(self._known) >= REMEMBERED:
                del self._known[next(iter(self._known))]
            self._known[name] = answer


@functools.cache
def shared_pool() -> ConfinedPool:
    """The one pool of this process."""
    return ConfinedPool()


def _name(job: PendingTask) -> bytes:
    return hashlib.sha256(job.task.module.encode() + job.frame).digest()


def _end_all(workers: set[ConfinedProcess]) -> None:
    for worker in list(workers):
        worker.end()
