"""Requests that are cheap to send and costly to serve: none blocks others, fills the memory or contacts a host."""

import asyncio
import gc
import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx2 as httpx
import msgspec
import pytest

from headrace.confined.pool import shared_pool
from headrace.confined.process import ConfinedProcess, Task
from headrace.data.plan import TokenLogprob
from headrace.server.page import markdown
from headrace.server.protocols.logprobs import CompletionLogprobs, joined
from headrace.startup.encoding import SLICE
from headrace.text.tokenizer import Tokenizer
from tests.server.harness import PATIENCE, Running, in_thread, until
from tests.server.resource_limits import MOST_HELD, TRIES, Held, held
from tests.trap import trap
from tests.unit.vocabularies import byte_level

__all__ = ["held"]

TALK: Any = [{"role": "user", "content": "hi"}]
OUTWARD = [
    {"oneOf": [{"const": 1}, {"$dynamicRef": "URL"}]},
    {"oneOf": [{"const": 1}, {"not": {"$dynamicRef": "URL"}, "multipleOf": 7}]},
    {"$ref": "URL"},
]


def as_tool(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]}


def as_form(schema: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}}


@pytest.mark.parametrize("schema", OUTWARD, ids=json.dumps)
@pytest.mark.parametrize("door", [as_tool, as_form])
def test_no_schema_of_a_request_causes_a_network_request(server: Running, schema: Any, door: Any) -> None:
    """Nor any of its processes: the trap hears all of them."""
    with trap() as (url, got):
        body = {"model": "tiny", "messages": TALK, "max_tokens": 4, **json.loads(json.dumps(door(schema)).replace("URL", url))}
        answer = server.post("/v1/chat/completions", body)
    assert got == []
    assert answer.status_code == 400
    assert "only references within it" in answer.json()["error"]["message"]


LONG = "The mill stands by the river and grinds. " * 12_000  # half a megabyte


def longest_wait(work: Callable[[], Any]) -> float:
    """The most CPU time that another thread used for `work` between two turns of this one, as a share of all of it."""
    thread = threading.Thread(target=work)
    began = last = time.process_time()
    longest = 0.0
    thread.start()
    alive = True
    while alive:  # once at least: a thread that keeps the interpreter may be done before `start` is
        alive = thread.is_alive()
        time.sleep(0.001)
        now = time.process_time()
        longest, last = max(longest, now - last), now
    return longest / (last - began)


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    """Seconds of work: this thread has turns all through it, or none where the encoder keeps the interpreter."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    assert longest_wait(lambda: tokenizer.encode(LONG)) < 0.5
    kept = tokenizer._encoder(True)
    assert longest_wait(lambda: kept.encode(LONG)) > 0.5  # the control: the library's call for a single text


def test_no_prompt_is_encoded_on_the_event_loop_when_they_are_long_together(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many texts, each short enough to be encoded at once, are as one long text."""
    tokenizer = server.llm.opened.tokenizer
    encode, threads = tokenizer.encode, set()

    def seen(text: str, **options: bool) -> list[int]:
        threads.add(threading.get_ident())
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", seen)
    loop = server.on_loop(threading.get_ident)
    assert server.post("/v1/completions", {"model": "tiny", "prompt": ["a " * 1900] * 3}).status_code == 400
    assert server.post("/v1/embeddings", {"model": "tiny", "input": ["a " * 1900] * 3}).status_code == 400
    assert threads
    assert loop not in threads
    assert server.post("/tokenize", {"prompt": "a"}).status_code == 200
    assert loop in threads  # a short one needs no thread


# Each of the pairs among twenty lists of a hundred values is looked at against a context of two hundred properties.
COSTLY: dict[str, Any] = {
    "properties": {f"p{at}": {"type": "string"} for at in range(200)},
    "oneOf": [{"enum": [{"q": [a, b]} for b in range(100)]} for a in range(20)],
}


