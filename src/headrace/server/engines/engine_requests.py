"""The requests of one replica: sent to its engine process, answered from its messages, and replayed if the process is lost."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from headrace.data.types import Delta, RequestMetrics
from headrace.parallel.hosts.address import LOOPBACK, Address
from headrace.server.engines.inflight import (
    EngineDownError,
    EngineLostError,
    InflightRequest,
    QuarantinedError,
    RequestRefusedError,
)
from headrace.server.engines.messages import (
    Abort,
    Check,
    Checked,
    Deltas,
    Draining,
    FromEngine,
    Load,
    Loaded,
    Refused,
    Stats,
    Submit,
)
from headrace.server.engines.quarantine import MOST_CRASHES, Quarantine, Suspect
from headrace.server.engines.remote_engine import RemoteAddress
from headrace.server.engines.replay import DivergedError, Rerun, resumes
from headrace.server.engines.replica import Replica
from headrace.server.engines.supervision import State

log = logging.getLogger("headrace.server")

BANNED = f"the engine ended {MOST_CRASHES} times while it had this request, which is not tried again"
# States in which the process was lost. A process whose steps fail (FAILING) would fail the same requests again.
REPLAYED = (State.DEAD, State.STUCK)


class Observer(Protocol):
    """Receives the engine's events, for metrics."""

    def begin(self, loaded: Loaded, replica: int) -> None: ...
    def step(self, message: Deltas, inflight: Mapping[str, InflightRequest], replica: int) -> None: ...
    def replay(self) -> None: ...
    def route(self, replica: str, tokens: int, hit: int) -> None: ...
    def end(self, inflight: Mapping[str, InflightRequest], replica: int) -> None: ...


class Others(Protocol):
    """The other replicas of a model, for one of them."""

    def place(self, request: InflightRequest, bits: str) -> "EngineRequests | None": ...
    def began(self, engine: "EngineRequests") -> None: ...
    def ended(self, request: InflightRequest, metrics: RequestMetrics) -> None: ...
    def forget(self, engine: "EngineRequests") -> None: ...
    def changed(self) -> None: ...


