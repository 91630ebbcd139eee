"""One supervised engine process: reports its events to the table of `supervision` and runs the resulting actions."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

from headrace.server.engines.engine_client import EngineConnection, EngineGoneError
from headrace.server.engines.inflight import EngineDownError, EngineLostError
from headrace.server.engines.messages import Deltas, FromEngine, Load, Loaded, NotLoaded, ToEngine
from headrace.server.engines.supervision import ENDS, FAILURES, Action, Event, State, Supervision, Transition

log = logging.getLogger("headrace.server")

MOST_STARTS = 3  # failed starts in a row after which requests that wait for the engine fail
LOOKS = 8  # checks for messages within the time after which an engine is stuck
Outcome = tuple[Event, str]  # the event that ended a process, and the reason


class Engine(Protocol):
    """An engine process as `Replica` uses it. The first message is Loaded or NotLoaded."""

    @property
    def pid(self) -> int | None: ...
    def send(self, message: ToEngine) -> None: ...
    async def receive(self) -> FromEngine: ...
    async def stop(self) -> None: ...
    async def kill(self) -> None: ...


class EngineLink(Protocol):
    """Starts an engine process that loads a model, or connects to one. Raises EngineGoneError, LoadError."""

    async def start(self, load: Load, /) -> Engine: ...


class LoadError(ValueError):
    """The model cannot be opened; the text is one line with what to change."""


class Replica:
    """An engine process that is kept running from `begin` to `close`.

    Callbacks: `open` returns the model to load (raises LoadError), `ready` receives Loaded, `take` every later message, `lost`
    the error of the requests that the process had, or that wait for the next one, `changed` is called after each event.
    `stuck_after`: seconds without a message after which the process is ended; `load_timeout`: seconds until it must be ready.
    `name`: for the log.
    """

    def __init__(
        self,
        stuck_after: float,
        load_timeout: float,
        *,
        open: Callable[[], Awaitable[Load]],
        ready: Callable[[Loaded], None],
        take: Callable[[FromEngine], None],
        lost: Callable[[EngineDownError], None],
        changed: Callable[[], None] = lambda: None,
        name: str = "",
    ) -> None:
        self.link: EngineLink = EngineConnection  # starts the process, or connects to one on another host
        self.most_starts = MOST_STARTS
        self.stuck_after = stuck_after
        self.load_timeout = load_timeout
        self.supervision = Supervision(name=name)
        self.loaded: Loaded | None = None
        self._open, self._ready, self._take, self._lost, self._report = open, ready, take, lost, changed
        self._process: Engine | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._messages = 0  # received
        self._changed = asyncio.Event()
        self._renewing = asyncio.Event()

    @property
    def state(self) -> State:
        return self.supervision.state

    @property
    def running(self) -> bool:
        """Whether the model is in memory, being loaded, or being started again."""
        return self._supervisor is not None and not self._supervisor.done()

    @property
    def pid(self) -> int | None:
        """Id of the engine process; None without one on this host."""
        return self._process.pid if self._process is not None else None

    @property
    def connected(self) -> bool:
        """Whether an engine can receive messages."""
        return self._process is not None

    @property
    def beat(self) -> float:
        """Seconds between two messages of an idle engine."""
        return min(1.0, self.stuck_after / LOOKS / 2)

    def begin(self) -> None:
        """Start loading, and return at once."""
        if not self.running and self._on(Event.BEGIN).action is Action.START:
            self._supervisor = asyncio.create_task(self._supervise())

    async def ready(self) -> None:
        """Wait until requests can be served, or are refused because the server shuts down. Raises LoadError if the model cannot
        be loaded."""
        while self.state not in (State.READY, State.DRAINING):
            if self.state is State.CLOSED:
                raise LoadError(self.supervision.detail)
            await self._changed.wait()

    def send(self, message: ToEngine) -> None:
        """Send a message. Raises EngineDownError if there is no process."""
        if self._process is None:
            raise self.supervision.refusal()
        self._process.send(message)

    def drain(self) -> None:
        """Accept no new requests from now on."""
        self._on(Event.DRAIN)

    async def renew(self) -> None:
        """Replace the process of a ready replica, and wait until the new one is ready or has failed to start. Requests that the
        process has are lost, as in a crash, but do not count as its cause."""
        if self.state is not State.READY:
            return
        restarts = self.supervision.restarts
        self._renewing.set()
        while not (self.supervision.restarts > restarts and self.state is State.READY):
            if self.supervision.failed_starts or self.state in (State.CLOSED, State.DRAINING):
                return
            await self._changed.wait()

    async def close(self) -> None:
        """End the process; its requests fail. `begin` starts another one."""
        self._on(Event.CLOSE)
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        process, self._process = self._process, None
        if process is not None:
            await process.stop()
        self.loaded = None

    async def _supervise(self) -> None:
        """Keep an engine process running until a transition demands none."""
        action = Action.START
        while action is Action.START:
            try:
                event, why = await self._run()
            except Exception:  # an error of this server must not leave a wrong state
                log.exception("the engine's messages could not be taken in")
                event, why = Event.GONE, "the server made a mistake with what the engine said"
            action = self._on(event, why).action
            process, self._process = self._process, None
            if process is not None:
                await process.kill()
            if action is Action.RESTART:
                await asyncio.sleep(self.supervision.pause)
                action = self._on(Event.RESUME).action

    async def _run(self) -> Outcome:
        """Start a process and pass on its messages; returns the event that ended the process."""
        try:
            async with asyncio.timeout(self.load_timeout):
                loaded = await self._load()
        except TimeoutError:
            return Event.LATE, f"the model was not loaded within {self.load_timeout:g} s"
        except LoadError as error:
            return Event.REFUSED, str(error)
        except EngineGoneError as error:
            return error.event, str(error)
        self.loaded = loaded
        self._ready(loaded)
        self._on(Event.LOADED)
        return await self._listen()

    async def _load(self) -> Loaded:
        """Start the process and wait until it has loaded the model. Raises LoadError, EngineGoneError."""
        self._process = await self.link.start(await self._open())
        message = await self._process.receive()
        if isinstance(message, NotLoaded):
            raise LoadError(message.reason)
        if not isinstance(message, Loaded):
            raise EngineGoneError("the engine process began with the wrong message")
        return message

    async def _listen(self) -> Outcome:
        """Pass on messages until the process ends, fails FAILURES steps in a row, or is silent for `stuck_after` seconds."""
        self._renewing.clear()
        waits = (self._receive(), self._wait_for_silence(), self._wait_for_renewal())
        tasks = {asyncio.create_task(wait) for wait in waits}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait_for_renewal(self) -> Outcome:
        await self._renewing.wait()
        return Event.RENEW, ""

    async def _receive(self) -> Outcome:
        assert self._process is not None
        try:
            while True:
                message = await self._process.receive()
                self._take(message)
                self._messages += 1
                if type(message) is Deltas and message.stats.failing >= FAILURES:
                    return Event.FAILED, f"{message.stats.failing} steps of the engine failed in a row"
        except EngineGoneError as error:
            return error.event, str(error)

    async def _wait_for_silence(self) -> Outcome:
        """Return after LOOKS checks without a new message. A machine that slept costs one check."""
        silent = 0
        while silent < LOOKS:
            before = self._messages
            await asyncio.sleep(self.stuck_after / LOOKS)
            silent = silent + 1 if self._messages == before else 0
        return Event.SILENT, f"the engine gave no sign of life for {self.stuck_after:g} s"

    def _on(self, event: Event, why: str = "") -> Transition:
        """Apply an event and wake the callers of `ready`."""
        transition = self.supervision.on(event, why)
        lost = transition.lost
        if lost is None and event in ENDS and self.supervision.failed_starts == self.most_starts:
            lost = EngineLostError
        if lost is not None:
            self._lost(self.supervision.refusal(lost))
        self._changed.set()
        self._changed = asyncio.Event()
        self._report()
        return transition
