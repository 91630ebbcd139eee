"""`AsyncLLM`: the engine for asyncio. It lives in a process of its own, and is started again when it dies or hangs."""

import asyncio
import functools
import itertools
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from headrace.data.explicit import Prompt, as_prompt
from headrace.data.fields import PROMPT
from headrace.data.params import SamplingParams
from headrace.data.types import Delta
from headrace.server.access.principals import PRINCIPAL
from headrace.server.access.queueing import AdmissionQueue, QueueFullError
from headrace.server.engines.inflight import (
    DeadlineError,
    EngineDownError,
    EngineLostError,
    InflightRequest,
    QuarantinedError,
    RequestFailedError,
    RequestRefusedError,
    TooLongError,
    WakeupEvent,
    stream_deltas,
)
from headrace.server.engines.messages import (
    Abort,
    Check,
    Checked,
    Deltas,
    FromEngine,
    Grammar,
    Load,
    Loaded,
    Refused,
    Stats,
    Submit,
)
from headrace.server.engines.quarantine import MOST_CRASHES, Quarantine, Suspect
from headrace.server.engines.replica import LoadError, Replica
from headrace.server.engines.supervision import State
from headrace.startup import classifier
from headrace.startup.encoding import LONG, count_at_least, encode_long
from headrace.startup.opening import Opened, open_model

__all__ = ["AsyncLLM", "EngineDownError", "LoadError", "QueueFullError", "RequestFailedError", "RequestRefusedError", "State"]

log = logging.getLogger("headrace.server")

NOT_STARTED = "this LLM is not started; use `async with AsyncLLM(…) as llm:`, or await its start()"
CLOSED = "this LLM is closed; await its start() to load the model again"
SURE = 4  # a text of so many characters per token of the context is counted first: most texts have fewer
INLINE = 4096  # characters that are encoded on the event loop; more go to a thread


class Observer(Protocol):
    """Is told what the engine does; for figures."""

    def begin(self, loaded: Loaded) -> None: ...
    def step(self, message: Deltas, inflight: Mapping[str, InflightRequest]) -> None: ...
    def end(self) -> None: ...


