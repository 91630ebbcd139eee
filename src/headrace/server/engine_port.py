"""An engine that serves front ends on other hosts: it listens for their links and passes messages on to its engine process.

Several fronts may be connected. Each link gives the ids of its requests a prefix of its own, so results of requests that were
sent over an earlier link never reach a later one. A front whose link ends loses its requests here; it sends them again, after
the tokens that it has, to another engine or over a new link.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace import __version__
from headrace.data.types import Delta
from headrace.parallel.hosts.address import Address
from headrace.parallel.hosts.link import Link, LinkError, Listener
from headrace.server.engines.inflight import EngineDownError
from headrace.server.engines.messages import (
    Abort,
    Check,
    Checked,
    Deltas,
    Draining,
    Ended,
    FrameError,
    FromEngine,
    Join,
    Load,
    Loaded,
    LossEvent,
    NotLoaded,
    PeerLink,
    Refused,
    Submit,
    ToEngine,
    encode,
    read_to_engine,
)
from headrace.server.engines.replica import LoadError, Replica
from headrace.server.engines.supervision import State
from headrace.startup.opening import open_files
from headrace.weights.digest import files_digest

log = logging.getLogger("headrace.engine")

# How a front lost the engine, by the state of its process.
EVENTS: dict[State, LossEvent] = {State.DEAD: "gone", State.STUCK: "silent", State.FAILING: "failed"}
LOOK = 0.05  # seconds between two looks at open requests while the engine drains
JOINS_WITHIN = 5.0  # seconds for the first message of a front


class Front:
    """One connected front end. prefix: of the engine's ids of its requests; requests: their ids without it."""

    def __init__(self, link: Link, prefix: str) -> None:
        self.link, self.prefix = link, prefix
        self.requests: set[str] = set()
        self.welcomed = False  # knows that the model is loaded

    def send(self, message: FromEngine) -> None:
        self.link.send(encode(message))

    def own(self, name: str) -> str:
        """The front's id of one of its requests."""
        return name[len(self.prefix) :]


