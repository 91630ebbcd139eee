"""The input of `generate`: one request a line, in short form or in that of OpenAI's batch API.

    {"id": "a", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}      "messages" or "prompt_token_ids"
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […], "max_tokens": 20}}

Fields of the short form are those of SamplingParams; a body has the fields that the server accepts. Others are refused by name.
https://platform.openai.com/docs/api-reference/batch/request-input
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.data.params import BEAM_FIELDS, BEAM_NAMES, REFINE_NAMES, SamplingParams
from headrace.data.spelling import did_you_mean

PARAMS = frozenset(SamplingParams.__struct_fields__) - {"beam", "refine"} | {
    *("beam_width", *BEAM_FIELDS, *BEAM_NAMES, *REFINE_NAMES),
}
PROMPTS = ("prompt", "messages", "prompt_token_ids")
# Fields of a conversation, with the values that they may have.
TEMPLATE: dict[str, tuple[type, str]] = {
    "continue_final_message": (bool, "true or false"),
    "add_generation_prompt": (bool, "true or false"),
    "chat_template_kwargs": (dict, "an object"),
}
CHAT, COMPLETIONS = "chat/completions", "completions"
BODY_PROMPT = {CHAT: "messages", COMPLETIONS: "prompt"}
RESERVED = re.compile(r"line-\d+")

Id = str | int


class LineError(ValueError):
    """A line that is no request; the message says what to change in it."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request: its line, its id, exactly one of three prompts, arguments of `LLM.render`, and its own parameters."""

    line: int
    id: Id
    prompt: str | None = None
    messages: list[Any] | None = None
    prompt_token_ids: list[int] | None = None
    template: dict[str, Any] = field(default_factory=dict)
    params: dict[str, Any] = field(default_factory=dict)
    tools: Any = None  # a ToolChoice
    ignored: frozenset[str] = frozenset()  # given fields that have no effect in a file
    labels: frozenset[str] = frozenset()  # what a reader notes of a line


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no request, under the id that its report gets."""

    id: Id
    error: str


def read_jobs(path: Path) -> Iterator[Job | BadLine]:
    """One item for every line that is not blank.

    An item's id is the line's own, or `line-N` where it has none, or none that can be used: each id belongs to one line.
    """
    owners: dict[Id, int] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _item(line, number, owners)


def _item(line: bytes, number: int, owners: dict[Id, int]) -> Job | BadLine:
    try:
        fields = object_of(line, number)
    except LineError as error:
        return BadLine(f"line-{number}", f"line {number}: {error}")
    try:
        return job_of(fields, number, owners)
    except LineError as error:
        own_id = next((name for name, owner in owners.items() if owner == number), f"line-{number}")
        return BadLine(own_id, f"line {number}: {error}")


def job_of(fields: dict[str, Any], number: int, owners: dict[Id, int]) -> Job:
    """The request in the fields of a line; `owners`: the lines of the ids so far. Raises LineError."""
    fields = dict(fields)
    own_id = fields.pop("custom_id" if "body" in fields else "id", None)
    item_id = f"line-{number}" if own_id is None else _claim(own_id, number, owners)
    return (_batch_job if "body" in fields else _job)(number, item_id, fields)


def object_of(line: bytes, number: int) -> dict[str, Any]:
    """The fields of a line. Raises LineError."""
    try:
        value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), object_pairs_hook=_without_twins)
    except UnicodeDecodeError as error:
        raise LineError(f"not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise LineError(f"not JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise LineError("nested too deeply") from None
    except LineError:
        raise
    except ValueError as error:  # a number of too many digits
        raise LineError(f"not JSON that can be read: {error}") from None
    if not isinstance(value, dict):
        raise LineError(f"a line must be a JSON object, not {type(value).__name__}")
    return value


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise LineError(f"field {twice!r} stands there twice; remove one")
    return found


def _claim(value: Any, number: int, owners: dict[Id, int]) -> Id:
    """The id a line gives itself, now its own."""
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise LineError(f"the id must be text or an integer, not {value!r:.40}")
    if isinstance(value, str) and (RESERVED.fullmatch(value) or not value.isprintable()):
        raise LineError(f"the id must be printable text other than line-N, not {value!r:.40}")
    if value in owners:
        raise LineError(f"id {value!r:.40} is that of line {owners[value]}, too; give each line its own")
    owners[value] = number
    return value


def _batch_job(number: int, job_id: Id, fields: dict[str, Any]) -> Job:
    """The job of a line of OpenAI's batch API."""
    from headrace.cli.batch_bodies import BodyError, read

    method, url, body = fields.pop("method", "POST"), fields.pop("url", None), fields.pop("body")
    if fields:
        raise LineError(f"unknown field {min(fields)!r}; a batch line has custom_id, method, url and body")
    if method != "POST":
        raise LineError(f"method must be POST, not {method!r:.40}")
    kind = str(url).removeprefix("/v1/")
    if kind not in BODY_PROMPT:
        raise LineError(f"url must be /v1/{CHAT} or /v1/{COMPLETIONS}, not {url!r:.80}")
    if not isinstance(body, dict):
        raise LineError("body must be a JSON object")
    if other := next((name for name in PROMPTS if body.get(name) is not None and name != BODY_PROMPT[kind]), None):
        raise LineError(f"a body for {url} has {BODY_PROMPT[kind]!r}, not {other!r}")
    try:
        found = read(body, chat=kind == CHAT)
    except BodyError as error:
        raise LineError(str(error)) from None
    return Job(
        number, job_id, **found.prompt, template=found.template, params=found.params, tools=found.tools, ignored=found.ignored
    )


