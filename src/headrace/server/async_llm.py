"""`AsyncLLM`: the engine for asyncio. It lives in a process of its own, and is started again when it dies or hangs."""

import asyncio
import contextlib
import enum
import functools
import itertools
import logging
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from headrace.data.params import SamplingParams
from headrace.data.types import Delta
from headrace.server.engine_client import EngineGoneError, EngineLink
from headrace.server.messages import Abort, Check, Checked, Deltas, FromEngine, Load, Loaded, NotLoaded, Refused, Stats, Submit
from headrace.server.queueing import Queue, QueueFullError
from headrace.server.tickets import (
    DeadlineError,
    EngineDownError,
    EngineLostError,
    RequestFailedError,
    RequestRefusedError,
    Ticket,
    TooLongError,
    Wakeup,
    deltas,
)
from headrace.startup.encoding import LONG, encode_long
from headrace.startup.opening import Opened, open_model

__all__ = ["AsyncLLM", "EngineDownError", "LoadError", "QueueFullError", "RequestFailedError", "RequestRefusedError", "State"]

log = logging.getLogger("headrace.server")

Prompt = str | Sequence[int]
BACKOFF = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before each new attempt to start
LOOKS = 8  # at the engine, within the time after which it counts as stuck
INLINE = 4096  # characters that are encoded on the event loop; more go to a thread


class LoadError(ValueError):
    """The model cannot be opened; one line that says what to change."""


