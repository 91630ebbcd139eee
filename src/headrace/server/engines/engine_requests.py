"""The requests of one replica: sent to its engine process, and answered or failed from its messages."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from headrace.server.engines.inflight import EngineDownError, EngineLostError, InflightRequest, RequestRefusedError
from headrace.server.engines.messages import Abort, Check, Checked, Deltas, FromEngine, Load, Loaded, Refused, Stats
from headrace.server.engines.quarantine import Quarantine, Suspect
from headrace.server.engines.replica import Replica


class Observer(Protocol):
    """Receives the engine's events, for metrics."""

    def begin(self, loaded: Loaded) -> None: ...
    def step(self, message: Deltas, inflight: Mapping[str, InflightRequest]) -> None: ...
    def end(self) -> None: ...


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

    # -- for AsyncLLM --------------------------------------------------------------------------------------------------
    def send(self, request: InflightRequest, suspect: Suspect | None) -> None:
        """Send a request to the engine. A suspect waits for its turn. Raises EngineDownError if there is no process."""
        assert request.message is not None
        self.inflight[request.request_id] = request
        if suspect is None:
            self.replica.send(request.message)
        else:
            self._suspects.append((request, suspect))
            self._send_suspect()

    def abort(self, request: InflightRequest) -> None:
        """End a request, if it is open; the engine frees its K/V blocks."""
        if self.inflight.pop(request.request_id, None) is None:
            return
        request.close()
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
        """Receive the sizes of a process that is ready."""
        if self.observer is not None:
            self.observer.begin(loaded)

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
                request.end(metrics)

    def lose(self, error: EngineDownError) -> None:
        """Fail all open requests, and remember those that the engine had when it crashed."""
        held = {request.request_id for request, _ in self._suspects}
        if isinstance(error, EngineLostError):
            had = [request for request in self.inflight.values() if request.request_id not in held]
            self.quarantine.ended_under((one.message, one.generated) for one in had if one.message is not None)
        self._suspect, self._suspects = None, deque()
        while self._checks:
            if not (checked := self._checks.popleft()).done():
                checked.set_exception(error)
        for request in self.inflight.values():
            request.fail(EngineDownError(str(error), error.retry_after) if request.request_id in held else error)
        self.inflight.clear()
        self.stats = Stats()
        if self.observer is not None:
            self.observer.end()

    def _send_suspect(self) -> None:
        """Send the next quarantined request, once the last one has ended or has more tokens than at its crash."""
        if self._suspect is not None:
            request, suspect = self._suspect
            assert request.message is not None
            if request.request_id in self.inflight and request.generated <= suspect.reached:
                return
            if request.generated > suspect.reached or request.metrics is not None:
                self.quarantine.clear(request.message)
            self._suspect = None
        while self._suspects and self._suspect is None:
            request, suspect = self._suspects.popleft()
            if request.request_id in self.inflight and request.message is not None:
                self._suspect = request, suspect
                self.replica.send(request.message)