class AsyncLLM:
    """A model ready to generate, behind a queue, in a process of its own.

    `settings` are the arguments of `headrace.LLM`. `stuck_after`: seconds without a sign of life after which the process is
    ended and started again; `load_timeout`: seconds within which it has to be ready. Use it as an async context manager, or
    call `start` and `close`.

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
        self.replica = Replica(stuck_after, load_timeout, open=self._open, ready=self._loaded, take=self._take, lost=self._lose)
        self.queue = AdmissionQueue(max_queued_requests, max_queued_tokens)
        self.stats = Stats()
        self.observer: Observer | None = None
        self.inflight: dict[str, InflightRequest] = {}
        self._undelivered: set[str] = set()  # ids of what was submitted by those who have not said that they are through
        self.quarantine = Quarantine()
        self._suspect: tuple[InflightRequest, Suspect] | None = None  # the one that the engine has
        self._suspects: deque[tuple[InflightRequest, Suspect]] = deque()  # that wait until it shows that it is none
        self._opened: Opened | None = None
        self.classifier: classifier.Classifier | None = None  # once the model is open
        self._ids = itertools.count()
        self._checks: deque[asyncio.Future[str]] = deque()
        self._run = secrets.token_hex(4)
        self._idle = NOT_STARTED  # why no engine runs; empty from `begin` to `close`

    # -- what callers use ----------------------------------------------------------------------------------------------
    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start, and return when it is ready. Raises LoadError."""
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
        """Why it is not ready: one line."""
        return self.replica.supervision.detail

    @property
    def restarts(self) -> int:
        return self.replica.supervision.restarts

    @property
    def loaded(self) -> Loaded | None:
        """What the model's bounds are, once it was loaded."""
        return self.replica.loaded

    @property
    def opened(self) -> Opened:
        """The model's tokenizer, chat template and settings. Raises EngineDownError while it is being loaded."""
        if self._opened is None:
            raise self._refusal()
        return self._opened

    def _refusal(self) -> EngineDownError:
        """Why requests are refused now."""
        return EngineDownError(self._idle) if self._idle else self.replica.supervision.refusal()

    @property
    def running(self) -> bool:
        """Whether the model is in memory, being loaded, or being started again."""
        return self.replica.running

    @property
    def in_use(self) -> bool:
        """Whether anybody waits for an answer, or has not taken all of one, which its tokenizer may still be needed for."""
        return bool(self._undelivered)

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return self.replica.pid

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b""
    ) -> AsyncIterator[Delta]:
        """Deltas of one prompt as they come; leaving the loop, or cancelling the task, aborts the request.

        Raises RequestRefusedError for what could never run, RequestFailedError when this request fails, QueueFullError when
        too much waits, EngineDownError while there is no engine or when it ends under the request.
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
        """Token ids of a text as `Tokenizer.encode` gives them. The event loop does not wait for long ones. A text that is far
        longer than the context is not encoded to its end unless `limited` is off. Raises TokenizerError, BusyError,
        TooLongError."""
        given = {"add_special": add_special, "parse_special": parse_special, "marked": marked, "limited": limited}
        return (await self.encode_all([text], **given))[0]

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
        """The same of several. `writes`: they are prompts, and not texts to be embedded or classified."""
        opened, size = self.opened, sum(map(len, texts))
        each = functools.partial(opened.tokenizer.encode, add_special=add_special, parse_special=parse_special, marked=marked)
        if limited and self.loaded is not None:
            context = self.loaded.max_model_len
            for text in texts:
                if len(text) > max(INLINE, SURE * context) and (count := await count_at_least(text, each, context)) > context:
                    raise _too_long(context, f"at least {count}", writes)
        if size > LONG:
            return await encode_long(opened.path, texts, add_special, parse_special, marked)
        return [each(text) for text in texts] if size <= INLINE else await asyncio.to_thread(lambda: list(map(each, texts)))

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
        """Queue prompts, all or none; whoever submits must `abort` in the end. `pool` (first, last, mean): embeddings; `rule`:
        classes. What has not ended after `deadline` seconds fails with DeadlineError. `begun`: others of the same request were
        taken, so these are taken in an orderly end, too. `grammar`: the result of `check_form`
        for structured outputs.

        Raises QueueFullError, EngineDownError, RequestRefusedError (QuarantinedError).
        """
        if not (self.state is State.READY or (begun and self.state is State.DRAINING)) or self.loaded is None:
            raise self._refusal()
        context, writes = self.loaded.max_model_len, not pool and rule is None
        for ids in prompts:
            if len(ids) + writes > context:
                raise _too_long(context, str(len(ids)), writes)
        if len(prompts) > (most := self.queue.max_requests):
            raise RequestRefusedError(
                f"the prompt is a list of {len(prompts)} and the queue holds {most}; send fewer at once", PROMPT
            )
        own = PRINCIPAL.get().salted(salt)
        asked = [Submit(f"{self._run}-{next(self._ids)}", ids, params, own, pool, rule, grammar) for ids in prompts]
        suspects = [self.quarantine.find(one) for one in asked]
        if any(suspect is not None and suspect.ends >= MOST_CRASHES for suspect in suspects):
            raise QuarantinedError(f"the engine ended {MOST_CRASHES} times while it had this request, which is not tried again")
        self.queue.enter([len(ids) for ids in prompts])
        inflight = []
        wakeup = WakeupEvent()
        for one, suspect in zip(asked, suspects, strict=True):
            request = InflightRequest(one.request_id, one.prompt, params, self.queue, wakeup)
            request.message = one
            request.salted = bool(one.salt) and request.principal.private
            one.turn = request.turn
            self.inflight[request.request_id] = request
            self._undelivered.add(request.request_id)
            if suspect is None:
                self.replica.send(one)
            else:
                self._suspects.append((request, suspect))
            if deadline is not None:
                request.timer = asyncio.get_running_loop().call_later(deadline, self._expire, request, deadline)
            inflight.append(request)
        self._let_in()
        return inflight

    def _let_in(self) -> None:
        """Let the next request in under which the engine ended, once the last has ended or come further than it was then."""
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

    def abort(self, inflight: Sequence[InflightRequest]) -> None:
        """Nobody waits for these any more: what has not ended is ended, and its blocks come back."""
        for request in inflight:
            self._undelivered.discard(request.request_id)
            if self.inflight.pop(request.request_id, None) is not None:
                request.close()
                if self.pid is not None:
                    self.replica.send(Abort(request.request_id))
                    self._let_in()

    async def check(self) -> str:
        """What is wrong with the books of the engine's cache, one line; empty where nothing is. Raises EngineDownError."""
        self.replica.send(Check())
        checked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._checks.append(checked)
        return await checked

    def _expire(self, request: InflightRequest, deadline: float) -> None:
        if request.request_id in self.inflight:
            request.fail(DeadlineError(f"the request was not answered within its deadline of {deadline:g} s"))
            self.abort([request])

    async def drain(self, grace: float) -> bool:
        """Take nothing new, wait `grace` seconds at most until all is answered and taken; returns whether all is answered."""
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
        """Open the model on this side, for its texts; what the engine process is to load. Raises LoadError."""
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

    def _loaded(self, loaded: Loaded) -> None:
        if self.observer is not None:
            self.observer.begin(loaded)

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Checked):
            checked = self._checks.popleft()
            if not checked.done():  # nobody waits for it any more
                checked.set_result(message.problem)
        if isinstance(message, Refused):
            request = self.inflight.pop(message.request_id, None)
            if request is not None:
                request.fail(RequestRefusedError(message.reason, message.field))
        elif isinstance(message, Deltas):
            self.stats = message.stats
            for scores in message.scores:
                if request := self.inflight.get(scores.request_id):
                    request.prompt_logprobs = scores.logprobs
            for delta in message.deltas:
                if request := self.inflight.get(delta.request_id):
                    request.put(delta)
            for pooled in message.pooled:
                if request := self.inflight.get(pooled.request_id):
                    request.pooled = pooled.values
            for classified in message.classified:
                if request := self.inflight.get(classified.request_id):
                    request.classified = classified.logits
            if self.observer is not None:
                self.observer.step(message, self.inflight)
            for ended in message.ended:
                if request := self.inflight.pop(ended.request_id, None):
                    request.end(ended.metrics)
        if self._suspect is not None:
            self._let_in()

    def _lose(self, error: EngineDownError) -> None:
        """All in flight fails; what the engine had when it ended is remembered, as it may be why."""
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
        self.inflight = {}
        self.stats = Stats()
        if self.observer is not None:
            self.observer.end()


def _too_long(context: int, count: str, writes: bool) -> TooLongError:
    included, what = (", the answer included,", "prompt") if writes else ("", "text")
    return TooLongError(
        f"This model's maximum context length is {context} tokens{included} and the {what} has {count}; shorten the {what}"
    )
