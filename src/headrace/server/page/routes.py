"""The page's routes."""

from collections.abc import Awaitable, Callable
from typing import Annotated

import msgspec
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import Response

from headrace.server.bounds import Strict
from headrace.server.page import files
from headrace.server.page.markdown import MAX_TEXT, rendered


class RenderRequest(Strict):
    """POST /page/render."""

    text: Annotated[str, Field(max_length=MAX_TEXT)]


def add_page(app: FastAPI) -> None:
    """GET / and what it loads, and POST /page/render."""
    for path, file in files.load().items():
        app.add_api_route(path, _sender(file), methods=["GET"], include_in_schema=False)

    @app.post("/page/render")
    async def html(body: RenderRequest) -> Response:
        return Response(msgspec.json.encode({"html": await rendered(body.text)}), media_type="application/json")


def _sender(file: files.StaticFile) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        headers = {**files.HEADERS, "ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.kind)

    return send