def test_costly_tool_schemas_are_checked_in_a_process_with_a_time_limit(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes of work that are not this process's, and are ended: a 400, and others are answered meanwhile."""
    monkeypatch.setattr("headrace.decoding.tools.prepare", never)
    tool = {"type": "function", "function": {"name": "f", "parameters": COSTLY}}
    asked = in_thread(lambda: server.post("/v1/chat/completions", {"model": "tiny", "messages": TALK, "tools": [tool]}))
    answered = 0
    while asked.running:
        assert server.health()["status"] == "ready"
        answered += 1
        time.sleep(0.05)
    answer = asked.result()
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "too much time" in answer.json()["error"]["message"]
    assert answered > 3


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("that was done in the web process")


def test_tools_are_checked_once_in_a_confined_process(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    ask = ConfinedProcess.ask

    def counted(self: ConfinedProcess, task: Task, frame: bytes) -> Any:
        asked.append((task.function, *sorted(msgspec.msgpack.decode(frame)[3])))
        return ask(self, task, frame)

    monkeypatch.setattr(ConfinedProcess, "ask", counted)
    monkeypatch.setattr("headrace.decoding.tools.prepare", never)
    body = {"model": "tiny", "messages": TALK, "max_tokens": 2, **as_tool({"type": "string", "minLength": 17})}
    for _ in range(2):
        said = server.post("/v1/chat/completions", body).json()
        assert "context" in said["error"]["message"]  # the tiny model's, which ends before what is said of tools
        assert [one for one in asked if one[0] == "inspect_constraint"] == [
            ("inspect_constraint", "model", "open_objects", "schemas"),
            ("inspect_constraint", "model", "spec"),
        ]
    body = {"model": "tiny", "messages": TALK, **as_tool({"$ref": "#/none"})}
    assert "tools: number 0: the JSON schema refers to" in server.post("/v1/chat/completions", body).json()["error"]["message"]


LONG_PROSE = LONG * 3  # 1.5 MB
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[[]]"}}
LONG_CALL = {"function": {"name": "f", "arguments": f"[{'[],' * 900_000}0]"}}
WORK: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "a form of numbers": ("/v1/chat/completions", {"messages": TALK, **as_form({"enum": [1] * 300_000})}, (400,)),
    "calls": ("/v1/chat/completions", {"messages": [*TALK, {"role": "assistant", "tool_calls": [CALL] * 30_000}]}, (400,)),
    "arguments": ("/v1/chat/completions", {"messages": [*TALK, {"role": "assistant", "tool_calls": [LONG_CALL]}]}, (400,)),
    "ids to text": ("/detokenize", {"tokens": [5, 70, 300] * 80_000}, (200,)),
    "texts of ids": ("/tokenize", {"prompt": "a b " * 16_000, "return_token_strs": True}, (200,)),
    "echo": ("/v1/completions", {"prompt": [[5] * 200] * 60, "echo": True, "logprobs": 20, "max_tokens": 1}, (400,)),
    "echo of ids": ("/v1/completions", {"prompt": [[5] * 10_000] * 60, "echo": True, "max_tokens": 1}, (400,)),
    "tools": ("/v1/chat/completions", {"messages": TALK, **as_tool(COSTLY)}, (400,)),
    "a form": ("/v1/chat/completions", {"messages": TALK, **as_form(COSTLY)}, (400,)),
    "64 tools": (
        "/v1/chat/completions",
        {
            "messages": TALK,
            "tools": [
                {
                    "type": "function",
                    "function": {"name": f"f{at}", "parameters": {"properties": {f"p{at}": {"type": "string"}}}},
                }
                for at in range(64)
            ],
        },
        (400,),
    ),
    "messages": ("/v1/chat/completions", {"messages": TALK * 10_000}, (400,)),
    "one message": ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_PROSE}]}, (400,)),
    "variables": ("/v1/chat/completions", {"messages": TALK, "chat_template_kwargs": {"a": [[]] * 100_000}}, (200,)),
    "a prompt": ("/v1/completions", {"prompt": LONG_PROSE}, (400,)),
    "blanks": ("/v1/completions", {"prompt": " " * 1_000_000}, (400,)),
    "texts": ("/v1/embeddings", {"input": ["a " * 1000] * 1500}, (400,)),
    "tokens": ("/tokenize", {"prompt": LONG}, (200,)),
    "markdown": ("/page/render", {"text": "*a _b " * 16_000}, (200,)),
    "quotes": ("/page/render", {"text": "> " * 40_000}, (200,)),
    "code": ("/page/render", {"text": "```python\n" + "f(" * 4_900 + "\n```"}, (200,)),
}


@pytest.mark.parametrize("name", WORK)
def test_the_loop_stays_free(server: Running, name: str, held: Held) -> None:
    """Work whose cost a client chooses is not the web process's (`held` looks at that)."""
    path, body, statuses = WORK[name]
    model = {} if path == "/page/render" else {"model": "tiny"}
    for _ in range(TRIES):
        held.seconds = 0.0
        shared_pool()._known.clear()  # it is worked at again
        answer = server.post(path, {**model, **body})
        assert answer.status_code in statuses, answer.text[:300]
        server.on_loop(lambda: None)  # what sent the answer has ended
        if held.seconds < MOST_HELD:
            break


