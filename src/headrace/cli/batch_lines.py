"""The input of `generate`: one request a line, in short form or in that of OpenAI's batch API.

    {"id": "a", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}      "messages" or "prompt_token_ids"
    {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […], "max_tokens": 20}}

Parameters are those of SamplingParams, in a body those of the API as well. What is not known is refused by name.
https://platform.openai.com/docs/api-reference/batch/request-input
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.data.near import did_you_mean
from headrace.data.params import BEAM_FIELDS, BEAM_NAMES, REFINE_NAMES, SamplingParams

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
WITHOUT_EFFECT = frozenset({"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"})
# Fields of the API that would change the answer and are not built, with the values that ask for nothing.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
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
    item_id: Id = f"line-{number}"
    try:
        fields = _object(line, number)
        own_id = fields.pop("custom_id" if "body" in fields else "id", None)
        if own_id is not None:
            item_id = _claim(own_id, number, owners)
        return _job(number, item_id, _from_api(fields) if "body" in fields else fields)
    except LineError as error:
        return BadLine(item_id, f"line {number}: {error}")


def _object(line: bytes, number: int) -> dict[str, Any]:
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


def _from_api(fields: dict[str, Any]) -> dict[str, Any]:
    """A line of OpenAI's batch API in short form."""
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
    found = {name: value for name, value in body.items() if name not in WITHOUT_EFFECT}
    _drop_idle(found)
    if other := next((name for name in PROMPTS if name in found and name != BODY_PROMPT[kind]), None):
        raise LineError(f"a body for {url} has {BODY_PROMPT[kind]!r}, not {other!r}")
    _rename(found, kind)
    return found


def _drop_idle(found: dict[str, Any]) -> None:
    """Take out what asks for nothing; raise LineError for what asks for something that is not built."""
    for name, idle in NOT_BUILT.items():
        value = found.pop(name, None)
        if value is not None and value not in idle:
            raise LineError(f"field {name!r} with {json.dumps(value)[:40]} is not supported; remove it")


def _rename(found: dict[str, Any], kind: str) -> None:
    """The API's own names and shapes of parameters, in place."""
    most = found.pop("max_completion_tokens", None)
    if most is not None:
        if found.get("max_tokens") not in (None, most):
            raise LineError("max_tokens and max_completion_tokens differ; give one")
        found["max_tokens"] = most
    if kind == CHAT:
        wanted, top = found.pop("logprobs", None), found.pop("top_logprobs", None)
        if not isinstance(wanted, bool | None):
            raise LineError(f"logprobs must be true or false here, not {wanted!r:.40}")
        if top is not None and not wanted:
            raise LineError("top_logprobs needs logprobs: true")
        found["logprobs"] = (top or 0) if wanted else None
        return
    prompt = found.get("prompt")
    if isinstance(prompt, list):
        if prompt and all(isinstance(one, int) for one in prompt):
            found["prompt_token_ids"] = found.pop("prompt")
        elif len(prompt) == 1:
            found["prompt_token_ids" if isinstance(prompt[0], list) else "prompt"] = found.pop("prompt")[0]
        else:
            raise LineError("prompt must be one text or its token ids; give each text a line of its own")


def _job(number: int, job_id: Id, fields: dict[str, Any]) -> Job:
    given = {name: fields.pop(name) for name in PROMPTS if fields.get(name) is not None}
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
    params = {name: value for name, value in fields.items() if value is not None and name in PARAMS}
    if "logit_bias" in params:
        params["logit_bias"] = _biases(params["logit_bias"])
    return Job(number, job_id, **given, template=template, params=params)


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
