"""The models of one server: loading on demand, and unloading idle models to make room for others.

A `Service` is one served model with its name, limits and metrics, for the handlers of requests.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace import __version__
from headrace.data.config import parse_bytes
from headrace.server.engines.async_llm import AsyncLLM, LoadError, State
from headrace.server.engines.inflight import RETRY_DOWN, TooLongError
from headrace.server.engines.metrics import ModelMetrics, ServerMetrics
from headrace.server.http.api_error import MODEL_UNUSABLE, ApiError
from headrace.server.settings import CascadeSettings, Limits, ServerSettings, SettingsError
from headrace.weights import catalog, hub
from headrace.weights.defaults import Defaults

log = logging.getLogger("headrace.server")

LOADED = 1.1  # estimate: bytes in memory per byte of a file
KV = 512 << 20  # estimate: bytes of the K/V cache


@dataclass(eq=False, slots=True)
class Service:
    """One served model. `name`: its name for clients."""

    llm: AsyncLLM
    name: str
    settings: ServerSettings
    metrics: ModelMetrics
    created: int = field(default_factory=lambda: int(time.time()))

    def deadline(self, asked: float | None) -> float | None:
        """Return the seconds after which a request ends: its own deadline, or the server's."""
        return self.limits.deadline if asked is None else asked

    @property
    def defaults(self) -> Defaults:
        """Sampling settings of requests without their own."""
        return {} if self.settings.sampling_defaults == "neutral" else self.llm.opened.defaults

    @property
    def limits(self) -> Limits:
        return self.settings.limits

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint. It changes with the version, the model and its number format."""
        note = "" if self.llm.loaded is None else self.llm.loaded.note
        return f"fp_{hashlib.sha256(f'{__version__} {self.name} {note}'.encode()).hexdigest()[:10]}"

    def check_room(self, prompts: Sequence[Sequence[int]], answer: int | None, what: str) -> None:
        """Raises TooLongError if the longest prompt and `answer` tokens exceed the context. `what` names the prompt."""
        if answer is None or self.llm.loaded is None:
            return
        context, prompt = self.llm.loaded.max_model_len, max(map(len, prompts), default=0)
        if prompt + answer > context:
            raise TooLongError(
                f"This model's maximum context length is {context} tokens. However, you requested {prompt + answer} tokens "
                f"({prompt} in the {what}, {answer} in the completion); lower max_tokens, or shorten the {what}"
            )


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A model with its size and use."""

    service: Service
    preload: bool = True
    size: int = 0  # bytes: an estimate, and the measured size once it was loaded
    users: int = 0  # requests between arrival and response, or first event of a stream
    used: float = 0.0  # time of the last request
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def llm(self) -> AsyncLLM:
        return self.service.llm

    @property
    def in_memory(self) -> bool:
        return self.llm.running

    @property
    def busy(self) -> bool:
        return bool(self.users or self.llm.in_use)


