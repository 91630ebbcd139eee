"""Answers held to a form, by the openai client: JSON schemas, regexes, choices, grammars; and what strangers send instead."""

import asyncio
import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.server.engines.async_llm import QueueFullError, State
from headrace.server.engines.messages import Grammar
from headrace.server.protocols import generation
from tests.server.harness import PATIENCE, Running, in_thread

TALK: Any = [{"role": "user", "content": "Tell me about the mill."}]
SCHEMA = {
    "type": "object",
    "properties": {"wheel": {"enum": ["wood", "iron"]}, "turns": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["wheel", "turns"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "mill", "schema": SCHEMA, "strict": True}}
LATE = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}


def send_chat(server: Running, **more: Any) -> Any:
    settings = {"model": "tiny", "messages": TALK, "temperature": 1.0, "seed": 3, "max_tokens": 60, **more}
    return server.openai.chat.completions.create(**settings)


def test_json_schema(server: Running) -> None:
    answer = send_chat(server, response_format=FORMAT, n=3, logprobs=True)
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.finish_reason == "stop"
    (free,) = send_chat(server).choices
    assert not free.message.content.startswith("{")


def test_a_stream_equals_the_complete_answer(server: Running) -> None:
    whole = send_chat(server, response_format=FORMAT).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in send_chat(server, response_format=FORMAT, stream=True)]
    assert "".join(parts) == whole
    assert len(parts) > 3


def test_the_server_equals_offline_generation(server: Running, offline: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=60, structured_outputs={"json": SCHEMA})
    (output,) = offline.generate("The mill", params)
    answer = server.complete(temperature=1.0, seed=5, max_tokens=60, extra_body={"structured_outputs": {"json": SCHEMA}})
    assert answer.choices[0].text == output.outputs[0].text


def test_json_object(server: Running) -> None:
    answer = send_chat(server, response_format={"type": "json_object"}, max_tokens=200, n=4)
    ended = [json.loads(choice.message.content) for choice in answer.choices if choice.finish_reason == "stop"]
    assert all(isinstance(value, dict) for value in ended)
    assert all(choice.message.content.startswith("{") for choice in answer.choices)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[0-9]{3}-[ab]"}, "[0-9]{3}-[ab]"),
        ({"guided_choice": ["wood", "iron"]}, "wood|iron"),
        ({"guided_grammar": 'start: "a" ("b" | "c")'}, "a[bc]"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"guided_json": '{"type": "boolean"}'}, "true|false"),
        ({"structured_outputs": {"regex": "x[0-9]"}}, "x[0-9]"),
    ],
)
def test_other_servers_fields(server: Running, fields: dict[str, Any], pattern: str) -> None:
    assert re.fullmatch(pattern, send_chat(server, extra_body=fields).choices[0].message.content)
    assert re.fullmatch(pattern, server.complete(extra_body=fields, max_tokens=30).choices[0].text)


