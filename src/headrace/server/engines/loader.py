"""Loading models while requests wait for them, and unloading others to make room: one task, one load at a time."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping

from headrace.backends.memory import gib
from headrace.server.engines.async_llm import LoadError, QueueFullError
from headrace.server.engines.inflight import RETRY_DOWN
from headrace.server.engines.room import choose_victims
from headrace.server.engines.served_model import Residency, ServedModel, Ticket
from headrace.server.engines.throttle import Throttle
from headrace.server.http.api_error import MODEL_UNUSABLE, ApiError
from headrace.server.settings import Mode

log = logging.getLogger("headrace.server")

LOOK = 0.02  # seconds between two looks at models that finish their requests: the end of a stream sends no event
PROGRESS = 5.0  # seconds between two lines about a model that loads
MOST_STARTS = 3  # processes that may end while they load the model
NO_ROOM = "no_room"
BYE = "the server is shutting down"


class ModelLoader:
    """Loads and unloads the models of one server.

    Requests wait by model. The model whose first request waits longest is next; everything that waits for it is answered by one
    load. Which models make room: `room.choose_victims`. `budget`: bytes for models, None: no limit. `idle_unload`: seconds
    without requests after which a model that is not pinned is unloaded. `report` receives lines for the operator.
    """

    def __init__(self, entries: Mapping[str, ServedModel], budget: int | None, idle_unload: float | None) -> None:
        self.entries = entries
        self.budget = budget
        self.idle_unload = idle_unload
        self.report: Callable[[str], None] = log.info
        self._news = asyncio.Event()
        self._closing = False

    # -- for requests --------------------------------------------------------------------------------------------------
    async def enter(self, entry: ServedModel) -> None:
        """Count a request as a user of a model, after waiting until it is loaded. Raises ApiError, QueueFullError."""
        if not entry.answers:
            ticket = self._wait_for(entry)
            try:
                await ticket
            except asyncio.CancelledError:
                if ticket.done() and not ticket.cancelled() and ticket.exception() is None:
                    self.leave(entry)  # it was admitted in the same turn of the loop
                raise
        else:
            entry.users += 1
        entry.used = time.monotonic()

    def leave(self, entry: ServedModel) -> None:
        """End the use that `enter` has begun."""
        entry.users -= 1
        entry.used = time.monotonic()
        self._news.set()

    def _wait_for(self, entry: ServedModel) -> Ticket:
        if self._closing:
            raise ApiError(503, BYE, code="engine_unavailable", retry_after=RETRY_DOWN)
        self._check_pinned(entry)
        if (left := entry.retry - time.monotonic()) > 0:
            raise _unusable(left)
        entry.tickets = [one for one in entry.tickets if not one.done()]
        if len(entry.tickets) >= (most := entry.llm.queue.max_requests):
            raise QueueFullError(f"{most} requests wait until {entry.name} is loaded (--max-queued-requests)", RETRY_DOWN)
        if not entry.tickets:
            entry.since = time.monotonic()
        ticket: Ticket = asyncio.get_running_loop().create_future()
        entry.tickets.append(ticket)
        self._news.set()
        return ticket

    def _check_pinned(self, entry: ServedModel) -> None:
        """Raises ApiError if a model does not fit next to the pinned ones."""
        if (taken := self.pinned_next_to(entry)) and self.budget is not None:
            held = sum(one.size for one in taken)
            raise ApiError(
                503,
                f"{entry.name} takes {gib(entry.size)} and does not fit next to the pinned models "
                f"{', '.join(one.name for one in taken)} ({gib(held)} of {gib(self.budget)}); use one of these",
                code=NO_ROOM,
            )

    def pinned_next_to(self, entry: ServedModel) -> list[ServedModel]:
        """Return the pinned models next to which a model has no room; empty if it fits."""
        pinned = [one for one in self.entries.values() if one.mode is Mode.PINNED and one is not entry]
        fits = self.budget is None or min(entry.size, self.budget) + sum(one.size for one in pinned) <= self.budget
        return [] if fits else pinned

    # -- for the operator ----------------------------------------------------------------------------------------------
    async def load(self, entry: ServedModel) -> None:
        """Load a model as a request does, and return when it is loaded. Raises ApiError."""
        await self.enter(entry)
        self.leave(entry)

    async def unload(self, entry: ServedModel, reason: str, grace: float) -> None:
        """Unload a model when its requests have ended, or after `grace` seconds. Its pin is removed."""
        if entry.mode is Mode.PINNED:
            entry.mode = Mode.ON_DEMAND
        if not entry.in_memory:
            return
        entry.closing = True
        try:
            ends = time.monotonic() + grace
            while entry.busy and time.monotonic() < ends:
                await asyncio.sleep(LOOK)
            await self._unload(entry, reason)
        finally:
            entry.closing = False

    async def reload(self, entry: ServedModel, change: Callable[[], None]) -> None:
        """Change the settings of a model and load it again if it was in memory. Its requests end first, new ones wait."""
        was_loaded, entry.closing = entry.in_memory, True
        try:
            while entry.busy:
                await asyncio.sleep(LOOK)
            if was_loaded:
                await self._unload(entry, "operator")
            change()
        finally:
            entry.closing = False
            self._news.set()
        if was_loaded:
            await self.load(entry)

    # -- the task ------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Load what requests wait for and unload what is idle, until cancelled."""
        while True:
            self._news.clear()
            await self._unload_idle()
            waits = False
            if (entry := self._next()) is not None:
                if entry.answers:
                    entry.admit()
                    continue
                waits = not await self._make_room(entry)
                if not waits:
                    await self._load(entry)
                    continue
            # asyncio.wait_for would swallow a cancellation that comes together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK if waits else self._next_expiry()):
                    await self._news.wait()

    def stop(self) -> None:
        """Fail the waiting requests, and accept no more."""
        self._closing = True
        for entry in self.entries.values():
            entry.refuse(ApiError(503, BYE, code="engine_unavailable", retry_after=RETRY_DOWN))

    def _next(self) -> ServedModel | None:
        """The model whose first request waits longest."""
        for entry in self.entries.values():
            entry.tickets = [one for one in entry.tickets if not one.done()]
        return min((one for one in self.entries.values() if one.tickets), key=lambda one: one.since, default=None)

    async def _make_room(self, entry: ServedModel) -> bool:
        """Unload models until one fits; returns False if it must wait for the requests of others."""
        if entry.closing:
            return False
        if entry.in_memory:
            entry.yields = False  # the requests of the model to which it yielded have left
            return True
        others = [one for one in self.entries.values() if one.in_memory]
        now = time.monotonic()
        size = entry.size if self.budget is None else min(entry.size, self.budget)
        victims = [] if self.budget is None else choose_victims([one.resident for one in others], size, self.budget, now)
        names = {one.name for one in victims or ()}
        for one in others:
            one.yields = one.name in names and one.busy
        if victims is None or any(one.busy for one in victims):
            return False
        leaving = [one for one in others if one.name in names]
        for one in leaving:
            one.closing = True  # all of them first: closing one takes time, in which requests arrive
        for one in leaving:
            self.report(f"{one.name}: unloaded, makes room for {entry.name}")
            await self._unload(one, "room")
        return True

    async def _load(self, entry: ServedModel) -> None:
        """Load a model, and let its requests go on or fail."""
        if entry.residency is not Residency.LOADED:
            entry.begun = time.monotonic()
            self.report(f"{entry.name}: loading, {gib(entry.size)}; {_requests(len(entry.tickets))}")
            entry.llm.begin()
            try:
                await self._until_loaded(entry)
            except LoadError as error:
                await entry.llm.close()
                pause = entry.record_failure()
                entry.service.metrics.load_failures.inc()
                log.error("%s cannot be loaded: %s; the next request after %g s tries again", entry.name, error, pause)
                entry.refuse(_unusable(pause))
                return
            entry.record_load()
            seconds = entry.ready - entry.begun
            entry.service.metrics.load_seconds.observe(seconds)
            self.report(f"{entry.name}: loaded in {seconds:.1f} s, {gib(entry.size)}")
        entry.admit()

    async def _until_loaded(self, entry: ServedModel) -> None:
        """Wait until a model is loaded, and hold its process back while others answer. Raises LoadError."""
        ready, starts = asyncio.ensure_future(entry.llm.ready()), entry.llm.restarts
        others = [one for one in self.entries.values() if one is not entry]
        throttle = Throttle(entry.llm, [one.llm for one in others])
        reported = time.monotonic()
        try:
            while not ready.done():
                await throttle.turn(ready)
                if entry.llm.restarts - starts >= MOST_STARTS:
                    raise LoadError(f"{MOST_STARTS} processes ended while they loaded it: {entry.llm.detail}")
                if time.monotonic() - reported >= PROGRESS:
                    reported = time.monotonic()
                    self.report(f"{entry.name}: loading, {entry.progress:.0%}; {_requests(len(entry.tickets))}")
            await ready
        finally:
            throttle.release()
            ready.cancel()
            await asyncio.gather(ready, return_exceptions=True)

    async def _unload(self, entry: ServedModel, reason: str) -> None:
        entry.closing = True
        await entry.llm.close()
        entry.yields = entry.closing = False
        entry.service.metrics.unloaded.labels(entry.name, reason).inc()
        self._news.set()

    async def _unload_idle(self) -> None:
        if self.idle_unload is None:
            return
        before = time.monotonic() - self.idle_unload
        for entry in self.entries.values():
            if entry.busy:
                entry.used = time.monotonic()
            elif self._may_expire(entry) and entry.used <= before:
                self.report(f"{entry.name}: unloaded, {self.idle_unload:g} s without requests")
                await self._unload(entry, "idle")

    def _may_expire(self, entry: ServedModel) -> bool:
        return entry.mode is not Mode.PINNED and not entry.tickets and entry.residency is Residency.LOADED

    def _next_expiry(self) -> float | None:
        """Seconds until a model may have been idle for `idle_unload`; None if none expires."""
        if self.idle_unload is None:
            return None
        open_ended = [one for one in self.entries.values() if one.mode is not Mode.PINNED and one.residency is Residency.LOADED]
        if not open_ended:
            return None
        ends = [one.used + self.idle_unload for one in open_ended if not one.busy]
        # The end of a stream sends no event, so the time since the last request is known to a quarter of `idle_unload`.
        return max(LOOK, min([*ends, time.monotonic() + self.idle_unload / 4]) - time.monotonic())


def _requests(count: int) -> str:
    return "1 request waits" if count == 1 else f"{count} requests wait"


def _unusable(pause: float) -> ApiError:
    message = "the model cannot be loaded; see the server's log"
    return ApiError(503, message, code=MODEL_UNUSABLE, retry_after=max(1, math.ceil(pause)))
