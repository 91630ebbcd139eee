"""The application: routes, and errors as the protocol writes them."""

import gc
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response

from headrace import __version__
from headrace.confined.pool import BusyError
from headrace.data.params import ParamError
from headrace.server import chat, completions, embeddings, tokens
from headrace.server.answers import Model
from headrace.server.async_llm import (
    DeadlineError,
    EngineDownError,
    QueueFullError,
    RequestFailedError,
    RequestRefusedError,
    State,
)
from headrace.server.batch_worker import BatchWorker
from headrace.server.errors import RETRY_DOWN, TOO_LONG, ApiError, as_api_error, blamed
from headrace.server.fields import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    ResponseRequest,
    TokenizeRequest,
)
from headrace.server.guard import Guard
from headrace.server.keys import Keys
from headrace.server.models import Models
from headrace.server.page.routes import add_page
from headrace.server.principals import PRINCIPAL, QuotaError
from headrace.server.schemas import CHAT, COMPLETION, EMBEDDINGS, describe
from headrace.server.service import Service
from headrace.server.storage_routes import add_batches, add_files, add_responses
from headrace.server.store import Store
from headrace.server.stream import ClientGoneError
from headrace.text.chat import TemplateError
from headrace.text.tokenizer import TokenizerError

log = logging.getLogger("headrace.server")

KNOWN_ERRORS = (
    ApiError,
    BusyError,
    QuotaError,
    QueueFullError,
    DeadlineError,
    EngineDownError,
    RequestFailedError,
    RequestRefusedError,
    ParamError,
    TemplateError,
    TokenizerError,
)


@dataclass(frozen=True, slots=True)
class Protocol:
    """A path on which models answer. Requests say `model` and `cache_salt`."""

    path: str
    body: type[BaseModel]
    answer: Callable[[Service, Any, Request, bytes], Awaitable[Any]]  # raises what `as_api_error` knows, and ClientGoneError
    text: str  # the field with what goes to the model
    content: dict[str, Any]  # what a 200 holds


PROTOCOLS = (
    Protocol("/v1/completions", CompletionRequest, completions.complete, "prompt", COMPLETION),
    Protocol("/v1/chat/completions", ChatRequest, chat.chat, "messages", CHAT),
    Protocol("/v1/embeddings", EmbeddingRequest, embeddings.embed, "input", EMBEDDINGS),
)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(slots=True)
class Application:
    """What a server runs: the door, and the worker that goes behind it."""

    door: Guard
    worker: BatchWorker


def make_app(models: Models, store: Store, keys: Keys) -> Application:
    """The whole ASGI application of a server's models."""
    app = FastAPI(title="Headrace", docs_url=None, redoc_url=None)
    app.router.route_class = StrictRoute
    worker = BatchWorker(app, store, models.settings.limits.batch_bytes, keys.named)
    _add_protocol(app, models)
    _add_tools(app, models, worker)
    add_page(app)
    add_files(app, store, models.settings.limits)
    add_batches(app, store, models.settings.limits, worker)
    add_responses(app, models, store)
    _add_errors(app)
    describe(app, {protocol.path: protocol.content for protocol in PROTOCOLS})
    return Application(Guard(app, models.settings, keys, models.figures.count), worker)


class StrictRequest(Request):
    """JSON as the standard has it: no NaN, no lone surrogates, bounded nesting."""

    async def json(self) -> Any:
        body = await self.body()
        collects = gc.isenabled()
        gc.disable()  # else what is being built would be walked through again and again; JSON has no cycles
        try:
            return msgspec.json.decode(body)
        finally:
            if collects:
                gc.enable()


