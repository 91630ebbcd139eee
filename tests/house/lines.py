"""A protocol: a text in; one line of plain text for each answer out, or server-sent events with the parts of the lines."""

from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta
from starlette.responses import Response

from headrace.server.protocols.fields import Sampling
from headrace.server.protocols.generation import Answer, AnswerEvent, GenerationRequest, TextProtocol, Writer
from headrace.server.protocols.logprobs import EncodedLogprobs
from headrace.server.protocols.prompts import Texts
from headrace.server.protocols.sampling import check_stream_options


class LinesRequest(Sampling, kw_only=True):  # type: ignore[call-arg]
    """POST /v1/lines."""

    prompt: Annotated[str, Meta(max_length=10_000)]


def read(body: LinesRequest) -> GenerationRequest:
    check_stream_options(body)
    return GenerationRequest(body, Texts(body.prompt), max_tokens=body.max_tokens, form_field="structured_outputs")


def one_line(text: str) -> str:
    return text.replace("\n", " ")


class LinesWriter(Writer):
    """Each event of a stream has the number of its answer and the new text."""

    def chunks(self, event: AnswerEvent, logprobs: EncodedLogprobs | None) -> Iterable[bytes]:
        yield f"data: {event.index} {one_line(event.text)}\n\n".encode()

    def complete(self, answers: list[Answer]) -> Response:
        return Response("\n".join(one_line(answer.text) for answer in answers), media_type="text/plain")


LINES = TextProtocol(read, LinesWriter)
