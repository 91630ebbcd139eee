"""`AsyncLLM`: an engine for asyncio, in a process of its own that is restarted when it ends or hangs."""

import asyncio
import functools
import itertools
import logging
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from headrace.data.explicit import Prompt, as_prompt
from headrace.data.fields import PROMPT
from headrace.data.params import SamplingParams
from headrace.data.types import Delta
from headrace.server.access.principals import PRINCIPAL
from headrace.server.access.queueing import AdmissionQueue, QueueFullError
from headrace.server.engines import replay
from headrace.server.engines.engine_requests import BANNED, REPLAYED, EngineRequests
from headrace.server.engines.inflight import (
    DeadlineError,
    EngineDownError,
    InflightRequest,
    QuarantinedError,
    RequestFailedError,
    RequestRefusedError,
    TooLongError,
    WakeupEvent,
    stream_deltas,
)
from headrace.server.engines.messages import Grammar, Load, Loaded, Submit
from headrace.server.engines.quarantine import MOST_CRASHES, Quarantine
from headrace.server.engines.replica import LoadError
from headrace.server.engines.supervision import State
from headrace.startup import classifier
from headrace.startup.encoding import LONG, count_at_least, encode_long
from headrace.startup.opening import Opened, open_model

__all__ = ["AsyncLLM", "EngineDownError", "LoadError", "QueueFullError", "RequestFailedError", "RequestRefusedError", "State"]

log = logging.getLogger("headrace.server")

NOT_STARTED = "this LLM is not started; use `async with AsyncLLM(…) as llm:`, or await its start()"
CLOSED = "this LLM is closed; await its start() to load the model again"
# A text with more characters per token of the context is counted first, as it is probably too long.
CHARS_PER_TOKEN = 4
INLINE = 4096  # characters encoded on the event loop; longer texts go to a thread


