"""Endpoints, each declared once with its request and its answer. The routes and the OpenAPI document derive from that."""

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
    """One request for a handler."""

    http: Request
    body: Any  # of the endpoint's type; None if it has none
    query: Any

    @property
    def name(self) -> str:
        """The parameter {name} of the path."""
        name: str = self.http.path_params["name"]
        return name


# Returns a Response, or an object to encode as JSON.
Handler = Callable[[Call], Awaitable[Any]]
# Media type -> {"schema"}, as in the OpenAPI document.
Content = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of a path. A `form` is a body other than JSON, which the handler reads itself."""

    method: str
    path: str  # {name} is one segment, {name:path} the rest
    answer: Content  # of status 200
    handle: Handler
    body: type[StrictStruct] | None = None
    query: type[StrictStruct] = NoQuery
    form: Content | None = None


@dataclass(slots=True)
class Api:
    """The endpoints of a server. The first match answers."""

    endpoints: list[Endpoint] = field(default_factory=list)

    def get(self, path: str, answer: Content, query: type[StrictStruct] = NoQuery) -> Callable[[Handler], Handler]:
        return self._register("GET", path, answer, query=query)

    def post(
        self, path: str, answer: Content, body: type[StrictStruct] | None = None, form: Content | None = None
    ) -> Callable[[Handler], Handler]:
        return self._register("POST", path, answer, body=body, form=form)

    def delete(self, path: str, answer: Content) -> Callable[[Handler], Handler]:
        return self._register("DELETE", path, answer)

    def routes(self) -> list[Route]:
        return [Route(one.path, _handler(one), methods=[one.method]) for one in self.endpoints]

    def _register(self, method: str, path: str, answer: Content, **more: Any) -> Callable[[Handler], Handler]:
        def add(handle: Handler) -> Handler:
            self.endpoints.append(Endpoint(method, path, answer, handle, **more))
            return handle

        return add


def as_response(result: Any) -> Response:
    """The result of a handler as a response."""
    return result if isinstance(result, Response) else Response(msgspec.json.encode(result), media_type="application/json")


def _handler(one: Endpoint) -> Callable[[Request], Awaitable[Response]]:
    """The route function. Under /v1/ an unknown query parameter is an error; elsewhere, as at probes, it is ignored."""
    strict = one.path.startswith("/v1/")

    async def serve(request: Request) -> Response:
        query = read_query(dict(request.query_params), one.query) if strict else None
        body = None if one.body is None else read_body(await request.body(), one.body)
        return as_response(await one.handle(Call(request, body, query)))

    return serve
