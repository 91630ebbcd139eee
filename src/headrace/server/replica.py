"""One supervised engine process: it is started, listened to, and started again when it dies or hangs."""

import asyncio
import contextlib
import enum
import logging
from collections.abc import Awaitable, Callable

from headrace.server.engine_client import EngineGoneError, EngineLink
from headrace.server.messages import FromEngine, Load, Loaded, NotLoaded, ToEngine
from headrace.server.tickets import EngineDownError, EngineLostError

log = logging.getLogger("headrace.server")

BACKOFF = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before each new attempt to start
LOOKS = 8  # at the engine, within the time after which it counts as stuck


class LoadError(ValueError):
    """The model cannot be opened; one line that says what to change."""


class State(enum.StrEnum):
    """What the engine is doing. Only READY and DRAINING have a process that answers."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DEAD = "dead"  # the process ended; it is being started again
    STUCK = "stuck"  # the process gave no sign of life and was ended; it is being started again
    CLOSED = "closed"


class Replica:
    """An engine process that is kept running from `begin` to `close`.

    `open` says what it is to load (raises LoadError), `ready` is told that it has, `take` gets all else that it says, `lost` is
    told why nothing more will come of what was sent to it. `stuck_after`: seconds without a sign of life after which it is
    ended.
    """

    def __init__(
        self,
        stuck_after: float,
        *,
        open: Callable[[], Awaitable[Load]],
        ready: Callable[[Loaded], None],
        take: Callable[[FromEngine], None],
        lost: Callable[[EngineDownError], None],
    ) -> None:
        self.link = EngineLink  # how the engine is run
        self.stuck_after = stuck_after
        self.backoff = BACKOFF
        self.state = State.CLOSED
        self.detail = ""  # why it is not ready: one line
        self.restarts = 0
        self.loaded: Loaded | None = None
        self._open, self._ready, self._take, self._lost = open, ready, take, lost
        self._process: EngineLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._draining = False
        self._heard = 0  # messages
        self._changed = asyncio.Event()

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
        if not self.running:
            self._become(State.LOADING, "the model is being loaded")
            self._supervisor = asyncio.create_task(self._supervise())

    async def ready(self) -> None:
        """Wait until requests can be served. Raises LoadError where that will never be."""
        while self.state not in (State.READY, State.DRAINING):
            if self.state is State.CLOSED:
                raise LoadError(self.detail)
            await self._changed.wait()

    def send(self, message: ToEngine) -> None:
        """Send a message. Raises EngineDownError where there is no process."""
        if self._process is None:
            raise EngineDownError(self.detail)
        self._process.send(message)

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._draining = True
        if self.state is State.READY:
            self._become(State.DRAINING, "the server is shutting down")

    async def close(self) -> None:
        """End the process; what was sent to it is lost. It can be started again."""
        self._become(State.CLOSED, "the server has shut down")
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        self._lost(EngineDownError(self.detail))
        if self._process is not None:
            await self._process.stop()
            self._process = None
        self.loaded = None

    async def _supervise(self) -> None:
        """Keep an engine process running until `close`."""
        failures = 0
        while True:
            try:
                await self._start()
                failures = 0
                await self._listen()
            except LoadError as error:
                if self.loaded is None:  # it never was ready: nothing will change by trying again
                    await self._bury()
                    self._become(State.CLOSED, str(error))
                    return
                log.error("%s", error)
                self._become(State.DEAD, "the model cannot be loaded again; the server's log says why")
            except EngineGoneError as error:
                self._become(State.DEAD, f"{error}; it is being started again")
            except TimeoutError:
                self._become(
                    State.STUCK, f"the engine gave no sign of life for {self.stuck_after:g} s; it is being started again"
                )
            await self._bury()
            await asyncio.sleep(self.backoff[min(failures, len(self.backoff) - 1)])
            failures += 1
            self.restarts += 1

    async def _start(self) -> None:
        """Start the process, and wait until it has loaded the model. Raises LoadError, EngineGoneError."""
        self._process = await self.link.start(await self._open())
        message = await self._process.receive()
        if isinstance(message, NotLoaded):
            raise LoadError(message.reason)
        if not isinstance(message, Loaded):
            raise EngineGoneError("the engine process began with the wrong message")
        self.loaded = message
        self._ready(message)
        self._become(State.DRAINING if self._draining else State.READY, self.detail if self._draining else "")

    async def _listen(self) -> None:
        """Hand out what the engine sends. Raises EngineGoneError, and TimeoutError when it has gone silent."""
        tasks = {asyncio.create_task(self._hear()), asyncio.create_task(self._watch())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self) -> None:
        assert self._process is not None
        while True:
            self._take(await self._process.receive())
            self._heard += 1

    async def _watch(self) -> None:
        """Raises TimeoutError after LOOKS looks at which nothing was heard since the last; a machine that slept costs one."""
        silent = 0
        while silent < LOOKS:
            heard = self._heard
            await asyncio.sleep(self.stuck_after / LOOKS)
            silent = silent + 1 if self._heard == heard else 0
        raise TimeoutError

    async def _bury(self) -> None:
        """All that was sent to the process is lost, and nothing of it is left."""
        self._lost(EngineLostError(self.detail))
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    def _become(self, state: State, detail: str) -> None:
        if state is not self.state:
            level = logging.WARNING if state in (State.DEAD, State.STUCK) else logging.INFO
            log.log(level, "%s%s", state.value, f": {detail}" if detail else "")
        self.state, self.detail = state, detail
        self._changed.set()
        self._changed = asyncio.Event()
