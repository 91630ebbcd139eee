"""What a request in the engine process looks like from here: deltas as they arrive, then the end or an error."""

import asyncio
import logging
import time
from collections import deque
from typing import Self

from headrace.params import SamplingParams
from headrace.server.queueing import Waiting
from headrace.types import Delta, RequestMetrics, TokenLogprob

log = logging.getLogger("headrace.server")


class RequestRefused(ValueError):
    """A request that could never run; the message says what to change."""


class RequestFailed(RuntimeError):
    """This request failed in the engine; others go on."""


class EngineDown(RuntimeError):
    """There is no engine to run the request, or it ended under it; the same request may succeed later."""


class Ticket:
    """One request. Iterating gives its deltas; it raises RequestRefused, RequestFailed or EngineDown."""

    def __init__(self, request_id: str, prompt: list[int], params: SamplingParams, waiting: Waiting) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.prompt_logprobs: list[TokenLogprob | None] | None = None
        self.metrics: RequestMetrics | None = None  # when it has ended
        self.submitted = time.perf_counter()
        self._waiting: Waiting | None = waiting
        self._deltas: deque[Delta] = deque()
        self._error: Exception | None = None
        self._done = False
        self._news = asyncio.Event()

    def put(self, delta: Delta) -> None:
        self._begin()
        if delta.error is not None:
            log.error("request %s failed: %s", self.request_id, delta.error)
            self._error = RequestFailed("the request failed in the engine; the server's log says how")
        else:
            self._deltas.append(delta)
        self._news.set()

    def end(self, metrics: RequestMetrics) -> None:
        self.metrics = metrics
        self.close()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.close()

    def close(self) -> None:
        """No delta comes any more."""
        self._begin()
        self._done = True
        self._news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self._done:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._deltas.popleft()

    def _begin(self) -> None:
        """It waits no longer."""
        if self._waiting is not None:
            self._waiting.leave(len(self.prompt))
            self._waiting = None
