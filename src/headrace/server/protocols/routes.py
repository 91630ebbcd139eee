"""Routes: each is declared once, with what it reads and what it answers. The application and its document follow from that."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.server.http.body_limits import read_body, read_query
from headrace.server.http.limits_check import StrictStruct


class NoQuery(StrictStruct):
    """A query without parameters."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request as its handler gets it."""

    http: Request
    body: Any  # of the route's type; None where it has none
    query: Any

    @property
    def name(self) -> str:
        """What the path names."""
        name: str = self.http.path_params["name"]
        return name


Handler = Callable[[Call], Awaitable[Any]]  # gives a Response, or what is encoded as one
Content = dict[str, Any]  # media type -> {"schema"}, as the document has it


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A method of a path. A `form` is a body that is no JSON, which its handler reads."""

    method: str
    path: str  # {name} is one part, {name:path} all that is left
    answer: Content  # what a 200 holds
    handle: Handler
    body: type[StrictStruct] | None = None
    query: type[StrictStruct] = NoQuery
    form: Content | None = None


@dataclass(slots=True)
class Api:
    """The endpoints of a server, in the order in which they are tried."""

    endpoints: list[Endpoint] = field(default_factory=list)

    def get(self, path: str, answer: Content, query: type[StrictStruct] = NoQuery) -> Callable[[Handler], Handler]:
        return self._adding("GET", path, answer, query=query)

    def post(
        self, path: str, answer: Content, body: type[StrictStruct] | None = None, form: Content | None = None
    ) -> Callable[[Handler], Handler]:
        return self._adding("POST", path, answer, body=body, form=form)

    def delete(self, path: str, answer: Content) -> Callable[[Handler], Handler]:
        return self._adding("DELETE", path, answer)

    def routes(self) -> list[Route]:
        return [Route(one.path, _handler(one), methods=[one.method]) for one in self.endpoints]

    def _adding(self, method: str, path: str, answer: Content, **more: Any) -> Callable[[Handler], Handler]:
        def add(handle: Handler) -> Handler:
            self.endpoints.append(Endpoint(method, path, answer, handle, **more))
            return handle

        return add


def as_response(result: Any) -> Response:
    """What a handler gave, as it is sent."""
    return result if isinstance(result, Response) else Response(msgspec.json.encode(result), media_type="application/json")


def _handler(one: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """Unknown parameters of a query are errors where the protocol speaks, and nothing's concern at probes."""
    strict = one.path.startswith("/v1/")

    async def serve(request: Request) -> Response:
        query = read_query(dict(request.query_params), one.query) if strict else None
        body = None if one.body is None else read_body(await request.body(), one.body)
        return as_response(await one.handle(Call(request, body, query)))

    return serve
