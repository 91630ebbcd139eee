"""The replicas of one model: several engine processes behind one queue, with one state.

The model is ready while any replica is. A router chooses the replica of a request. A replica that is lost hands its requests
to the others; they resume there if both have the same digest of bits.
"""

import asyncio
import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from headrace import host
from headrace.data.settings import RoutePolicy
from headrace.data.types import RequestMetrics
from headrace.server.engines.engine_requests import EngineRequests, Observer
from headrace.server.engines.inflight import EngineDownError, InflightRequest
from headrace.server.engines.messages import Load, Loaded
from headrace.server.engines.quarantine import Quarantine, Suspect
from headrace.server.engines.remote_engine import RemoteAddress
from headrace.server.engines.replica import MOST_STARTS, LoadError
from headrace.server.engines.router import ReplicaLoad, Router, entries
from headrace.server.engines.supervision import State

log = logging.getLogger("headrace.server")

# The state of a model is the first of these that one of its replicas has.
STATES = (State.READY, State.DRAINING, State.LOADING, State.FAILING, State.STUCK, State.DEAD, State.CLOSED)
LOOK = 0.02  # seconds between two looks at open requests
# Seconds before each new connection to a lost engine on another host, and the failed ones in a row (about 30 s) after which
# the requests that wait for it fail.
CONNECT_PAUSES = (0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 5.0, 5.0, 5.0, 10.0)
MOST_CONNECTS = 12


