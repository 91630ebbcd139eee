"""One supervised engine process: what happens to it goes into the table of `supervision`, and what that says is done."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from headrace.server.engines.engine_client import EngineConnection, EngineGoneError
from headrace.server.engines.inflight import EngineDownError
from headrace.server.engines.messages import Deltas, FromEngine, Load, Loaded, NotLoaded, ToEngine
from headrace.server.engines.supervision import FAILURES, Action, Event, State, Supervision, Transition

log = logging.getLogger("headrace.server")

LOOKS = 8  # at the engine, within the time after which it counts as stuck
Outcome = tuple[Event, str]  # and why


class LoadError(ValueError):
    """The model cannot be opened; one line that says what to change."""


class Replica:
    """An engine process that is kept running from `begin` to `close`.

    `open` says what it is to load (raises LoadError), `ready` is told that it has, `take` gets all else that it says, `lost` is
    told why nothing more will come of what was sent to it. `stuck_after`: seconds without a sign of life after which it is
    ended; `load_timeout`: seconds within which it has to be ready.
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
    ) -> None:
        self.link = EngineConnection  # how the engine is run
        self.stuck_after = stuck_after
        self.load_timeout = load_timeout
        self.supervision = Supervision()
        self.loaded: Loaded | None = None
        self._open, self._ready, self._take, self._lost = open, ready, take, lost
        self._process: EngineConnection | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._heard = 0  # messages
        self._changed = asyncio.Event()

    @property
    def state(self) -> State:
        return self.supervision.state

    @property
    def running(self) -> bool:
        """Whether the model is in memory, being loaded, or being started again."""
        return self._supervisor is not None and not self._supervisor.done()

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return self._process.pid if self._process is not None else None

    @property
    def beat(self) -> float:
        """Seconds between two signs of life of an idle engine."""
        return min(1.0, self.stuck_after / LOOKS / 2)

    def begin(self) -> None:
        """Start loading, and return at once."""
        if not self.running and self._on(Event.BEGIN).action is Action.START:
            self._supervisor = asyncio.create_task(self._supervise())

    async def ready(self) -> None:
        """Wait until requests can be served, or are refused because the server shuts down. Raises LoadError where that will
        never be."""
        while self.state not in (State.READY, State.DRAINING):
            if self.state is State.CLOSED:
                raise LoadError(self.supervision.detail)
            await self._changed.wait()

    def send(self, message: ToEngine) -> None:
        """Send a message. Raises EngineDownError where there is no process."""
        if self._process is None:
            raise self.supervision.refusal()
        self._process.send(message)

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._on(Event.DRAIN)

    async def close(self) -> None:
        """End the process; what was sent to it is lost. It can be started again."""
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
        """Keep an engine process running until the table says that there is to be none."""
        action = Action.START
        while action is Action.START:
            try:
                event, why = await self._run()
            except Exception:  # a mistake of ours must not leave a state that is not so
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
        """Start a process and listen to it; what ended it."""
        try:
            async with asyncio.timeout(self.load_timeout):
                loaded = await self._load()
        except TimeoutError:
            return Event.LATE, f"the model was not loaded within {self.load_timeout:g} s"
        except LoadError as error:
            return Event.REFUSED, str(error)
        except EngineGoneError as error:
            return Event.GONE, str(error)
        self.loaded = loaded
        self._ready(loaded)
        self._on(Event.LOADED)
        return await self._listen()

    async def _load(self) -> Loaded:
        """Start the process, and wait until it has loaded the model. Raises LoadError, EngineGoneError."""
        self._process = await self.link.start(await self._open())
        message = await self._process.receive()
        if isinstance(message, NotLoaded):
            raise LoadError(message.reason)
        if not isinstance(message, Loaded):
            raise EngineGoneError("the engine process began with the wrong message")
        return message

    async def _listen(self) -> Outcome:
        """Hand out what the engine sends, until something ends that."""
        tasks = {asyncio.create_task(self._hear()), asyncio.create_task(self._watch())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self) -> Outcome:
        assert self._process is not None
        try:
            while True:
                message = await self._process.receive()
                self._take(message)
                self._heard += 1
                if type(message) is Deltas and message.stats.failing >= FAILURES:
                    return Event.FAILED, f"{message.stats.failing} steps of the engine failed in a row"
        except EngineGoneError as error:
            return Event.GONE, str(error)

    async def _watch(self) -> Outcome:
        """Ends after LOOKS looks at which nothing was heard since the last; a machine that slept costs one."""
        silent = 0
        while silent < LOOKS:
            heard = self._heard
            await asyncio.sleep(self.stuck_after / LOOKS)
            silent = silent + 1 if self._heard == heard else 0
        return Event.SILENT, f"the engine gave no sign of life for {self.stuck_after:g} s"

    def _on(self, event: Event, why: str = "") -> Transition:
        """Take in what happened, and tell those who wait."""
        row = self.supervision.on(event, why)
        if row.lost is not None:
            self._lost(self.supervision.refusal(row.lost))
        self._changed.set()
        self._changed = asyncio.Event()
        return row
