"""Every answer of the server, and of OpenAI's client, is accepted as history."""

import json
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import openai
import pytest
from openai.types import chat, responses
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import parsed_response
from pydantic import BaseModel

from headrace.server.protocols.response_items import as_items, messages
from tests.server.harness import Running

ASK: dict[str, Any] = {"role": "user", "content": "Turn the wheel."}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"turns": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["turns"],
    "additionalProperties": False,
}
TURN: Any = {"type": "function", "function": {"name": "turn", "description": None, "parameters": PARAMETERS, "strict": None}}
TOOL: Any = {"type": "function", "name": "turn", "parameters": PARAMETERS, "strict": False}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [ASK], "max_tokens": 60, "seed": 2}


@pytest.fixture(scope="module")
def server(wide: Running) -> Running:
    return wide


def goes_on(server: Running, message: dict[str, Any], **more: Any) -> int:
    """The tokens of a prompt with an answer of the assistant, the results of its calls, and a question after them."""
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in message.get("tool_calls") or []]
    talk = [ASK, message, *results, {"role": "user", "content": "And then?"}]
    answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": talk, "max_tokens": 1, **more})
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens"]
    return tokens


def accumulated(chunks: Any) -> dict[str, Any]:
    """A message put together from the deltas of a stream, as clients do it: `index` stays in the calls."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            delta = choice.delta.model_dump()
            for name in ("role", "content", "refusal", "function_call"):
                message[name] = (message.get(name) or "") + delta[name] if delta.get(name) else message.get(name)
            for call in delta.get("tool_calls") or []:
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append(call)
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"] or ""
    for call in message.get("tool_calls") or []:
        call["function"]["arguments"] = call["function"]["arguments"] or ""
    return message


@pytest.mark.parametrize("with_tools", [False, True])
def test_chats(server: Running, with_tools: bool) -> None:
    tools: dict[str, Any] = {"tools": [TURN], "tool_choice": "required"} if with_tools else {}
    raw = server.post("/v1/chat/completions", CHAT | tools).json()["choices"][0]["message"]
    assert bool(raw.get("tool_calls")) == with_tools
    message = server.openai.chat.completions.create(**CHAT, **tools).choices[0].message
    stream = accumulated(server.openai.chat.completions.create(**CHAT, **tools, stream=True))
    dumps = [message.model_dump(), message.model_dump(exclude_none=True), message.to_dict(), stream]
    sizes = {goes_on(server, one, **tools) for one in (raw, *dumps)}
    assert len(sizes) == 1  # each of them is the same prompt


def test_parsed_answers(server: Running) -> None:
    """OpenAI's `parse` adds what it parsed."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "turn", "schema": PARAMETERS, "strict": True}}
    message = server.openai.chat.completions.parse(**CHAT, response_format=form).choices[0].message
    goes_on(server, message.model_dump())
    strict: Any = {"type": "function", "function": {**TURN["function"], "strict": True}}
    asked: dict[str, Any] = {"tools": [strict], "tool_choice": "required", "parallel_tool_calls": False}
    message = server.openai.chat.completions.parse(**{**CHAT, "max_tokens": 200}, **asked).choices[0].message
    assert message.tool_calls[0].function.parsed_arguments == json.loads(message.tool_calls[0].function.arguments)
    goes_on(server, message.model_dump(), tools=[TURN])


