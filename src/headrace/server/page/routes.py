"""Routes of the page, and its static files, read once; no request names a path."""

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, Any

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.server.http.limits_check import StrictStruct
from headrace.server.page.markdown import MAX_TEXT, code_css, render_confined
from headrace.server.protocols.routes import Api, Call
from headrace.server.protocols.schemas import HTML

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "woff2": "font/woff2",
    "txt": "text/plain; charset=utf-8",
}
STATIC = tuple(
    "index.html style.css chat.css dashboard.css icon.svg inter.woff2 inter.txt main.js api.js answer.js attach.js buttons.js "
    "chat.js conversations.js dashboard.js dom.js exits.js export.js figures.js icons.js markdown.js panel.js plot.js "
    "record.js request.js storage.js texts.js thoughts.js tokens.js versions.js".split()
)
CODE_CSS = "code.css"  # generated: the colours of code
# Files by path. They need no key: they are the same for all users, and ask for the key.
PATHS = {"/" if name == "index.html" else f"/page/{name}": name for name in (*STATIC, CODE_CSS)}

HEADERS = {
    # Nothing inline, nothing of another host, and HTML only through the one policy of dom.js.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types headrace",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """Response of one path."""

    data: bytes
    kind: str
    tag: str  # ETag, a hash of the data


def load() -> dict[str, StaticFile]:
    """Read all files of the page, by path."""
    folder = files(__package__) / "static"
    assets = {}
    for path, name in PATHS.items():
        data = code_css().encode() if name == CODE_CSS else (folder / name).read_bytes()
        assets[path] = StaticFile(data, KINDS[name.rpartition(".")[2]], f'"{hashlib.sha256(data).hexdigest()[:16]}"')
    return assets


class RenderRequest(StrictStruct, kw_only=True):
    """Body of POST /page/render."""

    text: Annotated[str, Meta(max_length=MAX_TEXT)]


def add_page(api: Api) -> None:
    """Add POST /page/render."""

    @api.post("/page/render", HTML, RenderRequest)
    async def html(call: Call) -> Any:
        return {"html": await render_confined(call.body.text)}


def file_routes(records: Callable[[], bool]) -> list[Route]:
    """Routes of the page's static files. records: whether the page may use the microphone."""
    return [Route(path, _sender(file, records), methods=["GET"]) for path, file in load().items()]


def _sender(file: StaticFile, records: Callable[[], bool]) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        microphone = f"microphone={'(self)' if records() else '()'}"
        headers = {**HEADERS, "Permissions-Policy": microphone, "ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.data, headers=headers, media_type=file.kind)

    return send
