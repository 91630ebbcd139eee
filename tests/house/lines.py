"""A protocol: a text in, lines of plain text out, one an answer."""

from typing import Annotated

from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from headrace.server.engines.inflight import Ticket, deltas
from headrace.server.engines.service import Service
from headrace.server.http.api_error import bad
from headrace.server.protocols.fields import Sampling
from headrace.server.protocols.sampling import not_built, sampling_params
from headrace.server.protocols.stream import unless_gone
from headrace.server.protocols.structured import asked_form
from headrace.weights.defaults import values


class LinesRequest(Sampling, kw_only=True):
    """POST /v1/lines."""

    prompt: Annotated[str, Meta(max_length=10_000)]


async def lines(service: Service, request: LinesRequest, http: Request, salt: bytes) -> Response:
    if request.stream_options is not None and not request.stream:
        raise bad("stream_options goes with stream: true", "stream_options")
    not_built(bool(request.stream), "stream", "lines come when they are whole")
    not_built(asked_form(request) is not None, "structured_outputs", "a line is free")
    params = sampling_params(request, values(service.llm.opened.defaults), service.limits, max_tokens=request.max_tokens)
    prompts = await service.llm.encode_all([request.prompt])
    if not prompts[0]:
        raise bad("prompt is empty; give a text", "prompt")
    tickets = service.llm.submit(prompts, params, salt=salt, deadline=service.deadline(request.deadline))
    try:
        texts = await unless_gone(http, _texts(tickets, params.n))
    finally:
        service.llm.abort(tickets)
    return Response("\n".join(texts), media_type="text/plain")


async def _texts(tickets: list[Ticket], count: int) -> list[str]:
    texts = [""] * count
    async for _, delta in deltas(tickets):
        texts[delta.index] += " ".join(delta.text.splitlines())
    return texts
