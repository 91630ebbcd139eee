"""/v1/models, the operator's routes below /models, and the use of a model by a request."""

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from headrace.server.access.principals import PRINCIPAL
from headrace.server.engines.inflight import DeadlineError
from headrace.server.engines.models import Models, ServedModel, Service
from headrace.server.engines.served_model import Residency
from headrace.server.http.api_error import ApiError
from headrace.server.http.limits_check import StrictStruct
from headrace.server.protocols.cascade import Cascade
from headrace.server.protocols.openai_types import Calibrated, Exit, Model, TokenCascade
from headrace.server.protocols.routes import Api, Call
from headrace.server.protocols.schemas import MODEL, MODELS, OPERATED, OPERATED_MODELS
from headrace.server.protocols.stream import unless_disconnected
from headrace.server.settings import Mode
from headrace.startup.adapters import named_adapters
from headrace.startup.thresholds import CalibratedThreshold
from headrace.weights.defaults import as_json

Body = TypeVar("Body")
WAITED = 0.01  # seconds from which the time of a load is taken off a request's deadline


class ModelName(StrictStruct):
    """The body of /models/load and /models/unload."""

    model: str


class AdapterToLoad(StrictStruct):
    """The body of /v1/load_lora_adapter. lora_path: below the folder of --adapters-from. base_model: needed if there are
    several models."""

    lora_name: str
    lora_path: str
    base_model: str | None = None


class AdapterToUnload(StrictStruct):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str


class ModelMode(StrictStruct):
    """The body of /models/mode."""

    model: str
    mode: Mode


@asynccontextmanager
async def use_model(
    models: Models, name: str | None, http: Request, deadline: float | None = None, *, speech: bool | None = False
) -> AsyncIterator[Service]:
    """`Models.use` for a request, which waits for its model at most until its deadline or its client's end.

    speech: whether it needs a speech model; None: any model will do. Raises ApiError (400) for the other kind.
    """
    seconds = models.settings.limits.deadline if deadline is None else deadline
    async with models.use(name, seconds=seconds, wait=partial(unless_disconnected, http)) as service:
        if speech is not None:
            service.check_kind(speech)
        yield service


def with_time_left(body: Body, service: Service, begun: float) -> Body:
    """The body of a request that arrived at `begun` (time.monotonic), with the rest of its deadline after a load."""
    waited = time.monotonic() - begun
    seconds = service.deadline(getattr(body, "deadline", None))
    if seconds is None or waited < WAITED:
        return body
    if waited >= seconds:
        raise DeadlineError(f"the request was not answered within its deadline of {seconds:g} s")
    changed: Body = msgspec.structs.replace(body, deadline=seconds - waited)  # type: ignore[type-var]
    return changed


def add_models(api: Api, models: Models, cascades: Mapping[str, Cascade]) -> None:
    """/v1/models."""

    @api.get("/v1/models", MODELS)
    async def listed(call: Call) -> Any:
        mine = [cascade.model() for name, cascade in cascades.items() if PRINCIPAL.get().may_use(name)]
        adapted = [_adapter(*one) for one in models.usable_adapters()]
        return {"object": "list", "data": [*map(_model, models.usable()), *adapted, *mine]}

    @api.get("/v1/models/{name:path}", MODEL)
    async def model(call: Call) -> Any:
        if not call.name:
            raise HTTPException(404)
        if call.name in cascades and PRINCIPAL.get().may_use(call.name):
            return cascades[call.name].model()
        entry = models.entry(call.name)
        return _adapter(call.name, entry) if call.name in entry.service.adapters else _model(entry)


