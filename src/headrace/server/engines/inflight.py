"""What a request in the engine process looks like from here: deltas as they arrive, then the end or an error."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence

import msgspec

from headrace.confined.pool import CLIENT
from headrace.data.params import SamplingParams
from headrace.data.plan import TokenLogprob
from headrace.data.types import Delta, RequestMetrics
from headrace.server.access.principals import PRINCIPAL
from headrace.server.access.queueing import AdmissionQueue
from headrace.server.engines.messages import Submit
from headrace.server.logs import HTTP_REQUEST

log = logging.getLogger("headrace.server")

RETRY_DOWN = 5  # seconds after which a restarted engine may be ready


class RequestRefusedError(ValueError):
    """A request that could never run; the message says what to change. `field` as of `data.fields.FieldError`."""

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
    """Wakes the one task that waits for inflight. An asyncio.Event for a single waiter, as every token passes here."""

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


class InflightRequest:
    """One request. `wakeup` is set whenever something came; inflight submitted together share it."""

    def __init__(
        self, request_id: str, prompt: list[int], params: SamplingParams, waiting: AdmissionQueue, wakeup: WakeupEvent
    ) -> None:
        self.request_id = request_id
        self.http_request = HTTP_REQUEST.get()
        self.principal = PRINCIPAL.get()
        self.client = CLIENT.get()
        self.turn = waiting.turn(self.client)  # it begins before those of its priority that have a later one
        self.prompt = prompt
        self.params = params
        self.wakeup = wakeup
        self.message: Submit | None = None  # what the engine is told
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.pooled: list[float] = []  # when it has ended, where an embedding was asked for
        self.classified: list[tuple[float, ...]] = []  # likewise, where a class was
        self.metrics: RequestMetrics | None = None  # when it has ended
        self.submitted = time.perf_counter()
        self.generated = 0  # tokens
        self.salted = False  # whether it shares cached prefixes with its own salt alone
        self.timer: asyncio.TimerHandle | None = None  # that ends it at its deadline
        self._waiting: AdmissionQueue | None = waiting
        self._deltas: list[Delta] = []
        self._error: Exception | None = None
        self._done = False

    @property
    def finished(self) -> bool:
        """Nothing will come, and everything was taken."""
        return self._done and not self._deltas and self._error is None

    def take(self) -> list[Delta]:
        """What has come since. Raises what ended it, once all before that was taken."""
        stream_deltas, self._deltas = self._deltas, []
        if not stream_deltas and self._error is not None:
            raise self._error
        return stream_deltas

    def give_back(self, delta: Delta) -> None:
        """What was taken is there again, as one piece."""
        self._deltas.insert(0, delta)

    # -- the engine's side ---------------------------------------------------------------------------------------------
    def put(self, delta: Delta) -> None:
        if self._waiting is not None:
            self._begin()
        if delta.error is not None and delta.constraint_failed:
            self._error = ConstraintFailedError(f"the constraint failed during generation: {delta.error}; make it smaller")
        elif delta.error is not None:
            log.error("request %s failed: %s", self.request_id, delta.error)
            self._error = RequestFailedError("the request failed in the engine; the server's log says how")
        else:
            self.generated += len(delta.token_ids)
            self._deltas.append(delta)
        self.wakeup.set()

    def end(self, metrics: RequestMetrics) -> None:
        self.metrics = metrics
        self.close()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.close()

    def close(self) -> None:
        """No delta comes any more."""
        self._begin()
        if self.timer is not None:
            self.timer.cancel()
        if not self._done:
            self.principal.use("tokens", self.generated)
        self._done = True
        self.wakeup.set()

    def _begin(self) -> None:
        """It waits no longer."""
        if self._waiting is not None:
            self._waiting.leave(len(self.prompt), self.principal.name, self.client, self.turn)
            self._waiting = None


async def stream_deltas(inflight: Sequence[InflightRequest]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of inflight submitted together as they come, each with its request's place. Raises what a request raises."""
    left = list(enumerate(inflight))
    while left:
        for place, request in left:
            while new := request.take():  # and once more: what ended it may have come together with the last
                for delta in new:
                    yield place, delta
        left = [one for one in left if not one[1].finished]
        if left:
            await inflight[0].wakeup.wait()


async def collect_answer(request: InflightRequest) -> Delta:
    """All of a request's only answer as one delta, which whoever takes next gets again. Raises what the request raises."""
    found = [delta async for _, delta in stream_deltas([request])]
    whole = msgspec.structs.replace(
        found[-1],
        token_ids=[token for delta in found for token in delta.token_ids],
        text="".join(delta.text for delta in found),
        logprobs=tuple(entry for delta in found for entry in delta.logprobs),
        exits=tuple(entry for delta in found for entry in delta.exits),
    )
    request.give_back(whole)
    return whole
