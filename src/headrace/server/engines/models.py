"""The models of one server by name: which of them a request may use, and their state.

`ModelLoader` loads and unloads them.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.backends.memory import gib
from headrace.data.settings import ModelSettings
from headrace.server.access.principals import PRINCIPAL
from headrace.server.engines.async_llm import State
from headrace.server.engines.inflight import DeadlineError
from headrace.server.engines.loader import NO_ROOM, ModelLoader
from headrace.server.engines.metrics import ServerMetrics
from headrace.server.engines.served_model import Residency, ServedModel, Service, make_service
from headrace.server.http.api_error import ApiError
from headrace.server.settings import CascadeSettings, Mode, ServerSettings, SettingsError
from headrace.startup.adapters import check_adapter, named_adapters

__all__ = ["Models", "ServedModel", "Service", "make_service"]

Wait = Callable[[Any], Awaitable[None]]  # awaits a coroutine, and cancels it if the client disconnects


class Models:
    """All served models by name. A model in memory has an engine process of its own.

    With a `budget` (bytes) a model is loaded for its first request, and others are unloaded until it fits; `idle_unload`: see
    `ModelLoader`. Without a budget all models are loaded at the start and stay. `cascades` combine several models under one
    name. Raises SettingsError for names that are not unique or unknown, and for models that cannot fit.
    """

    def __init__(
        self,
        entries: Sequence[ServedModel],
        settings: ServerSettings,
        figures: ServerMetrics,
        budget: int | None = None,
        cascades: Sequence[CascadeSettings] = (),
        idle_unload: float | None = None,
    ) -> None:
        self.settings = settings
        self.figures = figures
        self._entries = {entry.name: entry for entry in entries}
        self._aliases = {alias: entry for entry in entries for alias in entry.aliases}
        self.cascades = {one.name: one for one in cascades}
        self._adapters = _adapters_of(entries)
        _check_names(entries, cascades)
        if budget is not None:
            _check_sizes(entries, budget)
        self.loader = ModelLoader(self._entries, budget, idle_unload)
        self._starting = True
        self._adapting = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    # -- names ---------------------------------------------------------------------------------------------------------
    @property
    def served(self) -> list[ServedModel]:
        """All models that are not off; the first is the default."""
        return [entry for entry in self._entries.values() if entry.mode is not Mode.OFF]

    @property
    def services(self) -> list[Service]:
        """All served models; the first is the default."""
        return [entry.service for entry in self.served]

    def transcribe(self) -> bool:
        """Whether one of them is a speech model."""
        return any(entry.transcribes for entry in self.served)

    @property
    def names(self) -> frozenset[str]:
        """All names that a client may send, of models that are off too."""
        return frozenset([*self._entries, *self._aliases, *self._adapters, *self.cascades])

    def usable(self) -> list[ServedModel]:
        """The served models that the key of this request may use."""
        return [entry for entry in self.served if PRINCIPAL.get().may_use(entry.name, *entry.aliases)]

    def usable_adapters(self) -> list[tuple[str, ServedModel]]:
        """The names of adapters that the key of this request may use, with their models."""
        served = self.served
        return [(name, entry) for name, entry in self._adapters.items() if entry in served and PRINCIPAL.get().may_use(name)]

    def find(self, name: str | None) -> Service:
        """Return the model of this name; the first for None. Raises ApiError if it is not served."""
        return self.entry(name).service

    def entry(self, name: str | None, *, of_cascade: bool = False) -> ServedModel:
        """Return a model by its name, alias or adapter. `of_cascade`: a tier of a cascade that the key may use. Raises
        ApiError."""
        usable = self.served if of_cascade else self.usable()
        adapters = dict(self.usable_adapters())
        if name in adapters:
            return adapters[name]
        if name is None and usable:
            return usable[0]
        entry = self._find(name or "")
        if entry in usable:
            return entry
        if name in self.cascades and entry is None:
            tiers = ", ".join(self.cascades[name].tiers)
            raise ApiError(
                400,
                f"{name!r} is a cascade and answers completions and chats only; use one of its models: {tiers}",
                param="model",
                code="unsupported",
            )
        cascades = [one for one in self.cascades if PRINCIPAL.get().may_use(one)]
        known = ", ".join(repr(one) for one in (*(one.name for one in usable), *adapters, *cascades)) or "another key"
        message = f"the model {(name or '')[:100]!r} is not served here; use {known}"
        raise ApiError(404, message, param="model", code="model_not_found")

    def listed(self, name: str) -> ServedModel:
        """Return a model by its name or alias, also if it is off. For the operator. Raises ApiError."""
        if (entry := self._find(name)) is None:
            known = ", ".join(map(repr, self._entries))
            raise ApiError(
                404, f"the model {name[:100]!r} is not listed here; use {known}", param="model", code="model_not_found"
            )
        return entry

    @property
    def all(self) -> list[ServedModel]:
        """All models, also those that are off."""
        return list(self._entries.values())

    def _find(self, name: str) -> ServedModel | None:
        return self._entries.get(name) or self._aliases.get(name)

    # -- requests ------------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def use(
        self, name: str | None, *, seconds: float | None = None, wait: Wait | None = None, of_cascade: bool = False
    ) -> AsyncIterator[Service]:
        """Load a model if needed, and keep it in memory while the context is entered.

        seconds: deadline of the request. wait: ends the waiting if the client disconnects. Raises ApiError if the name is not
        served, if there is no room, or if loading fails; DeadlineError, QueueFullError.
        """
        entry = self.entry(name, of_cascade=of_cascade)
        if entry.answers or (self._starting and self.loader.budget is None):
            entry.users += 1
            entry.used = time.monotonic()
        else:
            await self._wait(entry, seconds, wait)
        try:
            yield entry.service if name not in self._adapters else replace(entry.service, name=name, adapter=name)
        finally:
            self.loader.leave(entry)

    async def _wait(self, entry: ServedModel, seconds: float | None, wait: Wait | None) -> None:
        entered = False

        async def enter() -> None:
            nonlocal entered
            await self.loader.enter(entry)
            entered = True

        try:
            async with asyncio.timeout(seconds):
                await (enter() if wait is None else wait(enter()))
        except BaseException as error:
            if entered:  # the deadline, or the client's end, came in the same turn of the loop
                self.loader.leave(entry)
            if isinstance(error, TimeoutError):
                raise DeadlineError(f"the request was not answered within its deadline of {seconds:g} s") from None
            raise

    # -- the operator --------------------------------------------------------------------------------------------------
    async def load(self, name: str) -> ServedModel:
        """Load a model, and return it when it is loaded. Raises ApiError."""
        entry = self.listed(name)
        if entry.mode is Mode.OFF:
            raise ApiError(409, f"{entry.name} is off; set its mode to 'on demand' first", code="invalid_state")
        await self.loader.load(entry)
        return entry

    async def unload(self, name: str) -> ServedModel:
        """Unload a model when its requests have ended, at most after the grace period. A pinned model is then on demand."""
        entry = self.listed(name)
        await self.loader.unload(entry, "operator", self.settings.grace)
        return entry

    async def set_mode(self, name: str, mode: Mode) -> ServedModel:
        """Change the mode of a model until the server ends: pinned loads it, off unloads it. Raises ApiError."""
        entry = self.listed(name)
        before, entry.mode = entry.mode, mode
        if mode is Mode.PINNED:
            others = self.loader.pinned_next_to(entry)
            if others:
                entry.mode = before
                names = ", ".join(one.name for one in others)
                raise ApiError(
                    409, f"{entry.name} takes {gib(entry.size)} and does not fit next to the pinned {names}", code=NO_ROOM
                )
            try:
                await self.loader.load(entry)
            except ApiError:
                entry.mode = before
                raise
        elif mode is Mode.OFF:
            entry.refuse(ApiError(404, f"the model {entry.name!r} is not served here", param="model", code="model_not_found"))
            await self.loader.unload(entry, "operator", self.settings.grace)
        return entry

    async def load_adapter(self, name: str, path: Path, base: str | None = None) -> str:
        """Load an adapter of a model while the server runs: the model is loaded again with it. Raises ApiError."""
        entry = self._adaptable(base)
        if name in self.names:
            raise ApiError(400, f"the name {name[:100]!r} is taken; unload that adapter first", param="lora_name")
        before = named_adapters(entry.llm.settings.get("adapter"))
        settings = ModelSettings(**{k: v for k, v in entry.llm.settings.items() if k in ModelSettings.__struct_fields__})
        try:
            named_adapters(",".join(f"{each}={place}" for each, place in {**before, name: path}.items()))
            async with self.use(entry.name):
                await asyncio.to_thread(check_adapter, entry.llm.opened, settings, name, path)
        except (ValueError, OSError) as error:
            raise ApiError(400, " ".join(str(error).split()), param="lora_path", code="invalid_adapter") from None
        await self._with_adapters(entry, {**before, name: path})
        return name

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter: the model is loaded again without it. Raises ApiError."""
        entry = self._adapters.get(name)
        if entry is None:
            known = ", ".join(map(repr, self._adapters)) or "there is none"
            raise ApiError(404, f"the adapter {name[:100]!r} is not loaded; loaded: {known}", param="lora_name")
        paths = named_adapters(entry.llm.settings.get("adapter"))
        await self._with_adapters(entry, {each: path for each, path in paths.items() if each != name})

    def _adaptable(self, base: str | None) -> ServedModel:
        """The model for an adapter. Raises ApiError."""
        if base is None and len(self.served) > 1:
            raise ApiError(400, "there are several models; name the adapter's in base_model", param="base_model")
        entry = self.served[0] if base is None else self.listed(base)
        if entry.llm.settings.get("key_file") is not None:
            raise ApiError(400, "engines on other hosts have adapters of their own; give them to headrace engine")
        return entry

    async def _with_adapters(self, entry: ServedModel, paths: Mapping[str, Path]) -> None:
        """Load a model again with other adapters; with those from before if that fails. Raises ApiError."""
        before = named_adapters(entry.llm.settings.get("adapter"))
        async with self._adapting:
            try:
                await self.loader.reload(entry, lambda: entry.llm.set_adapters(paths))
            except ApiError:
                entry.retry = 0.0
                await self.loader.reload(entry, lambda: entry.llm.set_adapters(before))
                await self.loader.load(entry)
                raise
            finally:
                self._adapters = _adapters_of(list(self._entries.values()))

    # -- the server ----------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Start loading the models that are loaded at the start."""
        for entry in self._first:
            entry.begun = time.monotonic()
            entry.llm.begin()
        self._task = asyncio.create_task(self.loader.run())

    @property
    def _first(self) -> list[ServedModel]:
        """The models that are loaded at the start."""
        return [one for one in self.served if one.preload or one.mode is Mode.PINNED or self.loader.budget is None]

    async def ready(self) -> list[Service]:
        """Wait until the models that are loaded at the start are ready, and return them. Raises LoadError."""
        first = self._first
        for entry in first:
            await entry.llm.ready()
            entry.record_load()
        self._starting = False
        return [entry.service for entry in first]

    async def drain(self, grace: float) -> int:
        """Wait up to `grace` seconds for the open requests; returns how many have not ended."""
        self.loader.stop()
        ends = time.monotonic() + grace
        await asyncio.gather(*(entry.llm.drain(grace) for entry in self.all))
        # A finished answer may still be checked or stored.
        while self._using and time.monotonic() < ends:
            await asyncio.sleep(0.02)
        return max(self.open, self._using)

    @property
    def _using(self) -> int:
        return sum(entry.users for entry in self.all)

    @property
    def open(self) -> int:
        """Number of requests in the engines and their queues."""
        return sum(len(entry.llm.inflight) for entry in self.all)

    @property
    def state(self) -> tuple[State, str]:
        """The worst state of the models that are in memory or should be, and its reason."""
        entries = [one for one in self.served if one.in_memory or one.mode is Mode.PINNED]
        found = {entry.llm.state: entry.llm.detail for entry in entries}
        for state in (State.FAILING, State.STUCK, State.DEAD, State.CLOSED, State.DRAINING, State.LOADING):
            if state in found and (state is not State.LOADING or self._starting):
                return state, found[state]
        return State.READY, ""

    async def close(self) -> None:
        self.loader.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await asyncio.gather(*(entry.llm.close() for entry in self.all))

    def summary(self) -> list[str]:
        """Return lines for the operator: the memory for models, and the models that do not fit next to the pinned ones."""
        if self.loader.budget is None:
            return []
        pinned = [one.name for one in self.served if one.mode is Mode.PINNED]
        lines = [f"{gib(self.loader.budget)} for models, loaded on demand{'; pinned: ' if pinned else ''}{', '.join(pinned)}"]
        for one in self.served:
            if one.mode is not Mode.PINNED and self.loader.pinned_next_to(one):
                lines.append(f"{one.name} takes {gib(one.size)} and does not fit next to the pinned models; requests get a 503")
        return lines

    def record(self) -> None:
        """Set the metrics of memory."""
        for entry in self.all:
            metrics = entry.service.metrics
            metrics.memory.set(entry.size if entry.in_memory else 0)
            metrics.loading_waits.set(len(entry.tickets))
            for residency in Residency:
                metrics.residency.labels(entry.name, residency.value).set(residency is entry.residency)


