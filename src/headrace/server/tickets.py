"""What a request in the engine process looks like from here: deltas as they arrive, then the end or an error."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from headrace.params import SamplingParams
from headrace.server.queueing import Waiting
from headrace.types import Delta, RequestMetrics, TokenLogprob

log = logging.getLogger("headrace.server")


class RequestRefusedError(ValueError):
    """A request that could never run; the message says what to change."""


class RequestFailedError(RuntimeError):
    """This request failed in the engine; others go on."""


class EngineDownError(RuntimeError):
    """There is no engine to run the request, or it ended under it; the same request may succeed later."""


class DeadlineError(RuntimeError):
    """The request was not answered within its time."""


class Ticket:
    """One request. `news` is set whenever something came; tickets submitted together share it."""

    def __init__(
        self, request_id: str, prompt: list[int], params: SamplingParams, waiting: Waiting, news: asyncio.Event
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.news = news
        self.prompt_logprobs: list[TokenLogprob | None] = []
        self.pooled: list[float] = []  # when it has ended, where an embedding was asked for
        self.metrics: RequestMetrics | None = None  # when it has ended
        self.submitted = time.perf_counter()
        self.generated = 0  # tokens
        self.timer: asyncio.TimerHandle | None = None  # that ends it at its deadline
        self._waiting: Waiting | None = waiting
        self._deltas: deque[Delta] = deque()
        self._error: Exception | None = None
        self._done = False

    @property
    def finished(self) -> bool:
        """Nothing will come, and everything was taken."""
        return self._done and not self._deltas and self._error is None

    def take(self) -> list[Delta]:
        """What has come since. Raises what ended it, once all before that was taken."""
        deltas = list(self._deltas)
        self._deltas.clear()
        if not deltas and self._error is not None:
            raise self._error
        return deltas

    # -- the engine's side ---------------------------------------------------------------------------------------------
    def put(self, delta: Delta) -> None:
        self._begin()
        if delta.error is not None:
            log.error("request %s failed: %s", self.request_id, delta.error)
            self._error = RequestFailedError("the request failed in the engine; the server's log says how")
        else:
            self.generated += len(delta.token_ids)
            self._deltas.append(delta)
        self.news.set()

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
        self._done = True
        self.news.set()

    def _begin(self) -> None:
        """It waits no longer."""
        if self._waiting is not None:
            self._waiting.leave(len(self.prompt))
            self._waiting = None


async def deltas(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, Delta]]:
    """Deltas of tickets submitted together as they come, each with its ticket's place. Raises what a ticket raises."""
    news = tickets[0].news
    while True:
        news.clear()
        for place, ticket in enumerate(tickets):
            for delta in ticket.take():
                yield place, delta
        if all(ticket.finished for ticket in tickets):
            return
        await news.wait()