class Replicas:
    """All replicas of one model. `AsyncLLM` owns it.

    count: of replicas, 1 or more; they divide the processors. remote: engines on other hosts, which replace those of this one.
    open: returns the message that loads the model in a replica.
    route: policy of the router. peers: replicas fetch K/V from each other. stuck_after, load_timeout, quarantine: as of
    `EngineRequests`.
    """

    def __init__(
        self,
        count: int,
        stuck_after: float,
        load_timeout: float,
        *,
        open: Callable[[EngineRequests], Awaitable[Load]],
        quarantine: Quarantine,
        route: RoutePolicy = "affinity",
        remote: Sequence[RemoteAddress] = (),
        peers: bool = False,
    ) -> None:
        self.remote = remote
        self.inflight: dict[str, InflightRequest] = {}  # by id; always this object
        self.router = Router(route, peers=peers)
        self._changed = asyncio.Event()
        self._beginning: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None
        more: dict[str, Any] = {"load": open, "quarantine": quarantine, "inflight": self.inflight, "others": self}
        self._make = lambda number, name: EngineRequests(number, name, stuck_after, load_timeout, **more)
        self._numbers = itertools.count()
        self._leaving: set[asyncio.Task[None]] = set()
        self._observer: Observer | None = None
        names = [""] if count == 1 else [str(number) for number in range(count)]
        if remote:
            self.engines = [self._connected(one) for one in remote]
        else:
            self.engines = [self._make(next(self._numbers), name) for name in names]

    def _connected(self, remote: RemoteAddress) -> EngineRequests:
        """A new replica for an engine on another host."""
        engine = self._make(next(self._numbers), str(remote.address))
        engine.replica.link, engine.replica.most_starts = remote, MOST_CONNECTS
        engine.replica.supervision.pauses = CONNECT_PAUSES
        engine.observer = self._observer
        return engine

    def use(self, remote: Sequence[RemoteAddress]) -> None:
        """Use these engines on other hosts from now on. Requests of the others end there, or go on in these."""
        if not remote:
            return
        known, wanted = {str(one.address): one for one in self.remote}, {str(one.address): one for one in remote}
        self.remote = remote
        for engine in [one for one in self.engines if one.name not in wanted]:
            engine.resting = True
            self.engines.remove(engine)
            task = asyncio.create_task(self._leave(engine))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
        for name in wanted.keys() - known.keys():
            engine = self._connected(wanted[name])
            self.engines.append(engine)
            engine.replica.begin()

    async def _leave(self, engine: EngineRequests) -> None:
        """Close the link to an engine once its requests have ended or its process is lost."""
        while engine.open and engine.up:
            await asyncio.sleep(LOOK)
        for request, suspect in engine.take_waiting():
            self._leading.hold(request, suspect)
        await engine.replica.close()

    # -- state ---------------------------------------------------------------------------------------------------------
    @property
    def _leading(self) -> EngineRequests:
        """The replica that decides the state."""
        return min(self.engines, key=lambda engine: STATES.index(engine.replica.state))

    @property
    def state(self) -> State:
        return self._leading.replica.state

    @property
    def detail(self) -> str:
        """Why the model is not ready: one line."""
        return self._leading.replica.supervision.detail

    def refusal(self) -> EngineDownError:
        """Return the error of requests in the current state."""
        return self._leading.replica.supervision.refusal()

    @property
    def running(self) -> bool:
        """Whether the model is in memory, being loaded, or being started again."""
        return any(engine.replica.running for engine in self.engines)

    @property
    def loaded(self) -> Loaded | None:
        """Sizes of the model, once a replica has loaded it."""
        return next((engine.replica.loaded for engine in self.engines if engine.replica.loaded is not None), None)

    @property
    def reconnecting(self) -> bool:
        """Whether the engines are on other hosts and a lost one may be back in a moment, so that new requests wait for it."""
        failed = self._leading.replica.supervision.failed_starts
        return bool(self.remote) and self.state is State.DEAD and failed < MOST_STARTS

    def states(self) -> dict[str, str]:
        """Return the state of each replica, with its reason if it is not ready; empty for a single engine."""
        named = {engine.name: engine.replica.supervision for engine in self.engines if engine.name}
        return {name: f"{one.state}: {one.detail}" if one.detail else str(one.state) for name, one in named.items()}

    def processors(self, number: int) -> list[int]:
        """The processors of a replica: an equal part of this process's, of one memory node if possible; one that others have,
        too, if there are too few."""
        have, count = host.processors_by_node(), len(self.engines)
        if count == 1:
            return []
        return have[len(have) * number // count : len(have) * (number + 1) // count] or [have[number % len(have)]]

    # -- for AsyncLLM --------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Start loading, and return at once. The other replicas of this host load after the first one, whose weights they can
        use."""
        if self.remote:
            for engine in self.engines:
                engine.replica.begin()
            return
        self.engines[0].replica.begin()
        if len(self.engines) > 1 and self._beginning is None:
            if len(self.engines) > host.cores():
                text = "%d replicas share %d cores and wait for each other; fewer are faster"
                log.warning(text, len(self.engines), host.cores())
            self._beginning = asyncio.create_task(self._begin_others())

    async def _begin_others(self) -> None:
        with contextlib.suppress(LoadError):  # `ready` raises it
            await self.engines[0].replica.ready()
            for engine in self.engines[1:]:
                if self.engines[0].replica.state is State.DRAINING:
                    return
                engine.replica.begin()
                try:
                    await engine.replica.ready()
                except LoadError as error:
                    log.error("replica %s cannot be loaded, and the others go on: %s", engine.name, error)

    async def ready(self) -> None:
        """Wait until requests can be served, or are refused because the server shuts down. Raises LoadError."""
        while (state := self.state) not in (State.READY, State.DRAINING):
            if state is State.CLOSED:
                raise LoadError(self.detail)
            await self._changed.wait()

    def send(self, request: InflightRequest, suspect: Suspect | None) -> None:
        """Send a request to the replica of least predicted cost. If none is ready it waits for one."""
        message = request.message
        assert message is not None
        engine = self._leading
        if len(self.engines) > 1:
            if message.source is not None:
                # All requests of one window go to the replica that has encoded it.
                request.chain = [message.source.digest]
            elif not message.pool and message.rule is None:
                request.chain = entries(message.prompt, message.salt)
            engine = self._route(request, self._open_engines()) or engine
            if request.route is not None and engine.observer is not None:
                engine.observer.route(engine.name, len(request.prompt), request.route.hit)
        engine.send(request, suspect)

    def observe(self, observer: Observer) -> None:
        """Report the events of all replicas."""
        self._observer = observer
        for engine in self.engines:
            engine.observer = observer

    def abort(self, request: InflightRequest) -> None:
        """End a request, if it is open; the engine frees its K/V blocks."""
        if request.engine is not None:
            request.engine.abort(request)

    async def check(self) -> str:
        """Check the accounts of all K/V caches. Returns the first problem, one line, or "". Raises EngineDownError."""
        engines = [engine for engine in self.engines if engine.up] or self.engines[:1]
        return next(filter(None, await asyncio.gather(*(engine.check() for engine in engines))), "")

    def drain(self) -> None:
        """Accept no new requests from now on."""
        for engine in self.engines:
            engine.replica.drain()

    async def close(self) -> None:
        """End all processes; their requests fail. `begin` starts them again."""
        for task in (self._beginning, self._renewing, *self._leaving):
            if task is not None:
                task.cancel()
        self._beginning = self._renewing = None
        await asyncio.gather(*(engine.replica.close() for engine in self.engines))

    def renew(self, grace: float) -> None:
        """Replace the processes one after the other, and return at once. grace: seconds for the requests of a process to end;
        those left resume on another replica, or in the new process."""
        if self.remote:
            log.warning("engines on other hosts are restarted there, one after the other: SIGTERM, then start them again")
        elif self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew(grace))

    async def _renew(self, grace: float) -> None:
        loop = asyncio.get_running_loop()
        if self._beginning is not None and not self._beginning.done():
            await asyncio.wait([self._beginning])
        for engine in self.engines:
            if engine.replica.state is not State.READY:
                continue  # it is being started again anyway
            engine.resting = True
            try:
                ends = loop.time() + grace
                while engine.open and loop.time() < ends and self._can_wait(engine):
                    await asyncio.sleep(LOOK)
                await engine.replica.renew()
            finally:
                engine.resting = False
            if engine.replica.state is not State.READY:
                log.error("the new process of replica %d is not ready; no other replica is restarted", engine.number)
                return

    def _can_wait(self, engine: EngineRequests) -> bool:
        """Whether the requests of a replica should end before its restart: new ones go elsewhere, or these cannot resume."""
        return engine not in self._open_engines() or not engine.bits

    # -- for the replicas ----------------------------------------------------------------------------------------------
    def changed(self) -> None:
        """Wake the callers of `ready`."""
        self._changed.set()
        self._changed = asyncio.Event()

    def place(self, request: InflightRequest, bits: str) -> EngineRequests | None:
        """Return the replica for a request of one that is lost; None if no ready one can resume it. bits: of the lost one."""
        return self._route(request, [one for one in self._open_engines() if not request.generated or one.bits == bits])

    def began(self, engine: EngineRequests) -> None:
        """Give a replica that is ready the requests that wait for others that are not."""
        for other in self.engines:
            for request, suspect in other.take_waiting() if not other.up else ():
                fits = not request.generated or other.bits == engine.bits
                (engine if fits else other).hold(request, suspect)

    def ended(self, request: InflightRequest, metrics: RequestMetrics) -> None:
        """Correct the router by a request that has ended."""
        if request.route is None or request.replays:
            return
        cached = min(metrics.cached_tokens, len(request.prompt))
        self.router.answered(request.route, cached)
        if metrics.scheduled is not None and metrics.first_token is not None:
            seconds = metrics.first_token - metrics.scheduled
            self.router.learn(len(request.prompt) - cached, seconds, request.generated)

    def forget(self, engine: EngineRequests) -> None:
        """Forget what a replica had in its K/V cache."""
        self.router.forget(engine.name)

    # -- routing -------------------------------------------------------------------------------------------------------
    def _open_engines(self) -> list[EngineRequests]:
        """The replicas for requests: those with a process, without the one that will be restarted if there is another."""
        up = [engine for engine in self.engines if engine.up]
        return [engine for engine in up if not engine.resting] or up

    def _route(self, request: InflightRequest, engines: list[EngineRequests]) -> EngineRequests | None:
        if not engines:
            return None
        route = self.router.pick(request.chain, len(request.prompt), self._loads(engines))
        assert route is not None
        request.route = route
        if self.router.peers and request.message is not None:
            by_name = {engine.name: engine for engine in engines}
            holder, chosen = by_name.get(route.holder), by_name[route.replica]
            address = "" if holder is None or holder.bits != chosen.bits else holder.peer_address
            request.message.peer, request.message.peer_tokens = address, route.held if address else 0
        return next(engine for engine in engines if engine.name == route.replica)

    def _loads(self, engines: list[EngineRequests]) -> dict[str, ReplicaLoad]:
        queued: Counter[str] = Counter()
        running: Counter[str] = Counter()
        for request in self.inflight.values():
            if request.engine is None:
                continue
            if request.generated:
                running[request.engine.name] += request.params.n
            else:
                hit = 0 if request.route is None else request.route.hit
                queued[request.engine.name] += max(1, len(request.prompt) - hit)
        return {one.name: ReplicaLoad(queued[one.name], running[one.name], one.capacity) for one in engines}
