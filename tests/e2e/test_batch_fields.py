"""One line of OpenAI's batch API means the same to the server and to `headrace generate`, field by field."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.data.explicit import params_of
from headrace.data.fields import ParamError
from headrace.server.http.api_error import ApiError
from headrace.server.http.limits_check import IgnoredFields
from headrace.server.protocols.fields import OFFLINE_IGNORED, OFFLINE_REFUSED, ChatRequest, CompletionRequest
from headrace.workflows.batch_requests import BatchRequest, InvalidLine, read_requests
from tests.cli_shell import Shell

TALK = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
# A value that asks for something, for every field without a default of its type below.
VALUES: dict[str, Any] = {
    "metadata": {"a": "b"},
    "prompt_cache_options": {"a": 1},
    "prediction": {"type": "content", "content": "x"},
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a+"},
    "guided_json": SCHEMA,
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "guided_regex": "a+",
    "tools": [TOOL],
    "tool_choice": "auto",
    "functions": [{"name": "look"}],
    "function_call": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    "modalities": ["text"],
    "audio": {"voice": "a"},
    "web_search_options": {},
    "moderation": {},
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": False,
    "logit_bias": {"5": 1.0},
    "stop": ["x"],
    "seed": 3,
    "deadline": 5.0,
    "logprobs": True,
    "reasoning_effort": "low",
    "early_stopping": "never",
}


def value_of(name: str, kind: Any, chat: bool) -> Any:
    if name == "logprobs" and not chat:
        return 2
    if name in VALUES:
        return VALUES[name]
    info = msgspec.inspect.type_info(kind)
    kinds = info.types if isinstance(info, msgspec.inspect.UnionType) else (info,)
    for one in kinds:
        match one:
            case msgspec.inspect.BoolType():
                return True
            case msgspec.inspect.IntType():
                return 1
            case msgspec.inspect.FloatType():
                return 0.5
            case msgspec.inspect.StrType():
                return "x"
            case msgspec.inspect.ListType():
                return []
    raise AssertionError(f"give {name} a value")


def fields_of(request: Any) -> list[str]:
    return [name for name in request.__struct_fields__ if name not in ("model", "messages", "prompt")]


CASES = [(request, name) for request in (ChatRequest, CompletionRequest) for name in fields_of(request)]


def server_problem(body: dict[str, Any], is_chat: bool) -> str:
    """The server's objection to a request that needs no model, empty if it has none."""
    from headrace.server.http.body_limits import read_body
    from headrace.server.protocols import chat, chat_messages, completions
    from headrace.server.protocols.sampling import sampling_params
    from headrace.server.protocols.structured import requested_format
    from headrace.server.settings import Limits

    try:
        request: Any = read_body(json.dumps(body).encode(), ChatRequest if is_chat else CompletionRequest)
        if is_chat:
            chat_messages.check_ending(request.messages, request.continue_final_message, request.add_generation_prompt)
            chat.read_conversation(request).variables()
        read = chat.read(request) if is_chat else completions.read(request)
        sampling_params(request, {}, Limits())
        requested_format(request, read.response_format)
    except ApiError as error:
        return error.message
    return ""


@pytest.mark.parametrize(("request_type", "name"), CASES, ids=[f"{kind.__name__}-{name}" for kind, name in CASES])
def test_every_field_of_the_server_is_read_alike(request_type: Any, name: str, tmp_path: Path) -> None:
    chat = request_type is ChatRequest
    kind = msgspec.structs.fields(request_type)
    value = value_of(name, next(one.type for one in kind if one.name == name), chat)
    body = {"model": "any", **({"messages": TALK} if chat else {"prompt": "hi"}), name: value}
    body |= {"logprobs": True} if name == "top_logprobs" else {}
    body |= {"stream": True} if name == "stream_options" else {}
    refused = server_problem(body, chat)
    path = tmp_path / "in.jsonl"
    line = {"custom_id": "a", "url": "/v1/chat/completions" if chat else "/v1/completions", "body": body}
    path.write_text(json.dumps(line) + "\n")
    (found,) = read_requests(path)
    if name in OFFLINE_REFUSED or "stream" in body:
        assert isinstance(found, InvalidLine)
        return
    problem = file_problem(found)
    assert bool(problem) == bool(refused), (refused, problem)
    if isinstance(found, BatchRequest):
        assert (name in found.ignored) == (name in OFFLINE_IGNORED)
        assert found.params == {} or name not in IgnoredFields.__struct_fields__


def file_problem(found: BatchRequest | InvalidLine) -> str:
    """The objection of `headrace generate` that needs no model, empty if it has none."""
    if isinstance(found, InvalidLine):
        return found.error
    try:
        params_of(found.params)
    except ParamError as error:
        return str(error)
    return ""


def test_the_tables_name_fields_that_exist() -> None:
    known = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert known >= OFFLINE_IGNORED
    assert known >= OFFLINE_REFUSED.keys()
    assert not OFFLINE_IGNORED & OFFLINE_REFUSED.keys()


def test_a_field_without_effect_is_named_once(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    body = {"messages": TALK, "max_tokens": 2, "deadline": 5}
    lines = [json.dumps({"custom_id": name, "url": "/v1/chat/completions", "body": body}) + "\n" for name in "ab"]
    source.write_text("".join(lines))
    code, _, err = shell("generate", tiny_gguf, "-i", source, "-o", tmp_path / "out.jsonl")
    assert code == 0, err
    assert err.count("deadline: no effect in a file") == 1


def test_tools_and_formats_hold_answers_in_a_file(shell: Shell, tiny_gguf: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    enum = {"type": "function", "function": {"name": "go", "parameters": {"type": "object", "properties": {}}}}
    enum["function"]["parameters"] |= {"additionalProperties": False}  # type: ignore[index,operator]
    bodies = {
        "tool": {"messages": TALK, "tools": [enum], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90},
        "form": {"messages": TALK, "guided_choice": ["yes", "no"], "max_tokens": 9},
        "many": {"messages": TALK, "response_format": {"type": "json_object"}, "guided_regex": "a"},
    }
    lines = [{"custom_id": name, "url": "/v1/chat/completions", "body": body} for name, body in bodies.items()]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shell("generate", tiny_gguf, "-i", source, "-o", tmp_path / "out.jsonl", "-t", 0)
    found = {one["id"]: one for one in map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())}
    (call,) = found["tool"]["outputs"][0]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("go", {})
    assert found["tool"]["finish_reason"] == "tool_calls"
    assert found["form"]["outputs"][0]["text"] in ("yes", "no")
    assert "both set the form of the answer" in found["many"]["error"]