CITED = {"type": "url_citation", "url_citation": {"url": "u", "title": "t", "start_index": 0, "end_index": 2}}
OTHERS: dict[str, dict[str, Any]] = {
    "refusal": {"content": None, "refusal": "I will not."},
    "annotations": {"content": "It turns.", "annotations": [CITED]},
    "audio": {"content": None, "audio": {"id": "a", "data": "", "expires_at": 1, "transcript": "It turns."}},
    "function_call": {"content": None, "function_call": {"name": "turn", "arguments": '{"turns": 3}'}},
    "reasoning": {"content": "It turns.", "reasoning_content": "A wheel turns."},
    "null everywhere": dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls")) | {"content": "It."},
    "nothing": {"content": None, "tool_calls": []},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_answers_of_other_servers(server: Running, kind: str) -> None:
    goes_on(server, {"role": "assistant", **OTHERS[kind]})
    if kind not in ("reasoning", "nothing"):
        ChatCompletionMessage.model_validate({"role": "assistant", **OTHERS[kind]})  # it is one of OpenAI's


def test_a_refusal_and_a_transcript_are_in_the_prompt(server: Running) -> None:
    empty = goes_on(server, {"role": "assistant", "content": ""})
    for kind in ("refusal", "audio", "function_call"):
        assert goes_on(server, {"role": "assistant", **OTHERS[kind]}) > empty


def test_results_of_functions(server: Running) -> None:
    talk = [ASK, {"role": "assistant", **OTHERS["function_call"]}, {"role": "function", "name": "turn", "content": "done"}]
    assert server.post("/v1/chat/completions", CHAT | {"messages": talk, "max_tokens": 1}).status_code == 200


def samples(kind: Any) -> list[Any]:
    """Values of a type of OpenAI's client, one for each alternative of a union. No field of a record is missing or null."""
    if get_origin(kind) is Annotated:
        return samples(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [value for one in get_args(kind) if one is not type(None) for value in samples(one)]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if get_origin(kind) in (list, set):
        return [samples(get_args(kind)[0])]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return [record(kind)]
    if isinstance(kind, TypeVar) or kind in (object, Any) or get_origin(kind) is dict:
        return [{"turns": 3}]
    return [{str: "{}", int: 1, float: 0.5, bool: True}[kind]]


def record(kind: type[BaseModel]) -> dict[str, Any]:
    return {field.alias or name: samples(field.annotation)[0] for name, field in kind.model_fields.items()}


def dumps(kind: type[BaseModel], value: dict[str, Any]) -> list[dict[str, Any]]:
    """What callers send back of an answer that the client has parsed."""
    made = kind.model_validate(value)
    return [value, made.model_dump(), made.model_dump(by_alias=True), made.model_dump(exclude_none=True), made.to_dict()]  # type: ignore[attr-defined]


MESSAGES: list[type[BaseModel]] = [ChatCompletionMessage, chat.ParsedChatCompletionMessage]
FIELDS = [(kind, name) for kind in MESSAGES for name in kind.model_fields]


@pytest.mark.parametrize(("kind", "name"), FIELDS, ids=[f"{kind.__name__}-{name}" for kind, name in FIELDS])
def test_every_field_of_openais_messages_is_accepted(server: Running, kind: type[BaseModel], name: str) -> None:
    """Each field alone, and with all others; a call of a custom tool is no function and is refused."""
    for value in samples(kind.model_fields[name].annotation):
        calls = value if name == "tool_calls" else []
        value = [call for call in calls if call["type"] == "function"] or value
        for one in dumps(kind, {"role": "assistant", "content": None, name: value}):
            goes_on(server, one)
        whole = {**record(kind), "tool_calls": [], name: value}
        for one in dumps(kind, whole):
            goes_on(server, one)


ITEMS: list[type[BaseModel]] = [
    responses.ResponseOutputMessage,
    responses.ResponseFunctionToolCall,
    responses.ResponseFunctionToolCallItem,
    responses.ResponseFunctionToolCallOutputItem,
    responses.ResponseReasoningItem,
    parsed_response.ParsedResponseOutputMessage,
    parsed_response.ParsedResponseFunctionToolCall,
]
CALL: dict[str, Any] = {"type": "function_call", "call_id": "{}", "name": "turn", "arguments": '{"turns": 3}'}
RESULT: dict[str, Any] = {"type": "function_call_output", "call_id": "{}", "output": "done"}


@pytest.mark.parametrize("kind", ITEMS, ids=lambda kind: kind.__name__)
def test_every_field_of_openais_items_is_accepted(server: Running, kind: type[BaseModel]) -> None:
    fields = kind.model_fields
    needed = {field.alias or name for name, field in fields.items() if field.is_required()}
    for name, field in fields.items():
        alias = field.alias or name
        for value in samples(field.annotation):
            if kind is responses.ResponseFunctionToolCallOutputItem and name == "output" and isinstance(value, list):
                value = [part for part in value if part["type"] == "input_text"]  # other parts are no text
            whole = {**record(kind), alias: value, **({"output": "done"} if "output" in fields and name != "output" else {})}
            alone = {one: whole[one] for one in needed | {alias}}
            for item in [*dumps(kind, whole), *dumps(kind, alone)]:
                turns = {"function_call": [item, RESULT], "function_call_output": [CALL, {**item, "call_id": CALL["call_id"]}]}
                items = [ASK, *turns.get(item["type"], [item]), {"role": "user", "content": "And then?"}]
                answer = server.post("/v1/responses", {"model": "tiny", "input": items, "max_output_tokens": 1})
                assert answer.status_code == 200, (item, answer.text)


def test_reasoning_belongs_to_the_next_message(server: Running) -> None:
    """As `reasoning_content`; the summary and what is encrypted are no text of the model."""
    thought = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "A short one."}]}
    said = {"role": "assistant", "content": "It turns."}
    items = [ASK, {**thought, "content": [{"type": "reasoning_text", "text": "A wheel turns."}]}, said]
    assert messages(as_items(items), None) == [ASK, {**said, "reasoning_content": "A wheel turns."}]
    assert messages(as_items([ASK, {**thought, "encrypted_content": "x"}, said]), None) == [ASK, said]
    assert messages(as_items([*items[:2], {"role": "user", "content": "a"}, said]), None)[-1] == said
    (_, called) = messages(as_items([*items[:2], CALL]), None)
    assert (called["reasoning_content"], len(called["tool_calls"])) == ("A wheel turns.", 1)
    wrong = {**thought, "content": [{"type": "input_text", "text": "a"}]}
    answer = server.post("/v1/responses", {"model": "tiny", "input": [ASK, wrong]})
    assert (answer.status_code, "a part of type 'input_text'" in answer.text) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_items_of_responses(server: Running, stream: bool) -> None:
    responses, ask = server.openai.responses, {"role": "user", "content": "Turn the wheel."}
    for more in ({}, {"tools": [TOOL], "tool_choice": "required"}):
        made: Any = responses.create(model="tiny", input=[ask], max_output_tokens=60, stream=stream, **more)
        made = list(made)[-1].response if stream else made
        listed = server.http.get(f"/v1/responses/{made.id}/input_items?order=asc").json()["data"]
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "done"}
            for item in made.output
            if item.type == "function_call"
        ]
        sizes = set()
        for exclude_none in (False, True):
            output = [item.model_dump(exclude_none=exclude_none) for item in made.output]
            items: Any = [*listed, *output, *results, {"role": "user", "content": "And then?"}]
            after = responses.create(model="tiny", input=items, max_output_tokens=1)
            sizes.add(after.usage.input_tokens)
        (size,) = sizes
        onward: Any = [*results, {"role": "user", "content": "And then?"}]
        assert responses.create(model="tiny", input=onward, previous_response_id=made.id).usage.input_tokens == size


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([{"role": "user", "content": "a", "blob": "x" * 2_000_000}], "item 0 of input has the unknown key 'blob'"),
        ([{"role": "user", "content": [{"type": "input_text", "text": "a", "blob": 1}]}], "a part of item 0 of input"),
        ([{"type": "function_call_output", "call_id": "x", "output": "a"}], "no earlier item is such a function_call"),
    ],
)
def test_unknown_keys_of_items_are_refused(server: Running, items: Any, says: str) -> None:
    answer = server.post("/v1/responses", {"model": "tiny", "input": items})
    assert answer.status_code == 400
    assert (says in answer.json()["error"]["message"], answer.json()["error"]["param"]) == (True, "input")
    assert len(answer.content) < 500


