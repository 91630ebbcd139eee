"""Prompts of `compare`: the lines of `generate`, or plain texts. Fields without effect are refused by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.workflows.batch_output import RequestId
from headrace.workflows.batch_requests import BatchRequest, LineError, parse_object, parse_request
from headrace.workflows.prompts import lines_of

# Fields of data sets that describe a prompt.
LABELS = frozenset({"kind", "category", "question_id", "reference"})


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt: token ids, and the most tokens of its answer, None if the line has no limit."""

    ids: list[int]
    max_tokens: int | None = None


def read_lines(path: Path, most: int | None = None) -> list[BatchRequest]:
    """Return the prompts of a file, `most` at most. Raises ValueError, naming the line."""
    read = _requests(path) if path.suffix == ".jsonl" else _texts(path)
    requests = [request for request, _ in zip(read, range(most or 1 << 62), strict=False)]
    if not requests:
        raise ValueError(f"{path} has no prompt; write one a line")
    return requests


def line_of(llm: Any, request: BatchRequest, raw: bool) -> Line:
    """Return the token ids of a prompt, as `generate` makes them, or as `run` for a plain text. Raises ValueError."""
    most = request.params.get("max_tokens")
    if request.prompt_token_ids is not None:
        return Line(request.prompt_token_ids, most)
    if request.prompt is not None:
        return Line(llm.tokenizer.encode(request.prompt), most)
    assert request.messages is not None
    template = llm.opened.template
    if "text" in request.labels and (raw or template is None or template.source is None):
        return Line(llm.tokenizer.encode(request.messages[0]["content"]), most)
    return Line(llm.render(llm.opened.with_system(request.messages), **request.template), most)


def _texts(path: Path) -> Iterator[BatchRequest]:
    for number, text in enumerate(lines_of(path), 1):
        if text.strip():
            yield BatchRequest(number, number, messages=[{"role": "user", "content": text}], labels=frozenset({"text"}))


def _requests(path: Path) -> Iterator[BatchRequest]:
    owners: dict[RequestId, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            request = parse_request(_without_labels(parse_object(line, number)), number, owners)
            _check(request)
        except LineError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        yield request


def _without_labels(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a request; the first of a data set's `turns` becomes the user's message."""
    found = {name: value for name, value in fields.items() if name not in LABELS}
    turns = found.pop("turns", None)
    if turns is None:
        return found
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise LineError("turns must be a list of texts")
    return {**found, "messages": [{"role": "user", "content": turns[0]}]}


def _check(request: BatchRequest) -> None:
    """Raise LineError for a field that the compared methods set themselves."""
    decided = sorted({*request.params, *(["tools"] if request.tools is not None else []), *request.ignored} - {"max_tokens"})
    if decided:
        raise LineError(f"{decided[0]}: --modes sets this field, or compare does not use it; remove it")
