"""Prompts of `compare`: the lines of `generate`, or plain texts. A field that would have no effect is refused by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.workflows.batch_output import RequestId
from headrace.workflows.batch_requests import BatchRequest, LineError, parse_object, parse_request
from headrace.workflows.prompts import lines_of

LABELS = frozenset({"kind", "category", "question_id", "reference"})  # of data sets; they describe a prompt


@dataclass(frozen=True, slots=True)
class Line:
    """One prompt: token ids, and the most tokens of its answer if the line limits them."""

    ids: list[int]
    max_tokens: int | None = None


def read_lines(path: Path, most: int | None = None) -> list[BatchRequest]:
    """The prompts of a file, `most` at most. Raises ValueError that names the line."""
    read = _jobs(path) if path.suffix == ".jsonl" else _texts(path)
    found = [job for job, _ in zip(read, range(most or 1 << 62), strict=False)]
    if not found:
        raise ValueError(f"{path} has no prompt; write one a line")
    return found


def line_of(llm: Any, job: BatchRequest, raw: bool) -> Line:
    """The token ids of a prompt: as `generate` makes them, and of a plain text as `run` does. Raises ValueError."""
    most = job.params.get("max_tokens")
    if job.prompt_token_ids is not None:
        return Line(job.prompt_token_ids, most)
    if job.prompt is not None:
        return Line(llm.tokenizer.encode(job.prompt), most)
    assert job.messages is not None
    template = llm.opened.template
    if "text" in job.labels and (raw or template is None or template.source is None):
        return Line(llm.tokenizer.encode(job.messages[0]["content"]), most)
    return Line(llm.render(llm.opened.with_system(job.messages), **job.template), most)


def _texts(path: Path) -> Iterator[BatchRequest]:
    for number, text in enumerate(lines_of(path), 1):
        if text.strip():
            yield BatchRequest(number, number, messages=[{"role": "user", "content": text}], labels=frozenset({"text"}))


def _jobs(path: Path) -> Iterator[BatchRequest]:
    owners: dict[RequestId, int] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            job = parse_request(_without_labels(parse_object(line, number)), number, owners)
            _check(job)
        except LineError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        yield job


def _without_labels(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request. The first of a data set's `turns` is the message of a user."""
    found = {name: value for name, value in fields.items() if name not in LABELS}
    turns = found.pop("turns", None)
    if turns is None:
        return found
    if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
        raise LineError("turns must be a list of texts")
    return {**found, "messages": [{"role": "user", "content": turns[0]}]}


def _check(job: BatchRequest) -> None:
    """Raises LineError for a field that the methods decide."""
    decided = sorted({*job.params, *(["tools"] if job.tools is not None else []), *job.ignored} - {"max_tokens"})
    if decided:
        raise LineError(f"{decided[0]}: the methods of --modes decide it, or compare has no use for it; remove it")
