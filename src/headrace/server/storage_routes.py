"""Routes of what the server keeps: files, batches and responses."""

from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, Request
from starlette.responses import Response, StreamingResponse

from headrace.server import batches, files, responses, uploads
from headrace.server.batch_worker import BatchWorker
from headrace.server.fields import BatchRequest, ResponseRequest
from headrace.server.models import Models
from headrace.server.settings import Limits
from headrace.server.store import Store

Limit = Annotated[int, Query(ge=1, le=10_000)]
After = Annotated[str | None, Query(max_length=200)]
UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
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
                            "minimum": files.SECONDS[0],
                            "maximum": files.SECONDS[1],
                        },
                    },
                }
            }
        },
    }
}


def add_files(app: FastAPI, store: Store, limits: Limits) -> None:
    """/v1/files."""

    @app.post("/v1/files", openapi_extra=UPLOAD)
    async def upload(request: Request) -> Response:
        return _json(await uploads.upload(store, request, limits))

    @app.get("/v1/files")
    async def listed(
        purpose: Annotated[str | None, Query(max_length=64)] = None,
        after: After = None,
        limit: Limit = 10_000,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        return _json(await files.listed(store, purpose, after, limit, order))

    @app.get("/v1/files/{name}")
    async def one(name: str) -> Response:
        return _json(await files.one(store, name))

    @app.delete("/v1/files/{name}")
    async def delete(name: str) -> Response:
        return _json(await files.delete(store, name))

    @app.get("/v1/files/{name}/content")
    async def content(name: str) -> Response:
        size, pieces = await files.content(store, name)
        headers = {"X-Content-Type-Options": "nosniff", "Content-Disposition": "attachment", "Content-Length": str(size)}
        return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")


def add_batches(app: FastAPI, store: Store, limits: Limits, worker: BatchWorker) -> None:
    """/v1/batches."""

    @app.post("/v1/batches")
    async def create(body: BatchRequest) -> Response:
        made = await batches.create(store, body, limits)
        worker.poke()
        return _json(made)

    @app.get("/v1/batches")
    async def listed(after: After = None, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> Response:
        return _json(await batches.listed(store, after, limit))

    @app.get("/v1/batches/{name}")
    async def one(name: str) -> Response:
        return _json(await batches.find(store, name))

    @app.post("/v1/batches/{name}/cancel")
    async def cancel(name: str) -> Response:
        made = await batches.cancel(store, name)
        worker.poke()
        return _json(made)


def add_responses(app: FastAPI, models: Models, store: Store) -> None:
    """/v1/responses."""

    @app.post("/v1/responses")
    async def respond(body: ResponseRequest, request: Request) -> Response:
        salt = b"" if body.cache_salt is None else body.cache_salt.encode()
        async with models.use(body.model) as service:
            return responses.as_response(await responses.respond(service, store, body, request, salt))

    @app.get("/v1/responses/{name}")
    async def one(name: str) -> Response:
        return _json(await responses.find(store, name))

    @app.delete("/v1/responses/{name}")
    async def delete(name: str) -> Response:
        return _json(await responses.delete(store, name))

    @app.get("/v1/responses/{name}/input_items")
    async def heard(
        name: str,
        after: After = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        return _json(await responses.input_items(store, name, after, limit, order))


def _json(data: Any) -> Response:
    return Response(msgspec.json.encode(data), media_type="application/json")