def _adapters_of(entries: Sequence[ServedModel]) -> dict[str, ServedModel]:
    """The model of each adapter by name. Raises SettingsError."""
    adapters: dict[str, ServedModel] = {}
    for entry in entries:
        try:
            names = entry.service.adapters
        except ValueError as error:
            raise SettingsError(f"{entry.name}: {error}") from None
        if double := next((name for name in names if name in adapters), None):
            raise SettingsError(f"two models have one name ({double}); give each its own")
        adapters |= dict.fromkeys(names, entry)
    return adapters


def _check_names(entries: Sequence[ServedModel], cascades: Sequence[CascadeSettings]) -> None:
    served = [one.name for one in entries if one.mode is not Mode.OFF]
    names = [*(name for one in entries for name in (one.name, *one.aliases)), *(one.name for one in cascades)]
    names += [name for one in entries for name in one.service.adapters]
    if double := _repeated(names):
        raise SettingsError(f"two models have one name ({double}); give each its own")
    if not served:
        raise SettingsError("all models are off; set the mode of one to 'pinned' or 'on demand'")
    for one in cascades:
        if unknown := [tier for tier in one.tiers if tier not in served]:
            raise SettingsError(f"the cascade {one.name!r} names {unknown[0]!r}; choose from {', '.join(served)}")


def _repeated(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next((name for name in names if name in seen or seen.add(name)), "")  # type: ignore[func-returns-value]


def _check_sizes(entries: Sequence[ServedModel], budget: int) -> None:
    """Raises SettingsError for models that can never be in memory: alone, or the ones of the start together."""
    for one in entries:
        if one.size > budget and one.mode is not Mode.OFF:
            raise SettingsError(
                f"{one.name} takes about {gib(one.size)} and models may have {gib(budget)} together, so it would "
                "never be loaded; raise model_memory, or leave it out"
            )
    first = [one for one in entries if one.mode is Mode.PINNED or (one.preload and one.mode is not Mode.OFF)]
    if (need := sum(one.size for one in first)) > budget:
        raise SettingsError(
            f"{', '.join(one.name for one in first)} are pinned or loaded at the start and take about {gib(need)} together, "
            f"and models may have {gib(budget)}; raise model_memory, or pin and preload fewer"
        )