class EngineRequests:
    """One replica and its open requests. `Replicas` owns it.

    number: of the replica, from 0; name: the same for the log, empty for a single engine. load: returns the message that loads
    the model there. stuck_after, load_timeout: as of `Replica`. Of all replicas: quarantine, requests that were running at a
    crash; inflight, the open requests by id; others.
    """

    def __init__(
        self,
        number: int,
        name: str,
        stuck_after: float,
        load_timeout: float,
        *,
        load: Callable[["EngineRequests"], Awaitable[Load]],
        quarantine: Quarantine,
        inflight: dict[str, InflightRequest],
        others: Others,
    ) -> None:
        self.number, self.name = number, name
        self.replica = Replica(
            stuck_after,
            load_timeout,
            open=lambda: load(self),
            ready=self.begin,
            take=self.take,
            lost=self.lose,
            changed=others.changed,
            name=name,
        )
        self.quarantine = quarantine
        self.inflight = inflight
        self.others = others
        self.resting = False  # gets no new requests, as it will be restarted
        self.stats = Stats()
        self.observer: Observer | None = None
        self._suspect: tuple[InflightRequest, Suspect] | None = None  # in the engine; at most one
        self._suspects: deque[tuple[InflightRequest, Suspect]] = deque()  # waiting for their turn
        self._checks: deque[asyncio.Future[str]] = deque()
        self.up = False  # whether a process has loaded the model
        self.bits = ""  # of the last process
        self._reruns: dict[str, Rerun] = {}

    @property
    def capacity(self) -> int:
        """Tokens of the K/V cache; 0 before the model is loaded."""
        loaded = self.replica.loaded
        return 0 if loaded is None else loaded.num_blocks * loaded.block_size

    @property
    def peer_address(self) -> str:
        """Where other replicas fetch K/V of this one; empty if they cannot."""
        loaded, link = self.replica.loaded, self.replica.link
        if loaded is None or not loaded.peer_port:
            return ""
        host = link.address.host if isinstance(link, RemoteAddress) else LOOPBACK
        return str(Address(host, loaded.peer_port))

    @property
    def open(self) -> list[InflightRequest]:
        """The open requests of this replica."""
        return [request for request in self.inflight.values() if request.engine is self]

    # -- for Replicas --------------------------------------------------------------------------------------------------
    def send(self, request: InflightRequest, suspect: Suspect | None) -> None:
        """Send a request to the engine. A suspect waits for its turn, any request for the process."""
        assert request.message is not None
        self.inflight[request.request_id] = request
        request.engine = self
        if suspect is None and self.up:
            self.replica.send(request.message)
        else:
            self._suspects.append((request, suspect or Suspect(ends=0, reached=-1, until=0.0)))
            self._send_suspect()

    def take_waiting(self) -> list[tuple[InflightRequest, Suspect]]:
        """Return and remove the requests that wait for a process."""
        waiting, self._suspects = list(self._suspects), deque()
        return [(request, suspect) for request, suspect in waiting if request.request_id in self.inflight]

    def hold(self, request: InflightRequest, suspect: Suspect) -> None:
        """Let a request wait for its turn in this replica."""
        request.engine = self
        self._suspects.append((request, suspect))
        self._send_suspect()

    def abort(self, request: InflightRequest) -> None:
        """End a request, if it is open; the engine frees its K/V blocks."""
        if self.inflight.pop(request.request_id, None) is None:
            return
        request.close()
        self._reruns.pop(request.request_id, None)
        if self.replica.connected:
            self.replica.send(Abort(request.request_id))
            self._send_suspect()

    async def check(self) -> str:
        """Check the accounts of the engine's K/V cache. Returns the problem, one line, or "". Raises EngineDownError."""
        self.replica.send(Check())
        checked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._checks.append(checked)
        return await checked

    # -- for the replica -----------------------------------------------------------------------------------------------
    def begin(self, loaded: Loaded) -> None:
        """Receive the sizes of a process that is ready, and send the requests that waited for it."""
        if self.observer is not None:
            self.observer.begin(loaded, self.number)
        if loaded.bits != self.bits:
            for request in [request for request, _ in self._suspects if request.generated]:
                self._fail_lost(request)
        self.up, self.bits, self.resting = True, loaded.bits, False
        self._send_suspect()
        self.others.began(self)

    def take(self, message: FromEngine) -> None:
        """Receive a message of the process."""
        if isinstance(message, Checked):
            checked = self._checks.popleft()
            if not checked.done():  # its caller was cancelled
                checked.set_result(message.problem)
        elif isinstance(message, Refused):
            request = self.inflight.pop(message.request_id, None)
            if request is not None:
                request.fail(RequestRefusedError(message.reason, message.field))
        elif isinstance(message, Deltas):
            self._take_step(message)
        elif isinstance(message, Draining):
            self.resting = True
        if self._suspect is not None:
            self._send_suspect()

    def _take_step(self, message: Deltas) -> None:
        self.stats = message.stats
        for name, logprobs in message.scores.items():
            if request := self.inflight.get(name):
                request.prompt_logprobs = logprobs
        if self._reruns:
            message.deltas = [rest for delta in message.deltas if (rest := self._undelivered(delta)) is not None]
        for delta in message.deltas:
            if request := self.inflight.get(delta.request_id):
                request.put(delta)
        for name, row in message.pooled.items():
            if request := self.inflight.get(name):
                request.pooled = row
        for name, logits in message.classified.items():
            if request := self.inflight.get(name):
                request.classified = logits
        if self.observer is not None:
            self.observer.step(message, self.inflight, self.number)
        for name, metrics in message.ended.items():
            if request := self.inflight.pop(name, None):
                self._reruns.pop(name, None)
                request.end(metrics)
                self.others.ended(request, metrics)

    def _undelivered(self, delta: Delta) -> Delta | None:
        """The part of a delta that the client lacks. A rerun with other tokens fails."""
        rerun, request = self._reruns.get(delta.request_id), self.inflight.get(delta.request_id)
        if rerun is None or request is None:
            return delta
        try:
            return rerun.undelivered(delta)
        except DivergedError:
            log.error("request %s gave other tokens when it ran again; it fails", request.request_id)
            self._fail_lost(request)
            return None

    def _fail_lost(self, request: InflightRequest) -> None:
        """End a request with the error of the crash that it cannot be replayed after."""
        assert request.lost is not None
        request.fail(request.lost)
        self.abort(request)

    def lose(self, error: EngineDownError) -> None:
        """Keep the requests that can be replayed, and fail the others. After a crash, remember those that the engine had."""
        waiting = self.take_waiting()
        held = {request.request_id for request, _ in waiting}
        had = [request for request in self.open if request.request_id not in held]
        self._suspect, self._reruns, self.up = None, {}, False
        crashed = isinstance(error, EngineLostError)
        if crashed:
            self.quarantine.ended_under((one.message, one.generated) for one in had if one.message is not None)
        for request in had:
            request.crashes += crashed
            request.lost = error
        resumed, moved = self._keep(had, waiting)
        waits = {request.request_id for request, _ in self._suspects}
        failed = [request for request in self.open if request.request_id not in waits]
        if had and (crashed or self.name):
            who = f"replica {self.name}: " if self.name else ""
            where = f", {moved} of them now on other replicas" if moved else ""
            log.warning("%s%d requests go on when the engine is ready%s, %d fail", who, resumed, where, len(had) - resumed)
        while self._checks:
            if not (checked := self._checks.popleft()).done():
                checked.set_exception(error)
        for request in failed:
            new = request.request_id in held and request.lost is None
            request.fail(EngineDownError(str(error), error.retry_after) if new else error)
            del self.inflight[request.request_id]
        self.stats = Stats()
        if self.observer is not None:
            self.observer.end(self.inflight, self.number)
        self.others.forget(self)

    def _keep(self, had: list[InflightRequest], waiting: list[tuple[InflightRequest, Suspect]]) -> tuple[int, int]:
        """Keep the requests that can go on: on another replica if one is ready, otherwise here.

        Returns the number of those that the process had, and of those on other replicas.
        """
        state = self.replica.state
        if state in (State.FAILING, State.CLOSED):
            return 0, 0
        replays = state in REPLAYED and self.replica.supervision.failed_starts < self.replica.most_starts
        resumed = moved = 0
        for request, suspect in waiting:
            other = self.others.place(request, self.bits)
            if other is not None or replays:
                (other or self).hold(request, suspect)
        # Requests that run again come last: the others wait until they are one token further than at the crash.
        for request in sorted(filter(self._can_replay, had), key=_replay_order):
            other = self.others.place(request, self.bits)
            if other is None and not replays:
                continue
            resumed, moved = resumed + 1, moved + (other is not None)
            request.replays += 1
            (other or self).hold(request, Suspect(request.crashes, request.generated, 0.0))
        return resumed, moved

    def _can_replay(self, request: InflightRequest) -> bool:
        """Whether a request may run in another process: after one crash, and either with the same bits or from its start."""
        assert request.message is not None
        record = self.quarantine.find(request.message)
        crashes = max(request.crashes, 0 if record is None else record.ends)
        return crashes < MOST_CRASHES and (not request.generated or bool(self.bits))

    def _send_suspect(self) -> None:
        """Send the next suspect, once the last one has ended or has more tokens than at its crash."""
        if not self.up:
            return
        if self._suspect is not None:
            request, suspect = self._suspect
            assert request.message is not None
            if request.request_id in self.inflight and request.generated <= suspect.reached:
                return
            if request.generated > suspect.reached or request.metrics is not None:
                self.quarantine.clear(request.message)
                request.crashes = 0
            self._suspect = None
        while self._suspects and self._suspect is None:
            request, suspect = self._suspects.popleft()
            if request.request_id not in self.inflight or request.message is None:
                continue
            record = self.quarantine.find(request.message)
            if record is not None and record.ends >= MOST_CRASHES:
                request.fail(QuarantinedError(BANNED))
                del self.inflight[request.request_id]
                continue
            self._suspect = request, suspect
            self.replica.send(self._replayed(request, request.message))

    def _replayed(self, request: InflightRequest, message: Submit) -> Submit:
        """The message of a request: after a crash it resumes after the delivered tokens, or runs again."""
        if request.replays and self.observer is not None:
            self.observer.replay()
        if not request.generated:
            return message
        if resumes(message):
            return msgspec.structs.replace(message, given=list(request.delivered[0].tokens))
        self._reruns[request.request_id] = Rerun(request.delivered)
        return message


def _replay_order(request: InflightRequest) -> tuple[bool, int, int]:
    assert request.message is not None
    return (not resumes(request.message), request.params.priority, request.turn)