class StrictRoute(APIRoute):
    """A route whose body is read so, and that knows every parameter of its queries."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        known = {parameter.alias for parameter in self.dependant.query_params}

        async def strict(request: Request) -> Response:
            if request.url.path.startswith("/v1/") and (unknown := sorted(set(request.query_params) - known)):
                name = unknown[0][:100]
                return _error(ApiError(400, f"unknown parameter {name!r}; remove it", param=name, code="unknown_parameter"))
            return await handle(StrictRequest(request.scope, request.receive))

        return strict


def _add_protocol(app: FastAPI, models: Models) -> None:
    @app.get("/v1/models")
    async def listed() -> Response:
        return _json({"object": "list", "data": [_model(service) for service in models.services]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return _json(_model(models.find(name)))

    for protocol in PROTOCOLS:
        app.post(protocol.path, name=protocol.answer.__name__)(_asker(models, protocol))


def _asker(models: Models, protocol: Protocol) -> Callable[..., Awaitable[Response]]:
    async def ask(body: protocol.body, request: Request) -> Response:  # type: ignore[name-defined]
        async with models.use(body.model) as service:
            return _json(await protocol.answer(service, body, request, _salt(body.cache_salt)))

    return ask


def _add_tools(app: FastAPI, models: Models, worker: BatchWorker) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        async with models.use(body.model) as service:
            return _json(await tokens.tokenize(service, body))

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        async with models.use(body.model) as service:
            return _json(tokens.detokenize(service, body))

    @app.get("/health")
    async def health() -> Response:
        state, detail = models.state
        said: dict[str, Any] = {"status": str(state), "detail": detail}
        said["restarts"] = sum(service.llm.restarts for service in models.services)
        if len(models.services) > 1:
            said["models"] = {service.name: str(service.llm.state) for service in models.services}
        if worker.trouble:
            said["batches"] = worker.trouble
        if state is State.READY:
            return _json(said)
        return _unready(said)

    @app.get("/live")
    async def live() -> Response:
        return _json({"status": "live"})  # whatever its engines do: a probe that fails ends the server

    @app.get("/ready")
    async def ready() -> Response:
        state, _ = models.state
        return _json({"status": str(state)}) if state is State.READY else _unready({"status": str(state)})

    @app.get("/version")
    async def version() -> Response:
        return _json({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        for service in models.services:
            service.metrics.restarts.set(service.llm.restarts)
        return Response(models.figures.text(PRINCIPAL.get()), media_type=METRICS_TYPE)


def _add_errors(app: FastAPI) -> None:
    text_fields = {protocol.path: (protocol.body, protocol.text) for protocol in PROTOCOLS}
    text_fields["/v1/responses"] = (ResponseRequest, "input")

    async def known_error(request: Request, error: Exception) -> Response:
        made = as_api_error(error) or ApiError(500, "internal error")
        if made.param is None and made.status == 400 and request.url.path in text_fields:
            body, said = text_fields[request.url.path]
            made.param = said if made.code == TOO_LONG else blamed(made.message, body.model_fields, said)
        return _error(made)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return _error(_as_bad_field(error))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = {
            400: "the body is not JSON, or is nested too deeply",
            404: "there is nothing at this path",
            405: "this path has no such method",
        }
        return _error(ApiError(error.status_code, what.get(error.status_code, str(error.detail))))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def mistake(request: Request, error: Exception) -> Response:
        return _error(ApiError(500, "the server made a mistake; its log says more", code="internal_error"))

    for kind in KNOWN_ERRORS:
        app.add_exception_handler(kind, known_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, mistake)


def _as_bad_field(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, and where. What was sent is not repeated."""
    first = error.errors()[0]
    path = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    param = path[0][:100] if path else None
    where = ".".join(path)[:200]
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"unknown field {where!r}; remove it", param=param, code="unknown_field")
    if first["type"] == "missing":
        return ApiError(400, f"{where or 'the body'} is missing; give it", param=param, code="missing_field")
    return ApiError(400, f"{where or 'the body'}: {str(first['msg'])[:300]}", param=param, code="invalid_value")


def _error(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers(), "application/json")


def _unready(said: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(said), 503, {"Retry-After": str(RETRY_DOWN)}, "application/json")


def _json(data: Any) -> Response:
    return data if isinstance(data, Response) else Response(msgspec.json.encode(data), media_type="application/json")


def _model(service: Service) -> Model:
    loaded = service.llm.loaded
    return Model(service.name, service.created, loaded.max_model_len if loaded is not None else None)


def _salt(salt: str | None) -> bytes:
    return b"" if salt is None else salt.encode()