def test_nulls_of_items_are_not_stored(server: Running) -> None:
    items: Any = [{"role": "user", "content": "a", "id": None, "status": None, "anything": None}]
    made = server.openai.responses.create(model="tiny", input=items, max_output_tokens=1)
    (kept,) = server.http.get(f"/v1/responses/{made.id}/input_items").json()["data"]
    assert kept == {"id": "item_0", "type": "message", "role": "user", "content": "a"}


def test_a_conversation_that_ends_with_the_assistant_gets_a_new_message(server: Running) -> None:
    talk: Any = [ASK, {"role": "assistant", "content": "It"}]
    create = server.openai.chat.completions.create
    asked: dict[str, Any] = {"model": "tiny", "messages": talk, "temperature": 0, "max_tokens": 4}
    new = create(**asked)
    assert new.choices == create(**asked, extra_body={"continue_final_message": False}).choices
    assert new.usage.prompt_tokens > create(**asked, extra_body={"continue_final_message": True}).usage.prompt_tokens
    items: Any = [*CHAT["messages"], {"role": "assistant", "content": "It"}]
    made = server.openai.responses.create(model="tiny", input=items, temperature=0, max_output_tokens=4)
    assert made.output_text == new.choices[0].message.content


def test_a_null_field_is_absent(server: Running) -> None:
    body = {**CHAT, "max_tokens": 4, "truncate_prompt_tokens": None, "documents": None, "stream_options": None}
    assert server.post("/v1/chat/completions", body).status_code == 200
    data = {"chat_template_kwargs": {"documents_": None}, "metadata": {"a": None}}
    assert server.post("/v1/chat/completions", body | data).status_code == 200
    options = {"stream": True, "stream_options": {"include_usage": True, "other": None}}
    assert server.post("/v1/chat/completions", body | options).status_code == 200
    wrong = server.post("/v1/chat/completions", body | {"documents": []})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "documents")
    with pytest.raises(openai.BadRequestError, match="unknown field 'stream_options.other'"):
        server.openai.chat.completions.create(**CHAT, stream=True, stream_options={"other": 1})  # type: ignore[call-overload]
