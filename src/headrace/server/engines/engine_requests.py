"""The requests of one replica: sent to its engine process, answered from its messages, and replayed if the process is lost."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import msgspec

from headrace.data.types import Delta
from headrace.server.engines.inflight import (
    EngineDownError,
    EngineLostError,
    InflightRequest,
    QuarantinedError,
    RequestRefusedError,
)
from headrace.server.engines.messages import Abort, Check, Checked, Deltas, FromEngine, Load, Loaded, Refused, Stats, Submit
from headrace.server.engines.quarantine import MOST_CRASHES, Quarantine, Suspect
from headrace.server.engines.replay import DivergedError, Rerun, resumes
from headrace.server.engines.replica import MOST_STARTS, Replica
from headrace.server.engines.supervision import State

log = logging.getLogger("headrace.server")

BANNED = f"the engine ended {MOST_CRASHES} times while it had this request, which is not tried again"
# States in which the process was lost. A process whose steps fail (FAILING) would fail the same requests again.
REPLAYED = (State.DEAD, State.STUCK)


class Observer(Protocol):
    """Receives the engine's events, for metrics."""

    def begin(self, loaded: Loaded) -> None: ...
    def step(self, message: Deltas, inflight: Mapping[str, InflightRequest]) -> None: ...
    def replay(self) -> None: ...
    def end(self, inflight: Mapping[str, InflightRequest]) -> None: ...


class EngineRequests:
    """One replica and its open requests. `AsyncLLM` owns it, and keeps the admission queue and the texts.

    open, stuck_after, load_timeout: as of `Replica`. quarantine: requests that were running at a crash, of all replicas.
    """

    def __init__(
        self, stuck_after: float, load_timeout: float, *, open: Callable[[], Awaitable[Load]], quarantine: Quarantine
    ) -> None:
        self.replica = Replica(stuck_after, load_timeout, open=open, ready=self.begin, take=self.take, lost=self.lose)
        self.quarantine = quarantine
        self.inflight: dict[str, InflightRequest] = {}  # by id; always this object
        self.stats = Stats()
        self.observer: Observer | None = None
        self._suspect: tuple[InflightRequest, Suspect] | None = None  # in the engine; at most one
        self._suspects: deque[tuple[InflightRequest, Suspect]] = deque()  # waiting for their turn
        self._checks: deque[asyncio.Future[str]] = deque()
        self._up = False  # whether a process has loaded the model
        self._bits = ""  # of the last process
        self._reruns: dict[str, Rerun] = {}

    # -- for AsyncLLM --------------------------------------------------------------------------------------------------
    def send(self, request: InflightRequest, suspect: Suspect | None) -> None:
        """Send a request to the engine. A suspect waits for its turn, any request for the process."""
        assert request.message is not None
        self.inflight[request.request_id] = request
        if suspect is None and self._up:
            self.replica.send(request.message)
        else:
            self._suspects.append((request, suspect or Suspect(ends=0, reached=-1, until=0.0)))
            self._send_suspect()

    def abort(self, request: InflightRequest) -> None:
        """End a request, if it is open; the engine frees its K/V blocks."""
        if self.inflight.pop(request.request_id, None) is None:
            return
        request.close()
        self._reruns.pop(request.request_id, None)
        if self.replica.pid is not None:
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
            self.observer.begin(loaded)
        if loaded.bits != self._bits:
            for request in [request for request, _ in self._suspects if request.generated]:
                self._fail_lost(request)
        self._up, self._bits = True, loaded.bits
        self._send_suspect()

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
            self.observer.step(message, self.inflight)
        for name, metrics in message.ended.items():
            if request := self.inflight.pop(name, None):
                self._reruns.pop(name, None)
                request.end(metrics)

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
        replays = self.replica.state in REPLAYED and self.replica.supervision.failed_starts < MOST_STARTS
        held = {request.request_id for request, _ in self._suspects}
        had = [request for request in self.inflight.values() if request.request_id not in held]
        self._suspect, self._reruns, self._up = None, {}, False
        if isinstance(error, EngineLostError):
            self.quarantine.ended_under((one.message, one.generated) for one in had if one.message is not None)
            for request in had:
                request.crashes += 1
                request.lost = error
        kept = [one for one in had if self._can_replay(one)] if replays else []
        if not replays:
            self._suspects.clear()
        # Requests that run again come last: the others wait until they are one token further than at the crash.
        for request in sorted(kept, key=_replay_order):
            request.replays += 1
            self._suspects.append((request, Suspect(request.crashes, request.generated, 0.0)))
        waiting = {request.request_id for request, _ in self._suspects}
        failed = [request for request in self.inflight.values() if request.request_id not in waiting]
        if had and isinstance(error, EngineLostError):
            log.warning("%d requests go on when the engine is ready, %d fail", len(kept), len(had) - len(kept))
        while self._checks:
            if not (checked := self._checks.popleft()).done():
                checked.set_exception(error)
        for request in failed:
            new = request.request_id in held and request.lost is None
            request.fail(EngineDownError(str(error), error.retry_after) if new else error)
            del self.inflight[request.request_id]
        self.stats = Stats()
        if self.observer is not None:
            self.observer.end(self.inflight)

    def _can_replay(self, request: InflightRequest) -> bool:
        """Whether a request may run in another process: after one crash, and either with the same bits or from its start."""
        assert request.message is not None
        record = self.quarantine.find(request.message)
        crashes = max(request.crashes, 0 if record is None else record.ends)
        return crashes < MOST_CRASHES and (not request.generated or bool(self._bits))

    def _send_suspect(self) -> None:
        """Send the next suspect, once the last one has ended or has more tokens than at its crash."""
        if not self._up:
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