class AsyncLLM:
    """A model ready to generate, behind a queue, in a process of its own.

    `settings`: arguments of `headrace.LLM`. `stuck_after`: seconds without a message after which the process is restarted;
    `load_timeout`: seconds until it must be ready. Use it as an async context manager, or call `start` and `close`.

        async with AsyncLLM("smollm2-135m") as llm:
            async for delta in llm.generate("The mill stands by", SamplingParams(max_tokens=32)):
                print(delta.text, end="")
    """

    def __init__(
        self,
        model: str | Path,
        *,
        max_queued_requests: int = 256,
        max_queued_tokens: int = 262_144,
        stuck_after: float = 60.0,
        load_timeout: float = 600.0,
        **settings: Any,
    ) -> None:
        self.model = str(model)
        self.settings: Mapping[str, Any] = {"preset": "online", **settings}
        self.queue = AdmissionQueue(max_queued_requests, max_queued_tokens)
        self._undelivered: set[str] = set()  # ids of requests whose caller has not called `abort`
        self.quarantine = Quarantine()
        self.requests = EngineRequests(stuck_after, load_timeout, open=self._open, quarantine=self.quarantine)
        self.replica = self.requests.replica
        self.inflight = self.requests.inflight
        self._opened: Opened | None = None
        self.classifier: classifier.Classifier | None = None  # once the model is open
        self._ids = itertools.count()
        self._run = secrets.token_hex(4)
        self._idle = NOT_STARTED  # why no engine runs; "" from `begin` to `close`

    # -- public ----------------------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Load the model and wait until it is ready. Raises LoadError."""
        self.begin()
        await self.ready()

    def begin(self) -> None:
        """Start loading, and return at once."""
        self.replica.begin()
        self._idle = ""

    async def ready(self) -> None:
        """Wait until requests can be served. Raises LoadError if the model cannot be loaded, or is not being loaded."""
        if self._idle:
            raise LoadError(self._idle)
        await self.replica.ready()

    @property
    def state(self) -> State:
        return self.replica.state

    @property
    def detail(self) -> str:
        """Why the engine is not ready: one line."""
        return self.replica.supervision.detail

    @property
    def restarts(self) -> int:
        return self.replica.supervision.restarts

    @property
    def loaded(self) -> Loaded | None:
        """Sizes of the model, once it was loaded."""
        return self.replica.loaded

    @property
    def opened(self) -> Opened:
        """Tokenizer, chat template and settings of the model. Raises EngineDownError while it is being loaded."""
        if self._opened is None:
            raise self._refusal()
        return self._opened

    def _refusal(self) -> EngineDownError:
        """Return the error of requests in the current state."""
        return EngineDownError(self._idle) if self._idle else self.replica.supervision.refusal()

    @property
    def running(self) -> bool:
        """Whether the model is in memory, being loaded, or being started again."""
        return self.replica.running

    @property
    def in_use(self) -> bool:
        """Whether a caller still waits for a request or reads its answer, and so may need the tokenizer."""
        return bool(self._undelivered)

    @property
    def pid(self) -> int | None:
        """Id of the engine process."""
        return self.replica.pid

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b""
    ) -> AsyncIterator[Delta]:
        """Yield the deltas of one prompt as they arrive. Ending the loop or cancelling the task aborts the request.

        Raises RequestRefusedError for an impossible request, RequestFailedError if this request fails, QueueFullError if the
        queue is full, EngineDownError if there is no engine, or if it ended and the request cannot go on in the next one.
        """
        plain = as_prompt(prompt)
        ids = await self.encode(plain) if isinstance(plain, str) else plain
        (request,) = self.submit([ids], params or SamplingParams(), salt=salt)
        try:
            async for _, delta in stream_deltas([request]):
                yield delta
        finally:
            self.abort([request])

    async def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True, marked: bool = False, limited: bool = True
    ) -> list[int]:
        """Return the token ids of a text, as `Tokenizer.encode`. Long texts do not block the event loop. With `limited`, a text
        far longer than the context is not encoded to its end. Raises TokenizerError, BusyError, TooLongError."""
        options = {"add_special": add_special, "parse_special": parse_special, "marked": marked, "limited": limited}
        return (await self.encode_all([text], **options))[0]

    async def encode_all(
        self,
        texts: list[str],
        *,
        add_special: bool = True,
        parse_special: bool = True,
        marked: bool = False,
        limited: bool = True,
        writes: bool = True,
    ) -> list[list[int]]:
        """`encode` for several texts. `writes`: they are prompts, not texts to embed or classify."""
        opened, size = self.opened, sum(map(len, texts))
        encode = functools.partial(opened.tokenizer.encode, add_special=add_special, parse_special=parse_special, marked=marked)
        if limited and self.loaded is not None:
            context = self.loaded.max_model_len
            for text in texts:
                if len(text) <= max(INLINE, CHARS_PER_TOKEN * context):
                    continue
                if (count := await count_at_least(text, encode, context)) > context:
                    raise _too_long(context, f"at least {count}", writes)
        if size > LONG:
            return await encode_long(opened.path, texts, add_special, parse_special, marked)
        return [encode(text) for text in texts] if size <= INLINE else await asyncio.to_thread(lambda: list(map(encode, texts)))

    def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        salt: bytes = b"",
        pool: str = "",
        rule: tuple[str, float] | None = None,
        deadline: float | None = None,
        begun: bool = False,
        grammar: Grammar | None = None,
    ) -> list[InflightRequest]:
        """Queue prompts, all or none; the caller must call `abort` in the end.

        pool: compute embeddings (first, last or mean). rule: classify, with this exit criterion and threshold. deadline:
        seconds after which an unfinished request fails with DeadlineError. begun: others of the same API request were accepted,
        so these are accepted while the server drains or the engine is started again, too. grammar: result of `compile_format`
        for structured outputs.

        Raises QueueFullError, EngineDownError, RequestRefusedError (QuarantinedError).
        """
        goes_on = begun and (self.state is State.DRAINING or self.state in REPLAYED)
        if not (self.state is State.READY or goes_on) or self.loaded is None:
            raise self._refusal()
        context, writes = self.loaded.max_model_len, not pool and rule is None
        for ids in prompts:
            if len(ids) + writes > context:
                raise _too_long(context, str(len(ids)), writes)
        if len(prompts) > (most := self.queue.max_requests):
            raise RequestRefusedError(
                f"the prompt is a list of {len(prompts)} and the queue holds {most} (--max-queued-requests); send fewer", PROMPT
            )
        own = PRINCIPAL.get().salted(salt)
        messages = [
            Submit(f"{self._run}-{next(self._ids)}", ids, params, own, pool, rule, grammar, seed=replay.request_seed(params))
            for ids in prompts
        ]
        suspects = [self.quarantine.find(message) for message in messages]
        if any(suspect is not None and suspect.ends >= MOST_CRASHES for suspect in suspects):
            raise QuarantinedError(BANNED)
        self.queue.enter([len(ids) for ids in prompts])
        inflight = []
        wakeup = WakeupEvent()
        for message, suspect in zip(messages, suspects, strict=True):
            request = InflightRequest(message.request_id, message.prompt, params, self.queue, wakeup)
            request.message = message
            request.salted = bool(message.salt) and request.principal.private
            message.turn = request.turn
            self._undelivered.add(request.request_id)
            self.requests.send(request, suspect)
            if deadline is not None:
                request.timer = asyncio.get_running_loop().call_later(deadline, self._expire, request, deadline)
            inflight.append(request)
        return inflight

    def abort(self, inflight: Sequence[InflightRequest]) -> None:
        """End requests whose caller is done with them; the engine frees the K/V blocks of those that run."""
        for request in inflight:
            self._undelivered.discard(request.request_id)
            self.requests.abort(request)

    async def check(self) -> str:
        """Check the accounts of the engine's K/V cache. Returns the problem, one line, or "". Raises EngineDownError."""
        return await self.requests.check()

    def _expire(self, request: InflightRequest, deadline: float) -> None:
        if request.request_id in self.inflight:
            request.fail(DeadlineError(f"the request was not answered within its deadline of {deadline:g} s"))
            self.abort([request])

    async def drain(self, grace: float) -> bool:
        """Accept no new requests and wait up to `grace` seconds for the open ones; returns whether all have ended."""
        self.replica.drain()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        while self._undelivered and loop.time() < deadline:
            await asyncio.sleep(0.02)
        return not self.inflight

    async def close(self) -> None:
        """End the engine process; requests in flight fail. A second call does nothing; `start` loads the model again."""
        self._idle = CLOSED
        await self.replica.close()
        if self._opened is not None:
            self._opened.source.close()
            self._opened = None

    # -- the engine process --------------------------------------------------------------------------------------------
    async def _open(self) -> Load:
        """Open tokenizer and template in this process; returns the engine's Load message. Raises LoadError."""
        if self._opened is None:
            try:
                trusts = bool(self.settings.get("parse_special"))
                opened = await asyncio.to_thread(open_model, self.model, parse_special=trusts)
                if (folder := self.settings.get("classifier")) is not None:
                    self.classifier = await asyncio.to_thread(classifier.load, folder, opened)
                self._opened = opened
            except (ValueError, OSError) as error:
                raise LoadError(" ".join(str(error).split())) from error
        return Load(self.model, dict(self.settings), log.getEffectiveLevel(), self.replica.beat)


def _too_long(context: int, count: str, writes: bool) -> TooLongError:
    included, what = (", the answer included,", "prompt") if writes else ("", "text")
    return TooLongError(
        f"This model's maximum context length is {context} tokens{included} and the {what} has {count}; shorten the {what}"
    )
