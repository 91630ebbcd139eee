"""An engine in the test's event loop that is lost where a test wants it: one step a message, no process, no time."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import Any

from headrace.data.params import SamplingParams
from headrace.data.types import Delta
from headrace.decoding.grammar import grammar_of
from headrace.llm import LLM
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.engine_client import EngineGoneError
from headrace.server.engines.engine_process import EngineLoop, load
from headrace.server.engines.inflight import InflightRequest, stream_deltas
from headrace.server.engines.messages import Deltas, FromEngine, Grammar, Load, Submit, ToEngine

SETTINGS: dict[str, Any] = {"threads": 1, "device": "cpu", "backend": "native", "kv_cache_memory": "4MiB"}
# Whether the engine is lost instead of giving this message of a step.
Loses = Callable[["LocalEngine", Deltas], bool]


class LocalEngine:
    """In place of `EngineConnection`. A new one loads the model again, so the K/V of the last are gone."""

    loses: Loses
    made: list["LocalEngine"]

    def __init__(self, message: Load) -> None:
        self.pid = 1
        self.number = len(self.made)  # 0 for the first
        self.sent: list[ToEngine] = []
        self.steps = 0  # with requests
        self.tokens: dict[str, int] = {}  # of each request, by id
        self._inbox: deque[ToEngine] = deque()
        self._outbox: deque[FromEngine] = deque()
        self._news = asyncio.Event()
        self.bell: int | None = None
        llm = load(message, self)  # type: ignore[arg-type]
        assert llm is not None
        self.llm: LLM = llm
        self.loop = EngineLoop(llm, self, 1.0)  # type: ignore[arg-type]
        if self.bell is not None:
            asyncio.get_running_loop().add_reader(self.bell, self._rung)

    @property
    def submitted(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    @classmethod
    async def start(cls, message: Load) -> "LocalEngine":
        cls.made.append(cls(message))
        return cls.made[-1]

    def send(self, message: Any) -> None:
        """From either side: the loop sends what comes from the engine."""
        if isinstance(message, FromEngine):
            self._outbox.append(message)
        else:
            self.sent.append(message)
            self._inbox.append(message)
        self._news.set()

    async def receive(self) -> FromEngine:
        await asyncio.sleep(0)
        while not self._outbox:
            while self._inbox:
                self.loop._take(self._inbox.popleft())
            self.loop._compiled()
            if self.loop.engine.busy:
                self._outbox.append(self._step())
            elif self.loop.compiling:
                await asyncio.sleep(0.001)
            elif not self._outbox:
                self.loop._stats(fed=0)  # an idle engine lends blocks
                self._news.clear()
                await self._news.wait()
        return self._outbox.popleft()

    def _rung(self) -> None:
        assert self.bell is not None
        os.read(self.bell, 4096)
        self._news.set()

    def _step(self) -> Deltas:
        message = self.loop._step()
        self.steps += 1
        for delta in message.deltas:
            self.tokens[delta.request_id] = self.tokens.get(delta.request_id, 0) + len(delta.token_ids)
        if type(self).loses(self, message):
            raise EngineGoneError("the engine process ended (test)")
        return message

    async def kill(self) -> None:
        if self.bell is not None:
            asyncio.get_running_loop().remove_reader(self.bell)
        if self.loop.compiling is not None:
            self.loop.compiling.close()
        self.llm.close()

    stop = kill


def local(loses: Loses) -> type[LocalEngine]:
    return type("Local", (LocalEngine,), {"loses": staticmethod(loses), "made": []})


async def started(model: Any, link: type[LocalEngine], **settings: Any) -> AsyncLLM:
    llm = AsyncLLM(model, stuck_after=3600.0, **{**SETTINGS, **settings})
    for engine in llm.replicas.engines:
        engine.replica.link = link  # type: ignore[assignment]
        engine.replica.supervision.pauses = (0.0,)
    await llm.start()
    return llm


def submit(llm: AsyncLLM, prompt: str, params: SamplingParams) -> InflightRequest:
    """Submit a prompt, with its grammar compiled as a confined process does."""
    grammar = None
    if params.structured_outputs is not None:
        grammar = Grammar(grammar_of(params.structured_outputs), 1000)
    (request,) = llm.submit([llm.opened.tokenizer.encode(prompt)], params, grammar=grammar)
    return request


async def answers(request: InflightRequest) -> dict[int, list[Delta]]:
    """All deltas by output, in order."""
    outputs: dict[int, list[Delta]] = {}
    async for _, delta in stream_deltas([request]):
        outputs.setdefault(delta.index, []).append(delta)
    return outputs
