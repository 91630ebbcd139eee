"""/v1/embeddings: texts or token ids to vectors of length 1."""

import asyncio
import base64
import struct
import time
from typing import Any

from starlette.requests import Request

from headrace.data.params import SamplingParams
from headrace.server.access.principals import PRINCIPAL
from headrace.server.engines.inflight import DeadlineError, InflightRequest, stream_deltas
from headrace.server.engines.models import Service
from headrace.server.http.api_error import bad
from headrace.server.protocols.fields import ClassifyRequest, EmbeddingRequest, RerankRequest
from headrace.server.protocols.sampling import priority_of
from headrace.server.protocols.stream import unless_disconnected
from headrace.server.protocols.time_slices import slices
from headrace.weights.sentence import PromptError, Sentence

# Between two checks for room in the queue.
POLL_SECONDS = 0.02
# Texts of one request that are in the queue at the same time, and that are encoded in one time slice.
GROUP_SIZE = 32
FORMATS = ("float", "base64")


async def embed(service: Service, request: EmbeddingRequest, http: Request, salt: bytes) -> dict[str, Any]:
    """Answer a request. Raises what `as_api_error` knows, and ClientGoneError."""
    sentence = service.llm.opened.sentence
    size = sentence.width(service.llm.opened.config.hidden_size)
    if request.encoding_format not in (None, *FORMATS):
        raise bad(f"encoding_format must be float or base64, not {request.encoding_format[:40]!r}", "encoding_format")
    if request.dimensions is not None and not 1 <= request.dimensions <= size:
        raise bad(f"dimensions must be 1 to {size} of this model, not {request.dimensions}", "dimensions")
    texts = await encode_inputs(service, request, _prompt(sentence, request))
    pool = request.pooling or sentence.pooling
    inflight = await unless_disconnected(http, run_in_groups(service, request, texts, salt, pool=pool))
    tokens = sum(map(len, texts))
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    data = [
        _entry(*one, request, sentence, pool) async for some in slices(list(enumerate(inflight)), GROUP_SIZE) for one in some
    ]
    return {"object": "list", "data": data, "model": service.name, "usage": used}


def _prompt(sentence: Sentence, request: EmbeddingRequest) -> str:
    """The text before each input. Raises ApiError."""
    name, field = request.prompt_name, "prompt_name"
    if request.input_type is not None:
        name, field = request.input_type, "input_type"
    given = request.input if isinstance(request.input, list) else [request.input]
    if name is not None and not all(isinstance(text, str) for text in given):
        raise bad("a prompt needs texts, not token ids; put the prompt's tokens in front of them", field)
    try:
        return sentence.prompt(name)
    except PromptError as error:
        raise bad(str(error), field) from None


async def encode_inputs(service: Service, request: EmbeddingRequest | ClassifyRequest, prompt: str = "") -> list[list[int]]:
    """Token ids of each input. prompt: stands before each text. Raises ApiError."""
    given: list[Any] = request.input if isinstance(request.input, list) else [request.input]
    if given and isinstance(given[0], int):
        given = [given]
    if not given:
        raise bad("input is empty; give a text, token ids, or a list of those", "input")
    if len(given) > service.limits.inputs:
        raise bad(f"at most {service.limits.inputs} inputs in a request, not {len(given)}; send several", "input")
    texts: list[list[int]] = given
    if isinstance(given[0], str):
        texts = await service.llm.encode_all([prompt + text for text in given], parse_special=False, writes=False)
    elif (largest := max(map(max, filter(None, texts)), default=0)) >= (size := service.llm.opened.tokenizer.vocab_size):
        foreign = "is it of another model's tokenizer? send texts (langchain: check_embedding_ctx_length=False)"
        raise bad(f"token {largest} is not in the vocabulary (0 to {size - 1}); {foreign}", "input")
    if not all(texts) or "" in given:
        raise bad("an input is empty; give at least one character or token", "input")
    return texts


async def run_in_groups(
    service: Service,
    request: EmbeddingRequest | ClassifyRequest | RerankRequest,
    texts: list[list[int]],
    salt: bytes,
    **asked: Any,
) -> list[InflightRequest]:
    """Run all texts, GROUP_SIZE at a time. `asked`: arguments of `submit`. Raises the errors that `as_api_error` knows."""
    priority = priority_of(request.priority, service.limits)
    # The quota itself is used as the texts are queued.
    PRINCIPAL.get().check("tokens", sum(map(len, texts)))
    ended: list[InflightRequest] = []
    params = service.with_adapter(SamplingParams(max_tokens=1, priority=priority or 0))
    seconds = service.deadline(request.deadline)
    ends = None if seconds is None else time.monotonic() + seconds
    most = min(GROUP_SIZE, service.llm.queue.max_requests)
    late = DeadlineError(f"the request was not answered within its deadline of {seconds or 0:g} s")
    for start in range(0, len(texts), most):
        part = texts[start : start + most]
        if start:
            await _wait_for_room(service, part, ends, late)
        left = None if ends is None else max(ends - time.monotonic(), 0)
        inflight = service.llm.submit(part, params, salt=salt, deadline=left, begun=start > 0, **asked)
        try:
            async for _ in stream_deltas(inflight):
                pass
        except DeadlineError:
            raise late from None
        finally:
            service.llm.abort(inflight)
        ended += inflight
    return ended


async def _wait_for_room(service: Service, texts: list[list[int]], ends: float | None, late: DeadlineError) -> None:
    """Wait until the queue has room, so that a started request is not refused halfway. Raises `late` after `ends`."""
    while not service.llm.queue.has_room([len(ids) for ids in texts]):
        if ends is not None and time.monotonic() > ends:
            raise late
        await asyncio.sleep(POLL_SECONDS)


def _entry(index: int, submitted: InflightRequest, request: EmbeddingRequest, sentence: Sentence, pool: str) -> dict[str, Any]:
    tokens = len(submitted.prompt)
    values: list[float] | str = sentence.vector(submitted.pooled, tokens, pool, request.dimensions)
    if request.encoding_format == "base64":
        values = base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode("ascii")
    return {"object": "embedding", "index": index, "embedding": values}
