"""The ASGI application: routes of models and state, and error responses."""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route

from headrace import __version__
from headrace.confined.pool import BusyError
from headrace.data.params import ParamError
from headrace.decoding.tools import ToolError
from headrace.server.access.keys import KeyRing
from headrace.server.access.principals import PRINCIPAL, QuotaError
from headrace.server.engines.async_llm import (
    DeadlineError,
    EngineDownError,
    QueueFullError,
    RequestFailedError,
    RequestRefusedError,
    State,
)
from headrace.server.engines.inflight import RETRY_DOWN
from headrace.server.engines.models import Models, Service
from headrace.server.http.api_error import ApiError
from headrace.server.http.errors import as_api_error, wrong_field
from headrace.server.http.guard import Guard
from headrace.server.http.limits_check import StrictStruct
from headrace.server.http.pace import PUBLIC, Pace
from headrace.server.page import routes as page_files
from headrace.server.page.routes import add_page, file_routes
from headrace.server.protocols import classify as classes
from headrace.server.protocols import embeddings
from headrace.server.protocols import rerank as reranking
from headrace.server.protocols import tokenize as tokens
from headrace.server.protocols.audio import add_audio
from headrace.server.protocols.cascade import Cascade, find_cascade
from headrace.server.protocols.chat import CHAT
from headrace.server.protocols.completions import COMPLETIONS
from headrace.server.protocols.fields import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    RerankRequest,
    ResponseRequest,
    TokenizeRequest,
)
from headrace.server.protocols.generation import TextProtocol
from headrace.server.protocols.models import add_adapters, add_models, add_operation, use_model, with_time_left
from headrace.server.protocols.routes import Api, Call, as_response
from headrace.server.protocols.schemas import (
    CHAT_ANSWER,
    CLASSES,
    COMPLETION_ANSWER,
    EMBEDDINGS,
    HEALTH,
    PROMPT,
    RANKING,
    STATUS,
    TOKENIZER,
    TOKENS,
    VERSION,
    document,
    plain,
)
from headrace.server.protocols.stream import ClientGoneError
from headrace.server.storage.batch_worker import BatchWorker
from headrace.server.storage.routes import add_batches, add_files, add_responses
from headrace.server.storage.store import Store
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
    ToolError,
)


@dataclass(frozen=True, slots=True)
class Protocol:
    """A path for requests to models. Bodies have the fields `model` and `cache_salt`."""

    path: str
    body: type[StrictStruct]
    # Raises errors that `as_api_error` maps, and ClientGoneError.
    answer: Callable[[Service, Any, Request, bytes], Awaitable[Any]]
    text: str  # the field with the input of the model
    content: dict[str, Any]  # OpenAPI content of a 200


PROTOCOLS = (
    Protocol("/v1/completions", CompletionRequest, COMPLETIONS, "prompt", COMPLETION_ANSWER),
    Protocol("/v1/chat/completions", ChatRequest, CHAT, "messages", CHAT_ANSWER),
    Protocol("/v1/embeddings", EmbeddingRequest, embeddings.embed, "input", EMBEDDINGS),
    Protocol("/v1/classify", ClassifyRequest, classes.classify, "input", CLASSES),
    Protocol("/v1/rerank", RerankRequest, reranking.rerank, "query", RANKING),
)
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def make_app(models: Models, store: Store, keys: KeyRing) -> tuple[Guard, BatchWorker]:
    """Build the guarded ASGI application of a server, and the worker that runs its batches."""
    app = Starlette()
    # Starlette's redirects are absolute, with http:// behind a TLS proxy.
    app.router.redirect_slashes = False
    worker = BatchWorker(app, store, models.settings.limits.batch_bytes, keys.named)
    api = Api()
    cascades = {name: Cascade(settings, models) for name, settings in models.cascades.items()}
    _add_protocol(api, models, cascades)
    add_audio(api, models)
    add_models(api, models, cascades)
    add_operation(api, models)
    if models.settings.adapters_from is not None:
        add_adapters(api, models, models.settings.adapters_from)
    _add_tools(api, models)
    _add_state(api, models, worker, store)
    add_page(api)
    add_files(api, store, models.settings.limits)
    add_batches(api, store, models.settings.limits, worker)
    add_responses(api, models, cascades, store)
    app.router.routes += [
        *api.routes(),
        *file_routes(lambda: any(one.transcribes for one in models.served)),
        _document_route(api),
    ]
    _add_errors(app)
    paces = (Pace(lambda: models.open > 0), Pace(lambda: models.open > 0, PUBLIC))
    return Guard(app, models.settings, keys, models.figures.count, page_files.PATHS, *paces), worker


def _document_route(api: Api) -> Route:
    described = msgspec.json.encode(document(api.endpoints))

    async def describe(request: Request) -> Response:
        return Response(described, media_type="application/json")

    return Route("/openapi.json", describe, methods=["GET"])