def add_operation(api: Api, models: Models) -> None:
    """/models: the operator lists, loads, unloads and pins models."""

    @api.get("/models", OPERATED_MODELS)
    async def listed(call: Call) -> Any:
        _check_operator()
        return {"object": "list", "data": list(map(_operated, models.all)), "model_memory": models.loader.budget}

    @api.post("/models/load", OPERATED, ModelName)
    async def load(call: Call) -> Any:
        _check_operator()
        return _operated(await models.load(call.body.model))

    @api.post("/models/unload", OPERATED, ModelName)
    async def unload(call: Call) -> Any:
        _check_operator()
        return _operated(await models.unload(call.body.model))

    @api.post("/models/mode", OPERATED, ModelMode)
    async def mode(call: Call) -> Any:
        _check_operator()
        return _operated(await models.set_mode(call.body.model, call.body.mode))


def add_adapters(api: Api, models: Models, folder: Path) -> None:
    """The operator loads and unloads adapters from a folder; paths, fields and names of the routes are vLLM's."""

    @api.post("/v1/load_lora_adapter", MODEL, AdapterToLoad)
    async def load(call: Call) -> Any:
        _check_operator()
        body: AdapterToLoad = call.body
        name = await models.load_adapter(body.lora_name, _below(folder, body.lora_path), body.base_model)
        return _adapter(name, models.entry(name))

    @api.post("/v1/unload_lora_adapter", MODEL, AdapterToUnload)
    async def unload(call: Call) -> Any:
        _check_operator()
        entry = models.entry(call.body.lora_name)
        await models.unload_adapter(call.body.lora_name)
        return _model(entry)


def _below(folder: Path, given: str) -> Path:
    """A path inside the folder. Raises ApiError for one outside, also through a link, and for a missing one."""
    root = folder.resolve()
    path = (root / given).resolve()
    if "\0" in given or "," in given or not path.is_relative_to(root) or path == root or not path.exists():
        raise ApiError(400, "lora_path must be an adapter in the folder of --adapters-from", param="lora_path")
    return path


def _check_operator() -> None:
    """Raises ApiError (403) unless the key may load and unload models."""
    if not PRINCIPAL.get().operates:
        raise ApiError(403, "this key may not manage models; use one with operator = true", code="not_operator")


def _operated(entry: ServedModel) -> dict[str, Any]:
    """A model for the operator."""
    return {
        "id": entry.name,
        "object": "model",
        "state": entry.residency,
        "mode": entry.mode,
        "aliases": list(entry.aliases),
        "bytes": entry.size,
        "progress": round(entry.progress, 2),
        "requests": max(entry.users, len(entry.llm.inflight)),
        "waiting": len(entry.tickets),
        "idle_seconds": None if not entry.used or entry.busy else round(time.monotonic() - entry.used, 1),
        "failures": entry.failures,
    }


def _model(entry: ServedModel) -> Model:
    service = entry.service
    loaded = service.llm.loaded
    name, created, state = service.name, service.created, service.llm.state
    model = Model(name, created, None, state)
    if loaded is not None:
        model.max_model_len, model.defaults = loaded.max_model_len, as_json(service.defaults)
        if loaded.exit:
            model.exit = Exit(loaded.exit, loaded.layers, _rule(loaded.rule))
        elif (smaller := service.llm.settings.get("cascade")) is not None:
            model.cascade = TokenCascade(Path(str(smaller)).name.removesuffix(".gguf"), loaded.layers, _rule(loaded.rule))
    model.state, model.mode, model.aliases = entry.residency, entry.mode, list(entry.aliases)
    if entry.transcribes:
        model.transcribes = True
    if entry.size:
        model.bytes = entry.size
    if entry.residency is Residency.LOADING:
        model.progress = round(entry.progress, 2)
    return model


def _adapter(name: str, entry: ServedModel) -> Model:
    """An adapter of a model, under its own name."""
    model = _model(entry)
    model.id, model.parent, model.aliases, model.bytes = name, entry.name, msgspec.UNSET, msgspec.UNSET
    model.root = named_adapters(entry.llm.settings.get("adapter"))[name].name
    return model


def _rule(rule: CalibratedThreshold | None) -> Calibrated | msgspec.UnsetType:
    return msgspec.UNSET if rule is None else Calibrated(rule.criterion, rule.threshold, rule.decay, rule.summary())
