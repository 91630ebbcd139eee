"""What a request in the engine process looks like from here: deltas as they arrive, then the end or an error."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec

from headrace.confined.pool import CLIENT
from headrace.data.params import SamplingParams
from headrace.data.plan import TokenLogprob
from headrace.data.types import Delta, RequestMetrics
from headrace.server.access.principals import PRINCIPAL
from headrace.server.access.queueing import AdmissionQueue
from headrace.server.engines.messages import Submit
from headrace.server.engines.replay import Delivered
from headrace.server.engines.router import Route
from headrace.server.logs import HTTP_REQUEST

log = logging.getLogger("headrace.server")

RETRY_DOWN = 5  # seconds after which a restarted engine may be ready


class RequestRefusedError(ValueError):
    """A request that can never run; the message names the change that it needs. `field` as in `data.fields.FieldError`."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class RequestFailedError(RuntimeError):
    """This request failed in the engine; others go on."""


class EngineDownError(RuntimeError):
    """No engine runs, or it ended before the request did; the same request may succeed in `retry_after` seconds."""

    def __init__(self, reason: str, retry_after: int = RETRY_DOWN) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class EngineLostError(EngineDownError):
    """The engine ended while it had this request, which may be the cause."""


class QuarantinedError(RequestRefusedError):
    """The engine ended more than once while it had this request, which is not run again."""


class TooLongError(RequestRefusedError):
    """A prompt that the context does not hold."""


class ConstraintFailedError(RequestRefusedError):
    """The constraint of a request failed during generation."""


class DeadlineError(RuntimeError):
    """The request did not end before its deadline."""


class WakeupEvent:
    """A cheap asyncio.Event for one waiting task, as each token passes here."""

    __slots__ = ("_new", "_waiter")

    def __init__(self) -> None:
        self._new = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._new = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return once `set` was called since the last `wait`."""
        if not self._new:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._new = False


class RequestHolder(Protocol):
    """A replica that has requests."""

    number: int
    name: str

    def abort(self, request: "InflightRequest") -> None: ...


class InflightRequest:
    """A request in the engine or its queue, from submission to its end. `wakeup` is set at every change; requests submitted
    together share it."""

    def __init__(
        self, request_id: str, prompt: list[int], params: SamplingParams, waiting: AdmissionQueue, wakeup: WakeupEvent
    ) -> None:
        self.request_id = request_id
        self.http_request = HTTP_REQUEST.get()
        self.principal = PRINCIPAL.get()
        self.client = CLIENT.get()
        self.turn = waiting.turn(self.client)  # order among requests of one priority
        self.prompt = prompt
        self.params = params
        self.wakeup = wakeup
        self.message: Submit | None = None  # sent to the engine
        self.engine: RequestHolder | None = None  # the replica that has it
        self.chain: Sequence[bytes] = ()  # hashes of its prompt, for the router
        self.route: Route | None = None  # None: it was not routed
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.pooled: list[float] = []  # embedding, after the end
        self.classified: list[tuple[float, ...]] = []  # logits of each exit, after the end
        self.metrics: RequestMetrics | None = None  # after the end
        self.submitted = time.perf_counter()
        self.generated = 0  # tokens
        self.delivered: dict[int, Delivered] = {}  # by output, for a replay
        self.crashes = 0  # of its engine, since it last was one token further than at a crash
        self.replays = 0
        self.lost: Exception | None = None  # error of the last crash, if it cannot be replayed
        self.salted = False  # shares cached prefixes only with requests of its own salt
        self.timer: asyncio.TimerHandle | None = None  # ends it at its deadline
        self._waiting: AdmissionQueue | None = waiting
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._done = False

    @property
    def finished(self) -> bool:
        """Whether it has ended and all its deltas were taken."""
        return self._done and not self._deltas and self._error is None

    def take(self) -> list[Delta]:
        """Return the new deltas. Raises the error that ended the request, after all its deltas were taken."""
        stream_deltas, self._deltas = self._deltas, []
        if not stream_deltas and self._error is not None:
            raise self._error
        return stream_deltas

    def give_back(self, delta: Delta) -> None:
        """Put a delta back, in front of the others."""
        self._deltas.insert(0, delta)

    # -- for AsyncLLM ---------------------------------------------------------------------------------------------
    def put(self, delta: Delta) -> None:
        if self._waiting is not None:
            self._begin()
        if delta.error is not None and delta.constraint_failed:
            self._error = ConstraintFailedError(f"the constraint failed during generation: {delta.error}; make it smaller")
        elif delta.error is not None:
            log.error("request %s failed: %s", self.request_id, delta.error)
            self._error = RequestFailedError("the request failed in the engine; see the server's log")
        else:
            self.generated += len(delta.token_ids)
            delivered = self.delivered.get(delta.index)
            if delivered is None:
                delivered = self.delivered[delta.index] = Delivered()
            delivered.add(delta)
            self._deltas.append(delta)
        self.wakeup.set()

    def end(self, metrics: RequestMetrics) -> None:
        self.metrics = metrics
        self.close()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.close()

    def close(self) -> None:
        """End the request, also without metrics or an error: leave the queue, stop the deadline's timer, charge the tokens."""
        self._begin()
        if self.timer is not None:
            self.timer.cancel()
        if not self._done:
            self.principal.use("tokens", self.generated)
        self._done = True
        self.wakeup.set()

    def _begin(self) -> None:
        """Remove the request from the admission queue."""
        if self._waiting is not None:
            self._waiting.leave(len(self.prompt), self.principal.name, self.client, self.turn)
            self._waiting = None


async def stream_deltas(inflight: Sequence[InflightRequest]) -> AsyncIterator[tuple[int, Delta]]:
    """Yield the deltas of requests submitted together as they arrive, each with the index of its request. Raises the error of a
    request."""
    left = list(enumerate(inflight))
    while left:
        for place, request in left:
            while new := request.take():  # again: an error may have come with the last delta
                for delta in new:
                    yield place, delta
        left = [one for one in left if not one[1].finished]
        if left:
            await inflight[0].wakeup.wait()


async def collect_answer(request: InflightRequest) -> Delta:
    """Wait for the end of a request with one answer and return the answer as one delta, which `take` then returns again. Raises
    the error of the request."""
    deltas = [delta async for _, delta in stream_deltas([request])]
    whole = msgspec.structs.replace(
        deltas[-1],
        token_ids=[token for delta in deltas for token in delta.token_ids],
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        exits=tuple(entry for delta in deltas for entry in delta.exits),
    )
    request.give_back(whole)
    return whole
