"""/v1/classify: classes of texts or token ids, by the classifier of the model."""

from typing import Any

import msgspec
from starlette.requests import Request

from headrace.server.engines.inflight import InflightRequest
from headrace.server.engines.models import Service
from headrace.server.http.api_error import bad
from headrace.server.protocols.embeddings import GROUP_SIZE, encode_inputs, run_in_groups
from headrace.server.protocols.fields import ClassifyRequest
from headrace.server.protocols.stream import unless_disconnected
from headrace.server.protocols.time_slices import slices
from headrace.startup.classifier import Classifier

# In one answer.
MAX_PROBABILITIES = 1 << 20
# Encoded before the event loop runs other requests.
PROBABILITIES_PER_SLICE = 1 << 14


async def classify(service: Service, request: ClassifyRequest, http: Request, salt: bytes) -> dict[str, Any]:
    """Answer a request. Raises what `as_api_error` knows, and ClientGoneError."""
    known = service.llm.classifier
    if known is None:
        raise bad(f"{service.name} is served without a classifier; start the server with --classifier FOLDER", "model")
    try:
        rule = known.rule(request.criterion, request.threshold)
    except ValueError as error:
        raise bad(str(error)[:300], "threshold" if request.criterion is None else "criterion") from None
    texts = await encode_inputs(service, request)
    each_has = max(1, len(known.exits.labels)) + (len(known.exits.layers) if request.return_exits else 0)
    if (many := len(texts) * each_has) > MAX_PROBABILITIES:
        raise bad(f"these inputs make {many} probabilities and {MAX_PROBABILITIES} are the most; send fewer", "input")
    inflight = await unless_disconnected(http, run_in_groups(service, request, texts, salt, rule=rule))
    computed = [known.exits.layers[len(one.classified) - 1] for one in inflight]
    service.metrics.record_classified(computed, known.calibrated(*rule))
    each = [(index, known, bool(request.return_exits), *one) for index, one in enumerate(zip(texts, inflight, strict=True))]
    size = max(1, min(GROUP_SIZE, PROBABILITIES_PER_SLICE // each_has))
    data = [msgspec.Raw(msgspec.json.encode(_entry(*one))) async for some in slices(each, size) for one in some]
    tokens = sum(map(len, texts))
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": service.name, "usage": used}


def _entry(index: int, known: Classifier, votes: bool, ids: list[int], submitted: InflightRequest) -> dict[str, Any]:
    classification = known.classification(ids, submitted.classified)
    return {"object": "classification", "index": index, **classification.record(votes=votes)}