def test_keywords_without_a_mask_are_checked_at_the_end(server: Running) -> None:
    """Half of the answers have two equal items: those are errors, never a 200."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "pair", "schema": LATE}}
    before, found = late_checks(server), []
    for seed in range(12):
        asked = {"model": "tiny", "messages": TALK, "temperature": 1.0, "seed": seed, "response_format": form}
        answer = server.post("/v1/chat/completions", asked)
        found.append(answer.status_code)
        if answer.status_code == 200:
            first, second = json.loads(answer.json()["choices"][0]["message"]["content"])
            assert first != second
        else:
            assert "uniqueItems" in answer.json()["error"]["message"]
    assert set(found) == {200, 422}
    counted = {result: count - before[result] for result, count in late_checks(server).items()}
    assert counted == {"fit": found.count(200), "unfit": found.count(422), "unchecked": 0}
    with pytest.raises(openai.BadRequestError, match="leave stream out"):
        send_chat(server, response_format=form, stream=True)


def late_checks(server: Running) -> dict[str, float]:
    """How many finished answers were checked, by what came of it."""
    counted = re.findall(r'late_checks_total\{.*result="(\w+)"\} (\S+)', server.http.get("/metrics").text)
    return {result: float(count) for result, count in counted}


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE: dict[str, dict[str, Any]] = {
    "nested": {"guided_json": deep(120)},
    "huge": {"guided_json": {"enum": ["x" * 1000] * 400}},
    "explodes": {"guided_json": {"oneOf": [{"minimum": i, "properties": {str(i): {}}} for i in range(400)]}},
    "allOf of anyOf": {
        "guided_json": {"allOf": [{"anyOf": [{"required": [f"{i}-{j}"]} for j in range(9)]} for i in range(40)]},
    },
    "refers outside": {"guided_json": {"$ref": "https://example.com/schema"}},
    "refers to a file": {"guided_json": {"$ref": "file:///etc/passwd"}},
    "refers nowhere": {"guided_json": {"$ref": "#/$defs/a"}},
    "recursive without end": {"guided_json": {"$ref": "#"}},
    "lookahead": {"guided_regex": "(?=a)b"},
    "regex nested": {"guided_regex": "(" * 5000 + "a" + ")" * 5000},
    "grammar nested": {"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "grammar left open": {"guided_grammar": "start: ("},
    "ebnf nested": {"guided_grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000},
    "nothing fits": {"guided_json": False},
    "no schema": {"guided_json": {"type": "nothing"}},
    "two forms": {"guided_regex": "a", "guided_choice": ["b"]},
    "none": {"structured_outputs": {}},
    "unknown": {"structured_outputs": {"xml": "a"}},
    "types": {"structured_outputs": {"regex": 5}},
    "choice": {"guided_choice": []},
    "format": {"response_format": {"type": "yaml"}},
    "no format": {"response_format": {"type": "json_schema"}},
    "a schema next to json_object": {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
    "json_schema next to text": {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
    "an unknown key of json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "stric": True}}
    },
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_forms(server: Running, name: str) -> None:
    """Each is answered, with an error of the client's or an output cut short, and the server goes on."""
    answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": TALK, "max_tokens": 4, **HOSTILE[name]})
    said = answer.json()
    assert answer.status_code == 400, said
    assert len(said["error"]["message"]) > 15
    assert server.health()["status"] == "ready"


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(a|a)*(a|a)*(a|a)*b"},
        {"guided_regex": "(x+x+)+y"},
        {"guided_regex": ".{1,2000}(.*a){20}"},
        {"guided_regex": "(((a{1,999}b{1,999}){1,999}c){1,999}d){1,999}|[a-z]{1000,999999}"},
        {"guided_json": {"type": "string", "pattern": "^(a+)+$"}},
        {
            "guided_json": {
                "$defs": {"t": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/t"}}, {}]}},
                "$ref": "#/$defs/t",
            }
        },
    ],
)
def test_costly_forms_are_bounded(server: Running, fields: dict[str, Any]) -> None:
    """What backtracking would drown in is served, or ends in an error of its own."""
    answer = server.post("/v1/chat/completions", {"model": "tiny", "messages": TALK, "max_tokens": 6, **fields})
    assert answer.status_code in (200, 400, 422)
    assert server.complete(max_tokens=2).choices[0].text


COSTLY: dict[str, tuple[dict[str, Any], str]] = {
    "a large multiple": ({"type": "integer", "multipleOf": 999983}, "has multipleOf 999983, and 65536 is the most"),
    "several multiples": (
        {"allOf": [{"type": "integer", "multipleOf": 997}, {"type": "integer", "multipleOf": 991}]},
        "too much time or memory|s is allowed|MiB is allowed",
    ),
    "many properties": (
        {"type": "object", "properties": {f"k{number}": True for number in range(9000)}},
        "too much time or memory|s is allowed|items",
    ),
}


@pytest.mark.parametrize("name", COSTLY)
def test_grammars_that_are_costly_to_compile_are_refused(server: Running, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """By one line, and before the engine sees them."""
    schema, said = COSTLY[name]
    answer = server.post("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 4, "guided_json": schema})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert re.search(said, message), message
    assert "\n" not in message
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


LISTS: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
NAMED = {"name": "a", "schema": LISTS}
TOOL = {"type": "function", "function": {"name": "f", "parameters": LISTS}}
OPENING: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "a", "guided_json": LISTS}),
    "chat": ("/v1/chat/completions", {"messages": TALK, "response_format": {"type": "json_schema", "json_schema": NAMED}}),
    "a response": ("/v1/responses", {"input": "a", "text": {"format": {"type": "json_schema", **NAMED}}}),
    "a tool": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}),
}


