"""/v1/responses through the `openai` client: answers of the chat endpoint, storage, and continued conversations."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import Response

from headrace.server.settings import Limits
from headrace.server.storage import responses
from headrace.server.storage.store import Store
from tests.server.harness import Running

ASK: dict[str, Any] = {"model": "tiny", "input": "Name a river.", "temperature": 0, "max_output_tokens": 8}


def chat(server: Running, *talk: tuple[str, str], tokens: int = 8) -> str:
    messages: Any = [{"role": role, "content": text} for role, text in talk]
    answer = server.openai.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=tokens)
    text: str = answer.choices[0].message.content
    return text


def test_a_response_equals_a_chat(server: Running) -> None:
    made = server.openai.responses.create(**ASK, instructions="Be brief.", metadata={"a": "b"})
    assert made.output_text == chat(server, ("system", "Be brief."), ("user", "Name a river."))
    assert (made.status, made.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (made.usage.output_tokens, made.usage.total_tokens) == (8, made.usage.input_tokens + 8)
    assert made.metadata == {"a": "b"}
    Response.model_validate(server.post("/v1/responses", ASK).json(), strict=False)
    drawn = server.openai.responses.create(**{**ASK, "temperature": 1.5}, extra_body={"seed": 3})
    again = server.openai.responses.create(**{**ASK, "temperature": 1.5}, extra_body={"seed": 3})
    assert drawn.output_text == again.output_text != made.output_text


def test_input_as_items(server: Running) -> None:
    items: Any = [
        {"role": "developer", "content": "Be brief."},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Name "}, {"type": "input_text", "text": "two."}],
        },
        {"role": "assistant", "content": [{"type": "output_text", "text": "Rhine."}]},
        {"role": "user", "content": "More."},
    ]
    made = server.openai.responses.create(**{**ASK, "input": items})
    expected = chat(server, ("system", "Be brief."), ("user", "Name two."), ("assistant", "Rhine."), ("user", "More."))
    assert made.output_text == expected


def test_streamed_is_whole(server: Running) -> None:
    whole = server.openai.responses.create(**ASK)
    events = list(server.openai.responses.create(**ASK, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    final = events[-1].response
    assert final.output_text == whole.output_text
    assert final.usage.output_tokens == 8
    assert server.openai.responses.retrieve(final.id).output_text == whole.output_text
    stop = {"stop": whole.output_text[6:9]}
    with server.openai.responses.stream(**ASK, extra_body=stop) as stream:  # the client puts a response together itself
        made = stream.get_final_response()
    assert (made.status, made.output_text) == ("completed", whole.output_text.partition(stop["stop"])[0])


def test_a_conversation_continues_a_stored_response(server: Running) -> None:
    responses = server.openai.responses
    first = responses.create(**ASK, instructions="Be brief.")
    second = responses.create(**{**ASK, "input": "And another?"}, previous_response_id=first.id)
    talk = [("user", "Name a river."), ("assistant", first.output_text), ("user", "And another?")]
    assert second.output_text == chat(server, *talk)  # instructions are not carried over
    third = responses.create(**{**ASK, "input": "A third?"}, previous_response_id=second.id, stream=True)
    *_, last = third
    expected = chat(server, *talk, ("assistant", second.output_text), ("user", "A third?"))
    assert last.response.output_text == expected
    assert responses.retrieve(first.id).output_text == first.output_text
    said = [item.content for item in responses.input_items.list(second.id, order="asc")]
    assert [said[0], said[2]] == ["Name a river.", "And another?"]
    responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError, match="was it stored"):
        responses.create(**ASK, previous_response_id=first.id)
    unkept = responses.create(**ASK, store=False)
    with pytest.raises(openai.NotFoundError):
        responses.retrieve(unkept.id)


def test_logprobs(server: Running) -> None:
    made = server.openai.responses.create(**ASK, top_logprobs=2, include=["message.output_text.logprobs"])
    entries = made.output[0].content[0].logprobs
    assert len(entries) == 8
    assert "".join(entry.token for entry in entries) == made.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"input": ""}, "input is empty"),
        ({"input": []}, "input is empty"),
        ({"input": [{"role": "king", "content": "x"}]}, "one of the roles"),
        ({"input": [{"role": "user"}]}, "must have content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "reads text only"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "does not read"),
        ({"input": [{"type": "function_call", "call_id": 3}]}, "name as text"),
        ({"tools": [{"type": "web_search"}]}, "do not exist here"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "previous_response_id"),
        ({"truncation": "auto"}, "nothing is cut off"),
        ({"prompt": {"id": "x"}}, "prompt templates"),
        ({"include": ["code"]}, "include must be"),
        ({"max_tool_calls": 1}, "max_tool_calls: there are no built-in tools"),
        ({"reasoning": {"budget": 1}}, "unknown field reasoning.budget"),
        ({"reasoning": {"effort": 1}}, "reasoning.effort must be text"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options goes with stream"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "unknown field 'stream_options.include_usage'"),
        ({"tools": [{"type": "function", "name": "a", "defer_loading": True}]}, "unknown field 'defer_loading'"),
        ({"context_management": []}, "unknown field 'context_management'"),
        ({"text": {"fromat": 1}}, "unknown field text.fromat"),
        ({"max_output_tokens": 0}, "max_output_tokens must be 1"),
        ({"n": 2}, "unknown field 'n'"),
        ({"metadata": {"a": "b" * 600}}, "metadata"),
        ({"model": "gpt-99"}, "is not served here"),
    ],
)
def test_a_bad_request_is_refused(server: Running, change: dict[str, Any], says: str) -> None:
    answer = server.post("/v1/responses", {**ASK, **change})
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert says in error["message"]
    assert error["param"] in ("model", *change)


def test_options_without_an_effect_are_accepted(server: Running) -> None:
    """Reasoning items there are none, so their parts are all there; disguised sizes may be declined."""
    made = server.openai.responses.create(
        **ASK, include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"}
    )
    assert (made.status, made.max_tool_calls, made.reasoning.effort) == ("incomplete", None, "low")
    events = list(server.openai.responses.create(**ASK, stream=True, stream_options={"include_obfuscation": False}))
    assert events[-1].response.output_text == made.output_text
    wrong = server.http.get(f"/v1/responses/{made.id}", params={"include[]": "message.output_text.logprobs"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "include[]")


def test_a_deadline_during_a_stream_is_an_error_event(tiny: Path) -> None:
    with Running(tiny, limits=Limits(deadline=0.5, responses=2)) as server:
        with server.paused(), pytest.raises(openai.APIStatusError, match="deadline"):
            list(server.openai.responses.create(**ASK, stream=True))
        patient = {**ASK, "extra_body": {**ASK.get("extra_body", {}), "deadline": 600}}
        kept = [server.openai.responses.create(**patient).id for _ in range(3)]
        server.openai.responses.retrieve(kept[2])
        with pytest.raises(openai.NotFoundError):  # the oldest made room
            server.openai.responses.retrieve(kept[0])


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"turns": {"type": "integer", "minimum": 0, "maximum": 9}, "way": {"enum": ["left", "right"]}},
    "required": ["turns", "way"],
    "additionalProperties": False,
}
CALL: dict[str, Any] = {
    "model": "tiny",
    "input": "Turn the wheel.",
    "max_output_tokens": 200,
    "tools": [{"type": "function", "name": "turn", "description": "Turns it.", "parameters": PARAMETERS, "strict": True}],
    "tool_choice": {"type": "function", "name": "turn"},
    "extra_body": {"seed": 2},
}


def test_tool_calls_equal_their_stream_and_take_results(wide: Running) -> None:
    responses = wide.openai.responses
    whole = responses.create(**CALL)
    (call,) = whole.output
    assert (call.type, call.name, whole.status) == ("function_call", "turn", "completed")
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    events = list(responses.create(**CALL, stream=True))
    (streamed,) = events[-1].response.output
    assert streamed.arguments == call.arguments
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    assert events[-1].type == "response.completed"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "it turned"}
    after = responses.create(model="tiny", input=[result], previous_response_id=whole.id, max_output_tokens=4)
    assert [item.type for item in responses.input_items.list(after.id, order="asc")] == [
        "message", "function_call", "function_call_output",
    ]  # fmt: skip
    assert after.usage.input_tokens > len("it turned")


def test_a_choice_among_some_of_the_tools(wide: Running) -> None:
    tools = [*CALL["tools"], {"type": "function", "name": "stop", "parameters": {"type": "object", "properties": {}}}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "turn"}]}
    made = wide.openai.responses.create(**{**CALL, "tools": tools, "tool_choice": allowed})
    assert {call.name for call in made.output} == {"turn"}
    with pytest.raises(openai.BadRequestError, match="not among the tools"):
        wide.openai.responses.create(**{**CALL, "tool_choice": {**allowed, "tools": [{"type": "function", "name": "x"}]}})


def test_text_follows_its_schema(wide: Running) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "turn", "schema": PARAMETERS, "strict": True}}
    ask: dict[str, Any] = {"model": "tiny", "input": "Turn.", "max_output_tokens": 200, "text": wanted}
    for stream in (False, True):
        made = wide.openai.responses.create(**ask, stream=stream, extra_body={"seed": 4})
        answer = list(made)[-1].response if stream else made
        jsonschema.validate(json.loads(answer.output_text), PARAMETERS)
        assert answer.status == "completed"


def test_stored_responses_are_bounded_in_bytes() -> None:
    """What was said to the model counts, whatever is in it; the oldest make room."""

    async def run() -> None:
        store = Store()
        items = [{"role": "user", "content": "a", "unread": "x" * 1000}]
        for number in range(5):
            response = {"id": f"resp_{number}", "created_at": number}
            await responses.keep_response(store, response, items, Limits(response_bytes=3500))
        kept = await store.run(lambda db: db.execute("SELECT id, bytes FROM responses ORDER BY number").fetchall())
        assert [name for name, _ in kept] == ["resp_2", "resp_3", "resp_4"]
        assert sum(size for _, size in kept) > 3000
        store.close()

    asyncio.run(run())
