"""Requests of an offline batch: one JSON object a line, in short form or in the form of OpenAI's batch API.

    {"id": "a", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}      "messages" or "prompt_token_ids"
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […], "max_tokens": 20}}

The short form has the fields of SamplingParams, a body those that the server accepts. Unknown fields are refused by name.
Source: https://platform.openai.com/docs/api-reference/batch/request-input
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.data.params import BEAM_FIELDS, BEAM_NAMES, REFINE_NAMES, SamplingParams
from headrace.data.spelling import did_you_mean
from headrace.decoding.tools import ToolChoice
from headrace.server.http.batch_lines import LineError as LineError
from headrace.server.http.batch_lines import read_batch_line, read_object, strip_line
from headrace.workflows import batch_bodies
from headrace.workflows.batch_output import RequestId

PARAMS = frozenset(SamplingParams.__struct_fields__) - {"beam", "refine", "timestamps"} | {
    *("beam_width", *BEAM_FIELDS, *BEAM_NAMES, *REFINE_NAMES),
}
PROMPTS = ("prompt", "messages", "prompt_token_ids")
# Fields of a conversation: type, and its name in messages.
TEMPLATE_FIELDS: dict[str, tuple[type, str]] = {
    "continue_final_message": (bool, "true or false"),
    "add_generation_prompt": (bool, "true or false"),
    "chat_template_kwargs": (dict, "an object"),
}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY_PROMPT = {CHAT: "messages", COMPLETIONS: "prompt"}
RESERVED_ID = re.compile(r"line-\d+")


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a file: line number, id, exactly one of three prompts, arguments of `LLM.render`, sampling fields.

    ignored: names of given fields that have no effect in a file. labels: {"text"} if the
    line was plain text (`cli.compare`), otherwise empty.
    """

    line: int
    id: RequestId
    prompt: str | None = None
    messages: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    tools: ToolChoice | None = None
    ignored: frozenset[str] = frozenset()
    labels: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class InvalidLine:
    """A line that is no valid request, with the id of its error record."""

    id: RequestId
    error: str


def read_requests(path: Path) -> Iterator[BatchRequest | InvalidLine]:
    """Yield one item for every line that is not blank.

    A line without a usable id of its own gets `line-N`. An id belongs to the first line that has it.
    """
    lines_of_ids: dict[RequestId, int] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if strip_line(line, number):
                yield _parse_line(line, number, lines_of_ids)


def _parse_line(line: bytes, number: int, lines_of_ids: dict[RequestId, int]) -> BatchRequest | InvalidLine:
    try:
        fields = parse_object(line, number)
    except LineError as error:
        return InvalidLine(_free_id(number, lines_of_ids), f"line {number}: {error}")
    try:
        return parse_request(fields, number, lines_of_ids)
    except LineError as error:
        own_id = next((name for name, owner in lines_of_ids.items() if owner == number), None)
        return InvalidLine(own_id or _free_id(number, lines_of_ids), f"line {number}: {error}")


def parse_request(fields: dict[str, Any], number: int, lines_of_ids: dict[RequestId, int]) -> BatchRequest:
    """Return the request of line `number`. Enters its id into `lines_of_ids` (id → line). Raises LineError."""
    if "body" in fields:
        return _batch_request(number, fields, lines_of_ids)
    fields = dict(fields)
    own_id = fields.pop("id", None)
    if isinstance(own_id, str) and (RESERVED_ID.fullmatch(own_id) or not own_id.isprintable()):
        raise LineError(f"the id must be printable text other than line-N, not {own_id!r:.40}")
    request_id = _free_id(number, lines_of_ids) if own_id is None else _claim_id(own_id, number, lines_of_ids)
    return _short_request(number, request_id, fields)


def parse_object(line: bytes, number: int) -> dict[str, Any]:
    """Return the JSON object of a line; line 1 may begin with a byte order mark. Raises LineError."""
    return read_object(strip_line(line, number))


