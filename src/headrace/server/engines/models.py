"""The models of one server: which are in memory, which are loaded when asked for, which make room for others."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from headrace.data.config import parse_bytes
from headrace.server.engines.async_llm import AsyncLLM, LoadError, State
from headrace.server.engines.inflight import RETRY_DOWN
from headrace.server.engines.metrics import ModelMetrics, ServerMetrics
from headrace.server.engines.service import Service
from headrace.server.http.api_error import MODEL_UNUSABLE, ApiError
from headrace.server.settings import CascadeSettings, ServerSettings, SettingsError
from headrace.weights import catalog, hub

log = logging.getLogger("headrace.server")

LOADED = 1.1  # bytes in memory for each of a file's, about
KV = 512 << 20  # bytes


@dataclass(eq=False, slots=True)
class LoadedModel:
    """A model and what is known of its use."""

    service: Service
    preload: bool = True
    size: int = 0  # bytes it is expected to take; once it was loaded, what it took
    users: int = 0  # requests between their arrival and their answer, or its first event
    used: float = 0.0  # when it was last asked for
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
    """Every model has a name and, while it is in memory, an engine process of its own.

    With a `budget` (bytes) models are loaded when they are asked for, and those not used for longest and idle are unloaded
    until the next one fits. Without one all are loaded at the start and stay. `cascades` are names for several of them
    together. Raises SettingsError where they name others.
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
        """Every served model, the first one first."""
        return [entry.service for entry in self._entries.values()]

    def find(self, name: str | None) -> Service:
        """The model of this name, the first for None. Raises ApiError for one that is not served."""
        return self._entry(name).service

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Service]:
        """The model of this name, in memory, and not unloaded while this is entered.

        Raises ApiError for a name that is not served, where there is no room, and where it cannot be loaded.
        """
        entry = self._entry(name)
        entry.users += 1
        entry.used = time.monotonic()
        try:
            if self.budget is not None and (not entry.in_memory or entry.llm.state is State.LOADING):
                await self._bring(entry)
            yield entry.service
        finally:
            entry.users -= 1

    def begin(self) -> None:
        """Start loading what is loaded at the start."""
        for entry in self._entries.values():
            if entry.preload or self.budget is None:
                entry.llm.begin()

    async def ready(self) -> list[Service]:
        """Wait until what is loaded at the start is ready. Raises LoadError."""
        begun = [entry for entry in self._entries.values() if entry.preload or self.budget is None]
        for entry in begun:
            await entry.llm.ready()
            _measure(entry)
        self._starting = False
        return [entry.service for entry in begun]

    async def drain(self, grace: float) -> int:
        """Finish what runs; returns how many requests were not finished in time."""
        ends = time.monotonic() + grace
        await asyncio.gather(*(entry.llm.drain(grace) for entry in self._entries.values()))
        while self._using and time.monotonic() < ends:  # a finished answer may still be looked at, or kept
            await asyncio.sleep(0.02)
        return max(self.open, self._using)

    @property
    def _using(self) -> int:
        return sum(entry.users for entry in self._entries.values())

    @property
    def open(self) -> int:
        """Requests under way."""
        return sum(len(entry.llm.inflight) for entry in self._entries.values())

    @property
    def state(self) -> tuple[State, str]:
        """The worst state of any model that is in memory or should be, and why; READY where all is well."""
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
                f"{name!r} is a cascade, for completions and chats alone; use one of its models: {tiers}",
                param="model",
                code="unsupported",
            )
        if name not in self._entries:
            known = ", ".join(repr(one) for one in (*self._entries, *self.cascades))
            message = f"the model {name[:100]!r} is not served here; use {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._entries[name]

    async def _bring(self, entry: LoadedModel) -> None:
        async with entry.loading:
            if not entry.in_memory:
                await self._make_room(entry)
            try:
                await entry.llm.ready()
            except LoadError as error:
                log.error("%s cannot be loaded: %s", entry.service.name, error)
                message = "the model cannot be loaded; the server's log says why"
                raise ApiError(503, message, code=MODEL_UNUSABLE, retry_after=60) from None
            _measure(entry)

    async def _make_room(self, entry: LoadedModel) -> None:
        """Unload others until `entry` fits into the budget, and begin to load it."""
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
            raise SettingsError(f"the cascade {one.name!r} names {unknown[0]!r}; its models are of {', '.join(served)}")


def _measure(entry: LoadedModel) -> None:
    """What a model was expected to take becomes what it takes."""
    if entry.llm.loaded is not None:
        entry.size = entry.llm.loaded.memory or entry.size


def expected_size(model: str, kv: int | str | None) -> int:
    """About what a model on this machine will take: its weights, and its KV cache where that was said."""
    path = hub.resolve(model, entries=catalog.load(), download=False)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return int(sum(file.stat().st_size for file in files) * LOADED) + (parse_bytes(kv) if kv is not None else KV)


def make_service(llm: AsyncLLM, name: str, settings: ServerSettings, figures: ServerMetrics) -> Service:
    """A model with its figures, ready to be served."""
    metrics = ModelMetrics(figures, name)
    llm.observer = metrics
    return Service(llm, name, settings, metrics)