class Models:
    """All served models by name. A model in memory has an engine process of its own.

    With a `budget` (bytes) a model is loaded for its first request, and the least recently used idle models are unloaded until
    it fits. Without a budget all models are loaded at the start and stay. `cascades` combine several models under one name.
    Raises SettingsError if a cascade names an unknown model.
    """

    def __init__(
        self,
        entries: Sequence[LoadedModel],
        settings: ServerSettings,
        figures: ServerMetrics,
        budget: int | None = None,
        cascades: Sequence[CascadeSettings] = (),
    ) -> None:
        self.settings = settings
        self.figures = figures
        self.budget = budget
        self._entries = {entry.service.name: entry for entry in entries}
        self.cascades = {one.name: one for one in cascades}
        _check_names(self._entries, cascades)
        self._making_room = asyncio.Lock()
        self._starting = True

    @property
    def services(self) -> list[Service]:
        """All served models; the first is the default."""
        return [entry.service for entry in self._entries.values()]

    def find(self, name: str | None) -> Service:
        """Return the model of this name; the first for None. Raises ApiError if it is not served."""
        return self._entry(name).service

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Service]:
        """Load a model if needed, and keep it in memory while the context is entered.

        Raises ApiError if the name is not served, if there is no room, or if loading fails.
        """
        entry = self._entry(name)
        entry.users += 1
        entry.used = time.monotonic()
        try:
            if self.budget is not None and (not entry.in_memory or entry.llm.state is State.LOADING):
                await self._load(entry)
            yield entry.service
        finally:
            entry.users -= 1

    def begin(self) -> None:
        """Start loading the models that are loaded at the start."""
        for entry in self._entries.values():
            if entry.preload or self.budget is None:
                entry.llm.begin()

    async def ready(self) -> list[Service]:
        """Wait until the models that are loaded at the start are ready, and return them. Raises LoadError."""
        begun = [entry for entry in self._entries.values() if entry.preload or self.budget is None]
        for entry in begun:
            await entry.llm.ready()
            _measure(entry)
        self._starting = False
        return [entry.service for entry in begun]

    async def drain(self, grace: float) -> int:
        """Wait up to `grace` seconds for the open requests; returns how many have not ended."""
        ends = time.monotonic() + grace
        await asyncio.gather(*(entry.llm.drain(grace) for entry in self._entries.values()))
        # A finished answer may still be checked or stored.
        while self._using and time.monotonic() < ends:
            await asyncio.sleep(0.02)
        return max(self.open, self._using)

    @property
    def _using(self) -> int:
        return sum(entry.users for entry in self._entries.values())

    @property
    def open(self) -> int:
        """Number of requests in the engines and their queues."""
        return sum(len(entry.llm.inflight) for entry in self._entries.values())

    @property
    def state(self) -> tuple[State, str]:
        """The worst state of the models that are in memory or should be, and its reason."""
        entries = [entry for entry in self._entries.values() if entry.in_memory or self.budget is None]
        found = {entry.llm.state: entry.llm.detail for entry in entries}
        for state in (State.FAILING, State.STUCK, State.DEAD, State.CLOSED, State.DRAINING, State.LOADING):
            if state in found and (state is not State.LOADING or self._starting):
                return state, found[state]
        return State.READY, ""

    async def close(self) -> None:
        await asyncio.gather(*(entry.llm.close() for entry in self._entries.values()))

    def _entry(self, name: str | None) -> LoadedModel:
        if name is None:
            return next(iter(self._entries.values()))
        if name in self.cascades:
            tiers = ", ".join(self.cascades[name].tiers)
            raise ApiError(
                400,
                f"{name!r} is a cascade and answers completions and chats only; use one of its models: {tiers}",
                param="model",
                code="unsupported",
            )
        if name not in self._entries:
            known = ", ".join(repr(one) for one in (*self._entries, *self.cascades))
            message = f"the model {name[:100]!r} is not served here; use {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._entries[name]

    async def _load(self, entry: LoadedModel) -> None:
        async with entry.loading:
            if not entry.in_memory:
                await self._make_room(entry)
            try:
                await entry.llm.ready()
            except LoadError as error:
                log.error("%s cannot be loaded: %s", entry.service.name, error)
                message = "the model cannot be loaded; see the server's log"
                raise ApiError(503, message, code=MODEL_UNUSABLE, retry_after=60) from None
            _measure(entry)

    async def _make_room(self, entry: LoadedModel) -> None:
        """Unload idle models until `entry` fits into the budget, and begin to load it."""
        assert self.budget is not None
        async with self._making_room:
            if entry.size > self.budget:
                message = "the model is larger than the memory set aside for models"
                raise ApiError(503, message, code=MODEL_UNUSABLE, retry_after=60)
            others = sorted((one for one in self._entries.values() if one.in_memory), key=lambda one: one.used)
            idle = [one for one in others if not one.busy]
            while sum(one.size for one in others) + entry.size > self.budget:
                if not idle:
                    message = "the memory for models is in use by others that are answering; try again"
                    raise ApiError(503, message, code="no_room", retry_after=RETRY_DOWN)
                victim = idle.pop(0)
                others.remove(victim)
                log.info("%s makes room for %s", victim.service.name, entry.service.name)
                await victim.llm.close()
            entry.llm.begin()


def _check_names(served: Collection[str], cascades: Sequence[CascadeSettings]) -> None:
    names = [*served, *(one.name for one in cascades)]
    if len(set(names)) < len(names):
        raise SettingsError(f"two models have one name ({', '.join(names)}); give each its own")
    for one in cascades:
        if unknown := [tier for tier in one.tiers if tier not in served]:
            raise SettingsError(f"the cascade {one.name!r} names {unknown[0]!r}; choose from {', '.join(served)}")


def _measure(entry: LoadedModel) -> None:
    """Replace the estimated size of a loaded model by its measured size."""
    if entry.llm.loaded is not None:
        entry.size = entry.llm.loaded.memory or entry.size


def expected_size(model: str, kv: int | str | None) -> int:
    """Estimate the memory (bytes) of a model on this machine: weights and K/V cache. `kv`: its option for the cache."""
    path = hub.resolve(model, entries=catalog.load(), download=False)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return int(sum(file.stat().st_size for file in files) * LOADED) + (parse_bytes(kv) if kv is not None else KV)


def make_service(llm: AsyncLLM, name: str, settings: ServerSettings, figures: ServerMetrics) -> Service:
    """Return a model with its metrics, ready to be served."""
    metrics = ModelMetrics(figures, name)
    llm.requests.observer = metrics
    return Service(llm, name, settings, metrics)
