"""Routes of the page."""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.server.http.limits_check import StrictStruct
from headrace.server.page import files
from headrace.server.page.markdown import MAX_TEXT, render_confined
from headrace.server.protocols.routes import Api, Call
from headrace.server.protocols.schemas import HTML


class RenderRequest(StrictStruct, kw_only=True):
    """Body of POST /page/render."""

    text: Annotated[str, Meta(max_length=MAX_TEXT)]


def add_page(api: Api) -> None:
    """Add POST /page/render."""

    @api.post("/page/render", HTML, RenderRequest)
    async def html(call: Call) -> Any:
        return {"html": await render_confined(call.body.text)}


def file_routes() -> list[Route]:
    """Routes of the page's static files."""
    return [Route(path, _sender(file), methods=["GET"]) for path, file in files.load().items()]


def _sender(file: files.StaticFile) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        headers = {**files.HEADERS, "ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.kind)

    return send