def _add_protocol(api: Api, models: Models, cascades: Mapping[str, Cascade]) -> None:
    for protocol in PROTOCOLS:
        api.post(protocol.path, protocol.content, protocol.body)(_model_handler(models, cascades, protocol))


def _model_handler(models: Models, cascades: Mapping[str, Cascade], protocol: Protocol) -> Callable[[Call], Awaitable[Any]]:
    async def handle(call: Call) -> Any:
        body, salt = call.body, (call.body.cache_salt or "").encode()
        if (cascade := find_cascade(cascades, body.model)) and isinstance(text := protocol.answer, TextProtocol):
            return await cascade.generate(text.read(body), text.write, call.http)
        begun = time.monotonic()
        async with use_model(models, body.model, call.http, body.deadline) as service:
            # The model must stay in use until the response exists.
            return as_response(await protocol.answer(service, with_time_left(body, service, begun), call.http, salt))

    return handle


def _add_tools(api: Api, models: Models) -> None:
    @api.post("/tokenize", TOKENS, TokenizeRequest)
    async def tokenize(call: Call) -> Any:
        async with use_model(models, call.body.model, call.http, speech=None) as service:
            return await tokens.tokenize(service, call.body)

    @api.post("/detokenize", PROMPT, DetokenizeRequest)
    async def detokenize(call: Call) -> Any:
        async with use_model(models, call.body.model, call.http, speech=None) as service:
            return await tokens.detokenize(service, call.body)

    @api.get("/tokenizer_info", TOKENIZER)
    async def tokenizer_info(call: Call) -> Any:
        async with use_model(models, call.http.query_params.get("model"), call.http, speech=None) as service:
            return tokens.tokenizer_info(service)


def _add_state(api: Api, models: Models, worker: BatchWorker, store: Store) -> None:
    @api.get("/health", HEALTH)
    async def health(call: Call) -> Any:
        state, detail = models.state
        body: dict[str, Any] = {"status": str(state), "detail": detail}
        body["restarts"] = sum(service.llm.restarts for service in models.services)
        if len(models.services) > 1:
            body["models"] = {service.name: str(service.llm.state) for service in models.services}
        if replicas := {one.name: states for one in models.services if (states := one.llm.replicas.states())}:
            body["replicas"] = replicas
        if worker.trouble:
            body["batches"] = worker.trouble
        if store.trouble:
            body["storage"] = f"the last write failed: {store.trouble}"
        return body if state is State.READY else _unready(body)

    @api.get("/live", STATUS)
    async def live(call: Call) -> Any:
        # Also without a running engine: a failed probe would end the server.
        return {"status": "live"}

    @api.get("/ready", STATUS)
    async def ready(call: Call) -> Any:
        state, _ = models.state
        return {"status": str(state)} if state is State.READY else _unready({"status": str(state)})

    @api.get("/version", VERSION)
    async def version(call: Call) -> Any:
        return {"version": __version__}

    @api.get("/metrics", plain("text/plain"))
    async def metrics(call: Call) -> Any:
        models.record()
        for service in models.services:
            service.metrics.supervise(service.llm.state, service.llm.replicas.engines, service.llm.quarantine.banned)
        return Response(models.figures.text(PRINCIPAL.get()), media_type=METRICS_TYPE)


def _add_errors(app: Starlette) -> None:
    text_fields = {protocol.path: (protocol.body, protocol.text) for protocol in PROTOCOLS}
    text_fields["/v1/responses"] = (ResponseRequest, "input")

    async def known_error(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error) or ApiError(500, "internal error")
        if api_error.param is None and api_error.status == 400 and request.url.path in text_fields:
            body, text_field = text_fields[request.url.path]
            api_error.param = wrong_field(error, body.__struct_fields__, text_field)
        return _error(api_error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        if error.status_code == 405:
            allowed = ", ".join(sorted(_methods(app, request, path)))
            refused = _error(ApiError(405, f"this path has no such method; it has {allowed}"))
            refused.headers["Allow"] = allowed
            return refused
        if error.status_code == 404:
            if path != "/" and _methods(app, request, path.rstrip("/")):
                query = f"?{request.url.query}" if request.url.query else ""
                return Response(status_code=307, headers={"Location": f"{quote(path.rstrip('/'))}{query}"})
            return _error(ApiError(404, "there is nothing at this path"))
        return _error(ApiError(error.status_code, str(error.detail)))

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # the client has closed the connection

    async def mistake(request: Request, error: Exception) -> Response:
        return _error(ApiError(500, "internal error; see the server's log", code="internal_error"))

    for kind in KNOWN_ERRORS:
        app.add_exception_handler(kind, known_error)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, mistake)


def _methods(app: Starlette, request: Request, path: str) -> set[str]:
    """The methods of the routes at a path."""
    scope = {**request.scope, "path": path}
    routes = [route for route in app.routes if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE]
    return {method for route in routes for method in route.methods or ()}


def _error(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers(), "application/json")


def _unready(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), 503, {"Retry-After": str(RETRY_DOWN)}, "application/json")
