"""/v1/rerank: documents in the order of their relevance to a query, by a reranker."""

from typing import Any

from starlette.requests import Request

from headrace.data.fields import FieldError
from headrace.server.engines.models import Service
from headrace.server.http.api_error import bad
from headrace.server.protocols.embeddings import run_in_groups
from headrace.server.protocols.fields import RerankRequest
from headrace.server.protocols.stream import unless_disconnected
from headrace.weights.ranking import NO_RANKER, check_ranking


async def rerank(service: Service, request: RerankRequest, http: Request, salt: bytes) -> dict[str, Any]:
    """Answer a request. Raises what `as_api_error` knows, and ClientGoneError."""
    if (ranker := service.llm.opened.ranker) is None:
        raise bad(NO_RANKER, "model")
    documents = [each if isinstance(each, str) else each.text for each in request.documents]
    if len(documents) > service.limits.inputs:
        raise bad(f"at most {service.limits.inputs} documents in a request, not {len(documents)}; send several", "documents")
    try:
        check_ranking(request.query, documents, request.top_n)
    except FieldError as error:
        raise bad(str(error), error.field) from None
    parts = [ranker.texts(request.query, document) for document in documents]
    # The query is encoded once.
    texts = list(dict.fromkeys(text for each in parts for text in each))
    options = {"add_special": False, "parse_special": False, "writes": False}
    ids = dict(zip(texts, await service.llm.encode_all(texts, **options), strict=True))
    pairs = [ranker.join([ids[text] for text in each]) for each in parts]
    inflight = await unless_disconnected(http, run_in_groups(service, request, pairs, salt, pool=ranker.pooling))
    results = []
    for index, score in ranker.ranked([one.pooled for one in inflight], pairs, request.top_n):
        document = {"document": {"text": documents[index]}} if request.return_documents else {}
        results.append({"index": index, "relevance_score": score, **document})
    tokens = sum(map(len, pairs))
    used = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "model": service.name, "results": results, "usage": used}