def _claim_id(value: Any, number: int, lines_of_ids: dict[RequestId, int]) -> RequestId:
    """Check the id that a line gives itself, and enter it. Raises LineError."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise LineError(f"the id must be text or an integer, not {value!r:.40}")
    if value in lines_of_ids:
        raise LineError(f"id {value!r:.40} is that of line {lines_of_ids[value]}, too; give each line its own")
    lines_of_ids[value] = number
    return value


def _free_id(number: int, lines_of_ids: dict[RequestId, int]) -> RequestId:
    """Enter and return an id for a line without one: `line-N`, and a plus if a custom_id of another line is the same."""
    name = f"line-{number}"
    while name in lines_of_ids:
        name += "+"
    lines_of_ids[name] = number
    return name


def _batch_request(number: int, fields: dict[str, Any], lines_of_ids: dict[RequestId, int]) -> BatchRequest:
    """Return the request of a line of OpenAI's batch API."""
    if isinstance(own_id := fields.get("custom_id"), str) and own_id:
        _claim_id(own_id, number, lines_of_ids)
    line = read_batch_line(fields, (CHAT, COMPLETIONS))
    body, name = line.body, BODY_PROMPT[line.url]
    if other := next((one for one in PROMPTS if body.get(one) is not None and one != name), None):
        raise LineError(f"a body for {line.url} has {name!r}, not {other!r}")
    return BatchRequest(number, line.custom_id, **batch_bodies.read(body, is_chat=line.url == CHAT))


def _short_request(number: int, request_id: RequestId, fields: dict[str, Any]) -> BatchRequest:
    prompt = {name: fields.pop(name) for name in PROMPTS if fields.get(name) is not None}
    if "prompt_token_ids" in prompt:
        prompt["prompt_token_ids"] = _as_integers(prompt["prompt_token_ids"])
    if len(prompt) != 1:
        given = " and ".join(prompt) or "none of them"
        raise LineError(f"a line needs exactly one of {', '.join(PROMPTS)}; this one has {given}")
    template = _template_arguments({name: fields.pop(name) for name in TEMPLATE_FIELDS if name in fields}, prompt)
    unknown = [name for name in fields if name not in PARAMS and name not in PROMPTS]
    if unknown:
        known = "a line has id, prompt (or messages, prompt_token_ids) and sampling parameters"
        question = did_you_mean(unknown[0], [*PROMPTS, *TEMPLATE_FIELDS, *PARAMS], known)
        raise LineError(f"unknown field {unknown[0]!r}; {question} (headrace generate --help says more)")
    _check_prompt(prompt)
    params = {name: _as_integers(value) for name, value in fields.items() if value is not None and name in PARAMS}
    if "logit_bias" in params:
        params["logit_bias"] = _biases(params["logit_bias"])
    return BatchRequest(number, request_id, **prompt, template=template, params=params)


def _as_integers(value: Any) -> Any:
    """Turn floats without a fraction, also in lists, into ints: JSON writers without integers write 5.0."""
    if isinstance(value, list):
        return [_as_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _template_arguments(fields: dict[str, Any], prompt: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `LLM.render`. Raises LineError."""
    arguments = {name: value for name, value in fields.items() if value is not None}
    for name, value in arguments.items():
        kind, words = TEMPLATE_FIELDS[name]
        if "messages" not in prompt:
            raise LineError(f"{name} goes with messages; remove it")
        if not isinstance(value, kind):
            raise LineError(f"{name} must be {words}, not {value!r:.40}")
    return arguments


def _check_prompt(prompt: dict[str, Any]) -> None:
    ((name, value),) = prompt.items()
    if name == "prompt" and not isinstance(value, str):
        raise LineError(f"prompt must be text, not {type(value).__name__}")
    if name == "prompt_token_ids" and not (
        isinstance(value, list) and all(isinstance(token, int) and not isinstance(token, bool) for token in value)
    ):
        raise LineError("prompt_token_ids must be a list of integers")


def _biases(value: Any) -> dict[int, Any]:
    """Turn the keys, which are text in JSON, into token ids."""
    if not isinstance(value, dict):
        raise LineError(f"logit_bias must map token ids to numbers, not {value!r:.40}")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise LineError("logit_bias must map token ids to numbers") from None
