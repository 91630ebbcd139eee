"""Routes of stored objects: files, batches and responses."""

import time
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.responses import StreamingResponse

from headrace.server.engines.models import Models
from headrace.server.http.limits_check import Name, StrictStruct
from headrace.server.protocols.cascade import Cascade, find_cascade
from headrace.server.protocols.fields import BatchRequest, InputTokensRequest, ResponseRequest
from headrace.server.protocols.generation import generate
from headrace.server.protocols.models import use_model, with_time_left
from headrace.server.protocols.routes import Api, Call
from headrace.server.protocols.schemas import (
    BATCH,
    BATCHES,
    FILE,
    FILES,
    INPUT_TOKENS,
    ITEMS,
    RESPONSE,
    RESPONSES,
    content,
    deleted,
    plain,
)
from headrace.server.settings import Limits
from headrace.server.storage import batches, files, responses, uploads
from headrace.server.storage.batch_worker import BatchWorker
from headrace.server.storage.store import Store

OCTETS = "application/octet-stream"
UPLOAD = {
    "multipart/form-data": {
        "schema": {
            "type": "object",
            "required": ["purpose", "file"],
            "additionalProperties": False,
            "properties": {
                "purpose": {"type": "string", "enum": list(files.PURPOSES)},
                "file": {"type": "string", "format": "binary"},
                "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                "expires_after[seconds]": {
                    "type": "integer",
                    "minimum": files.LIFETIME_SECONDS[0],
                    "maximum": files.LIFETIME_SECONDS[1],
                },
            },
        }
    }
}
PageSize = Annotated[int, Meta(ge=1, le=100)]


class FilesQuery(StrictStruct, kw_only=True):
    """GET /v1/files."""

    purpose: Annotated[str, Meta(max_length=64)] | None = None
    after: Name | None = None
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"


class BatchesQuery(StrictStruct, kw_only=True):
    """GET /v1/batches."""

    after: Name | None = None
    limit: PageSize = 20


class ItemsQuery(StrictStruct, kw_only=True):
    """GET /v1/responses/{name}/input_items."""

    after: Name | None = None
    limit: PageSize = 20
    order: Literal["asc", "desc"] = "desc"


def add_files(api: Api, store: Store, limits: Limits) -> None:
    """/v1/files."""

    @api.post("/v1/files", content(FILE), form=UPLOAD)
    async def upload(call: Call) -> Any:
        return await uploads.upload(store, call.http, limits)

    @api.get("/v1/files", FILES, FilesQuery)
    async def listed(call: Call) -> Any:
        query: FilesQuery = call.query
        return await files.list_files(store, query.purpose, query.after, query.limit, query.order)

    @api.get("/v1/files/{name}", content(FILE))
    async def one(call: Call) -> Any:
        return await files.describe(store, call.name)

    @api.delete("/v1/files/{name}", deleted("file"))
    async def delete(call: Call) -> Any:
        return await files.delete(store, call.name)

    @api.get("/v1/files/{name}/content", plain(OCTETS))
    async def read(call: Call) -> Any:
        size, pieces = await files.content(store, call.name)
        headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment", "Content-Length": str(size)}
        return StreamingResponse(pieces, headers=headers, media_type=OCTETS)


def add_batches(api: Api, store: Store, limits: Limits, worker: BatchWorker) -> None:
    """/v1/batches."""

    @api.post("/v1/batches", content(BATCH), BatchRequest)
    async def create(call: Call) -> Any:
        batch = await batches.create(store, call.body, limits)
        worker.wake()
        return batch

    @api.get("/v1/batches", BATCHES, BatchesQuery)
    async def listed(call: Call) -> Any:
        return await batches.list_batches(store, call.query.after, call.query.limit)

    @api.get("/v1/batches/{name}", content(BATCH))
    async def one(call: Call) -> Any:
        return await batches.find(store, call.name)

    @api.post("/v1/batches/{name}/cancel", content(BATCH))
    async def cancel(call: Call) -> Any:
        batch = await batches.cancel(store, call.name)
        worker.wake()
        return batch


def add_responses(api: Api, models: Models, cascades: Mapping[str, Cascade], store: Store) -> None:
    """/v1/responses."""

    @api.post("/v1/responses", RESPONSES, ResponseRequest)
    async def respond(call: Call) -> Any:
        body: ResponseRequest = call.body
        limits = models.settings.limits
        if (cascade := find_cascade(cascades, body.model)) is not None:
            return await responses.respond(cascade.generate, limits, store, body, call.http)
        begun = time.monotonic()
        async with use_model(models, body.model, call.http, body.deadline) as service:
            body = with_time_left(body, service, begun)
            return await responses.respond(partial(generate, service), limits, store, body, call.http)

    @api.post("/v1/responses/input_tokens", INPUT_TOKENS, InputTokensRequest)
    async def count(call: Call) -> Any:
        async with use_model(models, call.body.model, call.http) as service:
            return await responses.count_input(service, models.settings.limits, store, call.body)

    @api.post("/v1/responses/{name}/cancel", content(RESPONSE))
    async def cancel(call: Call) -> Any:
        return await responses.cancel(store, call.name)

    @api.get("/v1/responses/{name}", content(RESPONSE))
    async def one(call: Call) -> Any:
        return await responses.find(store, call.name)

    @api.delete("/v1/responses/{name}", deleted("response"))
    async def delete(call: Call) -> Any:
        return await responses.delete(store, call.name)

    @api.get("/v1/responses/{name}/input_items", ITEMS, ItemsQuery)
    async def heard(call: Call) -> Any:
        query: ItemsQuery = call.query
        return await responses.input_items(store, call.name, query.after, query.limit, query.order)