def test_a_loop_that_is_held_is_noticed(server: Running, monkeypatch: pytest.MonkeyPatch, held: Held) -> None:
    """The same work on the loop."""
    server.on_loop(lambda: markdown.render("*a _b " * 16_000))
    while held.seconds < MOST_HELD:
        server.on_loop(lambda: Tokenizer.from_gguf(byte_level()).encode(LONG))
    with pytest.raises(AssertionError):
        held.check()
    held.most = PATIENCE


def test_long_texts_are_tokenized_in_a_process_that_can_be_ended(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same ids as in this one, by the same code; what takes too much is a 400."""
    tokenizer = server.llm.opened.tokenizer
    here = tokenizer.encode(LONG)
    monkeypatch.setattr(tokenizer, "encode", never)
    assert server.post("/tokenize", {"prompt": LONG}).json()["tokens"] == here
    monkeypatch.setattr("headrace.startup.encoding.SECONDS", 0.05)
    answer = server.post("/tokenize", {"prompt": LONG})
    assert answer.status_code == 400
    assert "the text takes too much time or memory" in answer.json()["error"]["message"]


LONG_REQUESTS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": LONG * 6},
    "chat/completions": {"messages": [{"role": "user", "content": LONG * 6}]},
    "embeddings": {"input": ["a", LONG * 6]},
    "responses": {"input": LONG * 6},
}


@pytest.mark.parametrize("path", LONG_REQUESTS)
def test_a_text_far_beyond_the_context_is_not_encoded_to_its_end(
    server: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three megabytes: the first slice shows that they do not fit."""
    tokenizer = server.llm.opened.tokenizer
    encode, sizes = tokenizer.encode, []

    def seen(text: str, **options: bool) -> list[int]:
        sizes.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", seen)
    monkeypatch.setattr("headrace.server.engines.async_llm.encode_long", never)
    error = server.post(f"/v1/{path}", {"model": "tiny", **LONG_REQUESTS[path]}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert re.search("maximum context length is 256 tokens.* has at least [0-9]+; shorten", error["message"])
    assert sum(sizes) <= SLICE
    assert server.complete(max_tokens=2).choices[0].text


def test_a_disconnect_stops_the_check_of_a_schema(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema would be looked at for ten minutes; its client has gone after a second."""
    monkeypatch.setattr("headrace.startup.compiling.SECONDS", 600.0)
    body = {"model": "tiny", "messages": TALK, "tools": [{"type": "function", "function": {"name": "f", "parameters": COSTLY}}]}
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/chat/completions", json=body, timeout=1.0)
    until(lambda: not shared_pool()._working)


def test_the_delay_of_the_event_loop_is_a_metric(server: Running) -> None:
    def count() -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("headrace:event_loop_lag_seconds_count")))

    before = count()
    until(lambda: count() > before + 2)


PROMPT = 40_000  # tokens


def test_log_probabilities_of_a_long_prompt_are_encoded_in_slices() -> None:
    """Of an answer as large as one may be; the same lists as in one go, which takes this loop longer than anything may."""
    tokenizer = Tokenizer.from_gguf(byte_level())
    ids = [at % 300 for at in range(PROMPT)]
    top, values = tuple(range(20)), tuple(-0.5 * at for at in range(20))
    entries = [None, *(TokenLogprob(token, -1.5, 0, top, values) for token in ids[1:])]
    writer = CompletionLogprobs(tokenizer, 20, ids, True)
    gc.freeze()  # what the collector walks through is not this work's
    made = joined(asyncio.run(writer.encode(ids, entries)))
    gc.unfreeze()
    seconds = time.thread_time()
    whole = CompletionLogprobs(tokenizer, 20, ids, True)._lists(ids, entries)
    assert time.thread_time() - seconds > MOST_HELD
    assert {name: msgspec.json.decode(raw) for name, raw in made.items()} == whole


def test_a_long_history_is_not_worked_through(server: Running) -> None:
    """What a conversation holds together is bounded as one request is, in bytes and in values."""
    body: dict[str, Any] = {"model": "tiny", "input": [{**TALK[0], "id": "a" * (1 << 20)}], "max_output_tokens": 2}
    answers = []
    for _ in range(5):
        answers.append(server.post("/v1/responses", body))
        if answers[-1].status_code == 200:
            body["previous_response_id"] = answers[-1].json()["id"]
    error = answers[-1].json()["error"]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 200, 400]
    assert (error["param"], "begin a new one" in error["message"]) == ("previous_response_id", True)
    items = server.http.get(f"/v1/responses/{body['previous_response_id']}/input_items").json()
    assert len(items["data"]) == 7  # four questions, three answers before