def _job(number: int, job_id: Id, fields: dict[str, Any]) -> Job:
    given = {name: fields.pop(name) for name in PROMPTS if fields.get(name) is not None}
    if "prompt_token_ids" in given:
        given["prompt_token_ids"] = _whole(given["prompt_token_ids"])
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise LineError(f"a line needs exactly one of {', '.join(PROMPTS)}; this one has {found}")
    template = _template({name: fields.pop(name) for name in TEMPLATE if name in fields}, given)
    unknown = [name for name in fields if name not in PARAMS and name not in PROMPTS]
    if unknown:
        known = "a line has id, prompt (or messages, prompt_token_ids) and sampling parameters"
        question = did_you_mean(unknown[0], [*PROMPTS, *TEMPLATE, *PARAMS], known)
        raise LineError(f"unknown field {unknown[0]!r}; {question} (headrace generate --help says more)")
    _check_prompt(given)
    params = {name: _whole(value) for name, value in fields.items() if value is not None and name in PARAMS}
    if "logit_bias" in params:
        params["logit_bias"] = _biases(params["logit_bias"])
    return Job(number, job_id, **given, template=template, params=params)


def _whole(value: Any) -> Any:
    """A number without a fraction, or such numbers in lists, as integers: writers of JSON without integers write 5.0."""
    if isinstance(value, list):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _template(fields: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `LLM.render` for a conversation."""
    found = {name: value for name, value in fields.items() if value is not None}
    for name, value in found.items():
        kind, words = TEMPLATE[name]
        if "messages" not in given:
            raise LineError(f"{name} goes with messages; remove it")
        if not isinstance(value, kind):
            raise LineError(f"{name} must be {words}, not {value!r:.40}")
    return {**found.pop("chat_template_kwargs", {}), **found}


def _check_prompt(given: dict[str, Any]) -> None:
    ((name, value),) = given.items()
    if name == "prompt" and not isinstance(value, str):
        raise LineError(f"prompt must be text, not {type(value).__name__}")
    if name == "prompt_token_ids" and not (
        isinstance(value, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in value)
    ):
        raise LineError("prompt_token_ids must be a list of integers")


def _biases(value: Any) -> dict[int, Any]:
    """JSON has text keys only."""
    if not isinstance(value, dict):
        raise LineError(f"logit_bias must map token ids to numbers, not {value!r:.40}")
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise LineError("logit_bias must map token ids to numbers") from None