@pytest.mark.parametrize("name", OPENING)
@pytest.mark.parametrize(
    ("default", "field", "closed"), [(False, None, 1), (False, True, 0), (True, None, 0), (True, False, 1)]
)
def test_objects_are_closed_unless_the_server_or_the_request_opens_them(
    server: Running, name: str, default: bool, field: bool | None, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[str] = []

    def submit(*_: Any, grammar: Grammar, **more: Any) -> None:
        compiled.append(grammar.text)
        raise QueueFullError("the test has seen it", 1)

    monkeypatch.setattr(server.llm, "submit", submit)
    monkeypatch.setattr(server.models.services[0], "settings", replace(server.settings, open_objects=default))
    path, body = OPENING[name]
    asked = {"model": "tiny", **body, **({} if field is None else {"open_objects": field})}
    assert server.post(path, asked).status_code == 429
    (grammar,) = compiled
    assert re.sub(r"[\\\s]", "", grammar).count('"additionalProperties":false') == closed


FAILING: dict[str, dict[str, Any]] = {
    # The answer may end after 40 letters at the earliest, and the matcher fails before them.
    "nested counts": {"guided_regex": "((a{1,99}){1,99}){40,99}"},
    "optional and counted": {"guided_regex": "(a?){500}a{500}"},
    "doubling rules": {
        "guided_grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"'
    },
    "terminals": {
        "guided_grammar": "start: "
        + " | ".join(f"T{i}" for i in range(3000))
        + "\n"
        + "\n".join(f"T{i}: /[a-z]{{{i % 50}}}x/" for i in range(3000))
    },
}


@pytest.mark.parametrize("name", FAILING)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_constraint_is_a_client_error(
    server: Running, name: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure during generation: 422 with the matcher's words, never a 500, and no error in the log."""
    asked = {"model": "tiny", "prompt": "a", "max_tokens": 200, "temperature": 1.0, "seed": 1, "stream": stream}
    answer = server.post("/v1/completions", {**asked, **FAILING[name]})
    if answer.status_code == 200 and stream:
        (error,) = [json.loads(line[6:])["error"] for line in answer.text.splitlines() if '"error"' in line]
    else:
        assert answer.status_code == 422
        error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "constraint_failed")
    said = "the constraint failed during generation: .*(too many expressions|Too many items|has 3001 items).*; make it smaller"
    assert re.fullmatch(said, error["message"])
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_late_check_that_runs_wild_is_stopped(server: Running) -> None:
    """A pattern only Python can search, in exponential time: its process is ended, not the server."""
    schema = {"type": "string", "minLength": 60, "maxLength": 60, "pattern": "^(?=.)(.+)+\\u0000$"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "wild", "schema": schema}}
    before = late_checks(server)
    with pytest.raises(openai.UnprocessableEntityError, match="too much time"):
        send_chat(server, response_format=form, max_tokens=150)
    assert late_checks(server) == {**before, "unchecked": before["unchecked"] + 1}
    assert send_chat(server, response_format=FORMAT).choices[0].finish_reason == "stop"


def test_a_shutdown_waits_for_the_final_check_of_an_answer(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens are all there when the server begins to end, and what looks at them is still needed."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "pair", "schema": LATE}}
    with Running(tiny) as server:
        looking, look = threading.Event(), generation.check_answer

        async def slow(*given: Any) -> None:
            looking.set()
            while server.llm.state is not State.DRAINING or server.llm.inflight:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            await look(*given)

        monkeypatch.setattr(generation, "check_answer", slow)
        asked = {"model": "tiny", "messages": TALK, "temperature": 1.0, "seed": 0, "response_format": form}
        answer = in_thread(lambda: server.post("/v1/chat/completions", asked))
        assert looking.wait(PATIENCE)
        server.drain()
        said = answer.result()
        server.join()
    assert said.status_code == 200 or "uniqueItems" in said.text