class State(enum.StrEnum):
    """What the engine is doing. Only READY and DRAINING have a process that answers."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DEAD = "dead"  # the process ended; it is being started again
    STUCK = "stuck"  # the process gave no sign of life and was ended; it is being started again
    CLOSED = "closed"


class Observer(Protocol):
    """Is told what the engine does; for figures."""

    def begin(self, loaded: Loaded) -> None: ...
    def step(self, message: Deltas, tickets: Mapping[str, Ticket]) -> None: ...
    def end(self) -> None: ...


class AsyncLLM:
    """A model ready to generate, behind a queue, in a process of its own.

    `settings` are the arguments of `headrace.LLM`. `stuck_after`: seconds without a sign of life after which the process is
    ended and started again. Use it as an async context manager, or call `start` and `close`.

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
        **settings: Any,
    ) -> None:
        self.engine = EngineLink  # how the engine is run
        self.model = str(model)
        self.settings: Mapping[str, Any] = {"preset": "online", **settings}
        self.stuck_after = stuck_after
        self.backoff = BACKOFF
        self.waiting = Queue(max_queued_requests, max_queued_tokens)
        self.state = State.CLOSED
        self.detail = ""  # why it is not ready: one line
        self.restarts = 0
        self.loaded: Loaded | None = None
        self.stats = Stats()
        self.observer: Observer | None = None
        self.tickets: dict[str, Ticket] = {}
        self._opened: Opened | None = None
        self._process: EngineLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._draining = False
        self._heard = 0  # messages
        self._ids = itertools.count()
        self._checks: deque[asyncio.Future[str]] = deque()
        self._run = secrets.token_hex(4)
        self._changed = asyncio.Event()

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
        if not self.running:
            self._become(State.LOADING, "the model is being loaded")
            self._supervisor = asyncio.create_task(self._supervise())

    async def ready(self) -> None:
        """Wait until requests can be served. Raises LoadError where that will never be."""
        while self.state not in (State.READY, State.DRAINING):
            if self.state is State.CLOSED:
                raise LoadError(self.detail)
            await self._changed.wait()

    @property
    def opened(self) -> Opened:
        """The model's tokenizer, chat template and settings. Raises EngineDownError while it is being loaded."""
        if self._opened is None:
            raise EngineDownError(self.detail)
        return self._opened

    @property
    def running(self) -> bool:
        """Whether the model is in memory, being loaded, or being started again."""
        return self._supervisor is not None and not self._supervisor.done()

    @property
    def pid(self) -> int | None:
        """The engine process's id."""
        return self._process.pid if self._process is not None else None

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: bytes = b""
    ) -> AsyncIterator[Delta]:
        """Deltas of one prompt as they come; leaving the loop, or cancelling the task, aborts the request.

        Raises RequestRefusedError for what could never run, RequestFailedError when this request fails, QueueFullError when
        too much waits, EngineDownError while there is no engine or when it ends under the request.
        """
        ids = await self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        (ticket,) = self.submit([ids], params or SamplingParams(), salt=salt)
        try:
            async for _, delta in deltas([ticket]):
                yield delta
        finally:
            self.abort([ticket])

    async def encode(self, text: str, *, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text, without holding up the event loop. Raises TokenizerError, BusyError."""
        return (await self.encode_all([text], add_special=add_special, parse_special=parse_special))[0]

    async def encode_all(self, texts: list[str], *, add_special: bool = True, parse_special: bool = True) -> list[list[int]]:
        """The same of several."""
        opened, size = self.opened, sum(map(len, texts))
        if size > LONG:
            return await encode_long(opened.path, texts, add_special, parse_special)
        each = functools.partial(opened.tokenizer.encode, add_special=add_special, parse_special=parse_special)
        return [each(text) for text in texts] if size <= INLINE else await asyncio.to_thread(lambda: list(map(each, texts)))

    def submit(
        self,
        prompts: list[list[int]],
        params: SamplingParams,
        *,
        salt: bytes = b"",
        pool: str = "",
        deadline: float | None = None,
    ) -> list[Ticket]:
        """Queue prompts, all or none; whoever submits must `abort` in the end. `pool` (first, last, mean): embeddings.
        What has not ended after `deadline` seconds fails with DeadlineError.

        Raises QueueFullError, EngineDownError, RequestRefusedError.
        """
        if self.state is not State.READY or self._process is None or self.loaded is None:
            raise EngineDownError(self.detail)
        context = self.loaded.max_model_len
        for ids in prompts:
            if len(ids) >= context + bool(pool):
                raise TooLongError(
                    f"This model's maximum context length is {context} tokens, the answer included, "
                    f"and the prompt has {len(ids)}; shorten the prompt"
                )
        if len(prompts) > (most := self.waiting.max_requests):
            raise RequestRefusedError(f"the prompt is a list of {len(prompts)} and the queue holds {most}; send fewer at once")
        self.waiting.enter([len(ids) for ids in prompts])
        tickets = []
        wakeup = Wakeup()
        for ids in prompts:
            ticket = Ticket(f"{self._run}-{next(self._ids)}", ids, params, self.waiting, wakeup)
            own = ticket.principal.salted(salt)
            ticket.salted = bool(own) and ticket.principal.private
            self.tickets[ticket.request_id] = ticket
            self._process.send(Submit(ticket.request_id, ids, params, own, pool, ticket.turn))
            if deadline is not None:
                ticket.timer = asyncio.get_running_loop().call_later(deadline, self._expire, ticket, deadline)
            tickets.append(ticket)
        return tickets

    def abort(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for these any more: what has not ended is ended, and its blocks come back."""
        for ticket in tickets:
            if self.tickets.pop(ticket.request_id, None) is not None:
                ticket.close()
                if self._process is not None:
                    self._process.send(Abort(ticket.request_id))

    async def check(self) -> str:
        """What is wrong with the books of the engine's cache, one line; empty where nothing is. Raises EngineDownError."""
        if self._process is None:
            raise EngineDownError(self.detail)
        checked: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._checks.append(checked)
        self._process.send(Check())
        return await checked

    def _expire(self, ticket: Ticket, deadline: float) -> None:
        if ticket.request_id in self.tickets:
            ticket.fail(DeadlineError(f"the request was not answered within its deadline of {deadline:g} s"))
            self.abort([ticket])

    async def drain(self, grace: float) -> bool:
        """Take nothing new and wait until all is answered, `grace` seconds at most; returns whether it was."""
        self._draining = True
        if self.state is State.READY:
            self._become(State.DRAINING, "the server is shutting down")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace
        while self.tickets and loop.time() < deadline:
            await asyncio.sleep(0.02)
        return not self.tickets

    async def close(self) -> None:
        """End the engine process; what is in flight fails. It can be started again."""
        self._become(State.CLOSED, "the server has shut down")
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
            self._supervisor = None
        self._fail_all(EngineDownError(self.detail))
        if self._process is not None:
            await self._process.stop()
            self._process = None
        if self._opened is not None:
            self._opened.source.close()
            self._opened = None
        self.loaded = None

    # -- the engine process --------------------------------------------------------------------------------------------
    async def _supervise(self) -> None:
        """Keep an engine process running until `close`."""
        failures = 0
        while True:
            try:
                await self._start()
                failures = 0
                await self._listen()
            except LoadError as error:
                if self.loaded is None:  # it never was ready: nothing will change by trying again
                    await self._bury()
                    self._become(State.CLOSED, str(error))
                    return
                log.error("%s", error)
                self._become(State.DEAD, "the model cannot be loaded again; the server's log says why")
            except EngineGoneError as error:
                self._become(State.DEAD, f"{error}; it is being started again")
            except TimeoutError:
                self._become(
                    State.STUCK, f"the engine gave no sign of life for {self.stuck_after:g} s; it is being started again"
                )
            await self._bury()
            await asyncio.sleep(self.backoff[min(failures, len(self.backoff) - 1)])
            failures += 1
            self.restarts += 1

    async def _start(self) -> None:
        """Open the model on this side, for its texts, and in the engine process. Raises LoadError, EngineGoneError."""
        load = Load(self.model, dict(self.settings), log.getEffectiveLevel(), min(1.0, self.stuck_after / LOOKS / 2))
        if self._opened is None:
            try:
                self._opened = await asyncio.to_thread(open_model, self.model)
            except (ValueError, OSError) as error:
                raise LoadError(" ".join(str(error).split())) from error
        self._process = await self.engine.start(load)
        message = await self._process.receive()
        if isinstance(message, NotLoaded):
            raise LoadError(message.reason)
        if not isinstance(message, Loaded):
            raise EngineGoneError("the engine process began with the wrong message")
        self.loaded = message
        if self.observer is not None:
            self.observer.begin(message)
        self._become(State.DRAINING if self._draining else State.READY, self.detail if self._draining else "")

    async def _listen(self) -> None:
        """Hand out what the engine sends. Raises EngineGoneError, and TimeoutError when it has gone silent."""
        tasks = {asyncio.create_task(self._hear()), asyncio.create_task(self._watch())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _hear(self) -> None:
        assert self._process is not None
        while True:
            self._take(await self._process.receive())
            self._heard += 1

    async def _watch(self) -> None:
        """Raises TimeoutError after LOOKS looks at which nothing was heard since the last; a machine that slept costs one."""
        silent = 0
        while silent < LOOKS:
            heard = self._heard
            await asyncio.sleep(self.stuck_after / LOOKS)
            silent = silent + 1 if self._heard == heard else 0
        raise TimeoutError

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Checked):
            checked = self._checks.popleft()
            if not checked.done():  # nobody waits for it any more
                checked.set_result(message.problem)
        if isinstance(message, Refused):
            ticket = self.tickets.pop(message.request_id, None)
            if ticket is not None:
                ticket.fail(RequestRefusedError(message.reason))
        elif isinstance(message, Deltas):
            self.stats = message.stats
            for scores in message.scores:
                if ticket := self.tickets.get(scores.request_id):
                    ticket.prompt_logprobs = scores.logprobs
            for delta in message.deltas:
                if ticket := self.tickets.get(delta.request_id):
                    ticket.put(delta)
            for pooled in message.pooled:
                if ticket := self.tickets.get(pooled.request_id):
                    ticket.pooled = pooled.values
            if self.observer is not None:
                self.observer.step(message, self.tickets)
            for ended in message.ended:
                if ticket := self.tickets.pop(ended.request_id, None):
                    ticket.end(ended.metrics)

    async def _bury(self) -> None:
        """All in flight fails, and nothing of the process is left."""
        self._fail_all(EngineLostError(self.detail))
        self.stats = Stats()
        if self.observer is not None:
            self.observer.end()
        process, self._process = self._process, None
        if process is not None:
            await process.kill()

    def _fail_all(self, error: EngineDownError) -> None:
        while self._checks:
            if not (checked := self._checks.popleft()).done():
                checked.set_exception(error)
        for ticket in self.tickets.values():
            ticket.fail(error)
        self.tickets = {}

    def _become(self, state: State, detail: str) -> None:
        if state is not self.state:
            level = logging.WARNING if state in (State.DEAD, State.STUCK) else logging.INFO
            log.log(level, "%s%s", state.value, f": {detail}" if detail else "")
        self.state, self.detail = state, detail
        self._changed.set()
        self._changed = asyncio.Event()