class EnginePort:
    """An engine process with a listening socket. The process is started again when it ends or hangs.

    settings: arguments of `headrace.LLM`. grace: seconds for open requests after `stop`. peer_port: where the engine process
    listens for engines that fetch K/V from it, 0: a free port; None: it does not.
    """

    def __init__(
        self,
        model: str,
        settings: Mapping[str, Any],
        key: bytes,
        *,
        stuck_after: float = 60.0,
        load_timeout: float = 600.0,
        grace: float = 30.0,
        peer_port: int | None = None,
    ) -> None:
        self.model, self.settings, self.grace = model, {"preset": "online", **settings}, grace
        self.replica = Replica(
            stuck_after, load_timeout, open=self._open, ready=self._loaded, take=self._take, lost=self._lost, changed=self._wake
        )
        self._key, self._peer_port = key, peer_port
        self.listener = Listener(key, self._serve, lambda peer, why: log.warning("refused a connection: %s %s", peer, why))
        self.address: Address | None = None  # while it listens
        self.loaded = asyncio.Event()  # set when fronts are served
        self.draining = False
        self._files = ""  # digest of the model's files
        self._fronts: dict[str, Front] = {}  # by prefix
        self._numbers = itertools.count()
        self._checks: deque[Front] = deque()
        self._changed = asyncio.Event()

    async def run(self, address: Address, say: Callable[[str], None], stopped: asyncio.Event) -> None:
        """Serve until `stopped` is set. Raises LoadError if the model cannot be loaded, ValueError if the address is in use."""
        self.address = await self.listener.start(address)
        say(f"{self.model}: an engine on {self.address}; loading")
        self.replica.begin()
        stopping, ending = asyncio.create_task(stopped.wait()), asyncio.create_task(self._until_closed())
        try:
            ready = asyncio.create_task(self.replica.ready())
            await asyncio.wait({stopping, ending, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                await ready
                assert self.replica.loaded is not None
                self.loaded.set()
                say(f"ready: {self.replica.loaded.note}")
            else:
                ready.cancel()
            await asyncio.wait({stopping, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                raise LoadError(self.replica.supervision.detail)
            await self._drain()
        finally:
            for task in (stopping, ending):
                task.cancel()
            await self._end_links("was stopped by its operator")
            await self.listener.close()
            await self.replica.close()

    @property
    def open_requests(self) -> int:
        return sum(len(front.requests) for front in self._fronts.values())

    async def _until_closed(self) -> None:
        while self.replica.state is not State.CLOSED:
            await self._changed.wait()

    async def _drain(self) -> None:
        """Let open requests end within the grace period; fronts send no new ones if they have another engine."""
        self.draining = True
        for front in self._fronts.values():
            front.send(Draining())
        loop = asyncio.get_running_loop()
        ends = loop.time() + self.grace
        while self.open_requests and loop.time() < ends:
            await asyncio.sleep(LOOK)

    async def _end_links(self, why: str) -> None:
        fronts = list(self._fronts.values())
        for front in fronts:
            front.send(Ended(why))
        await asyncio.gather(*(front.link.flush() for front in fronts))

    # -- links ---------------------------------------------------------------------------------------------------------
    async def _serve(self, link: Link) -> None:
        """Serve one front until its link ends."""
        front = Front(link, f"{next(self._numbers)}:")
        try:
            async with asyncio.timeout(JOINS_WITHIN):
                joined = read_to_engine(await link.receive())
            if not isinstance(joined, Join):
                raise FrameError("its first message is not Join")
            if problem := await self._difference(joined):
                log.warning("refused the front %s: %s", link.peer, problem)
                front.send(NotLoaded(problem))
                await link.flush()
                return
            log.info("the front %s is connected", link.peer)
            self._fronts[front.prefix] = front
            self._welcome(front)
            while True:
                self._forward(front, read_to_engine(await link.receive()))
        except (LinkError, FrameError) as error:
            log.info("the front %s %s", link.peer, error)
        except TimeoutError:
            log.warning("the front %s sent no first message", link.peer)
        finally:
            self._forget(front)

    async def _difference(self, joined: Join) -> str:
        """Why a front cannot use this engine; empty if it can."""
        if joined.version != __version__:
            return f"runs Headrace {__version__} and the front {joined.version}; install the same version on both hosts"
        if joined.files != await self._files_digest():
            return f"has other files of the model {self.model} than the front; copy the same files to both hosts"
        return ""

    async def _files_digest(self) -> str:
        while not self._files:
            await self._changed.wait()
        return self._files

    def _welcome(self, front: Front) -> None:
        if self.replica.state is not State.READY or front.welcomed:
            return
        assert self.replica.loaded is not None
        front.send(self.replica.loaded)
        front.welcomed = True
        if self.draining:
            front.send(Draining())

    def _forward(self, front: Front, message: ToEngine) -> None:
        """Pass a front's message on to the engine process."""
        if self.replica.state is not State.READY:
            return  # the link is about to end, and the front sends its requests again
        if isinstance(message, Submit):
            front.requests.add(message.request_id)
            message.request_id = front.prefix + message.request_id
        elif isinstance(message, Abort):
            front.requests.discard(message.request_id)
            message.request_id = front.prefix + message.request_id
        elif isinstance(message, Check):
            self._checks.append(front)
        else:
            raise FrameError(f"sent {type(message).__name__}, which only the process of an engine receives")
        self.replica.send(message)

    def _forget(self, front: Front) -> None:
        """End the requests of a front that is gone."""
        if self._fronts.pop(front.prefix, None) is None:
            return
        with contextlib.suppress(EngineDownError):
            for name in front.requests:
                self.replica.send(Abort(front.prefix + name))

    # -- the engine process --------------------------------------------------------------------------------------------
    async def _open(self) -> Load:
        """The message that loads the model. Raises LoadError."""
        try:
            opened = await asyncio.to_thread(open_files, self.model)
            with contextlib.closing(opened.source):
                self._files = await asyncio.to_thread(files_digest, Path(opened.path))
        except (ValueError, OSError) as error:
            raise LoadError(" ".join(str(error).split())) from error
        self._wake()
        level = logging.getLogger("headrace.server").getEffectiveLevel()
        peers = None
        if self._peer_port is not None and self.address is not None:
            peers = PeerLink(self.address.host, self._peer_port, self._key)
        return Load(self.model, dict(self.settings), level, self.replica.beat, files=self._files, peers=peers)

    def _loaded(self, loaded: Loaded) -> None:
        """The process is ready; `_wake` tells the fronts."""

    def _wake(self) -> None:
        for front in self._fronts.values():
            self._welcome(front)
        self._changed.set()
        self._changed = asyncio.Event()

    def _take(self, message: FromEngine) -> None:
        """Pass a message of the process on to the fronts that it concerns."""
        if isinstance(message, Checked):
            self._checks.popleft().send(message)
        elif isinstance(message, Refused):
            if front := self._front_of(message.request_id):
                message.request_id = front.own(message.request_id)
                front.requests.discard(message.request_id)
                front.send(message)
        elif isinstance(message, Deltas):
            for prefix, part in self._parts(message).items():
                front = self._fronts[prefix]
                front.requests.difference_update(part.ended)
                front.send(part)

    def _front_of(self, name: str) -> Front | None:
        return self._fronts.get(name[: name.index(":") + 1])

    def _parts(self, message: Deltas) -> dict[str, Deltas]:
        """The part of a step's results that each front gets, by prefix. All get its statistics."""
        parts = {prefix: Deltas(stats=message.stats) for prefix, front in self._fronts.items() if front.welcomed}
        deltas: dict[str, list[Delta]] = {prefix: part.deltas for prefix, part in parts.items()}
        for delta in message.deltas:
            prefix, _, name = delta.request_id.partition(":")
            if (own := deltas.get(prefix + ":")) is not None:
                delta.request_id = name
                own.append(delta)
        for field in ("ended", "scores", "pooled", "classified"):
            for known, value in getattr(message, field).items():
                prefix, _, name = known.partition(":")
                if (part := parts.get(prefix + ":")) is not None:
                    getattr(part, field)[name] = value
        return parts

    def _lost(self, error: EngineDownError) -> None:
        """The process is lost: end the links, so that the fronts send the requests elsewhere."""
        event: LossEvent = EVENTS.get(self.replica.state, "cut")
        self._checks.clear()
        for front in self._fronts.values():
            front.send(Ended(f"is {self.replica.state} ({error})", event if front.welcomed else "cut"))
            front.requests.clear()
            asyncio.get_running_loop().call_soon(front.link.close)
