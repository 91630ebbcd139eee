"""Requests that cost little to send: none of them asks another host, keeps others waiting, or fills the memory."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from headrace.server import fields
from headrace.server.bounds import Strict
from headrace.server.grammar_check import GrammarCheck
from headrace.server.page.routes import RenderRequest
from headrace.text.tokenizer import Tokenizer
from tests.server.harness import Running, in_thread
from tests.trap import trap
from tests.unit.vocabularies import byte_level

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
def test_no_schema_of_a_request_makes_the_server_ask_another_host(server: Running, schema: Any, door: Any) -> None:
    """Nor any of its processes: the trap hears all of them."""
    with trap() as (url, got):
        body = {"model": "tiny", "messages": TALK, "max_tokens": 4, **json.loads(json.dumps(door(schema)).replace("URL", url))}
        answer = server.post("/v1/chat/completions", body)
    assert got == []
    assert answer.status_code == 400
    assert "only references within it" in answer.json()["error"]["message"]


MANY = 50_000
REQUESTS = [
    kind for kind in vars(fields).values() if isinstance(kind, type) and issubclass(kind, Strict) and kind is not Strict
] + [RenderRequest]
MISTAKES: list[Any] = [
    *([value] * MANY for value in (None, 1.5, "x" * 5000, [None], [1.5] * 100, {1: 2}, True)),
    [[None] * MANY] * 70,
    ["x"] * MANY + [None],
    {str(at): [None] for at in range(MANY)},
    "x" * (1 << 20),
]


def mistakes(kind: type[BaseModel], body: dict[str, Any]) -> int:
    """How many are told of a body."""
    try:
        kind.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_of_many_mistakes_a_few_are_told(kind: type[BaseModel]) -> None:
    """One a field, or one a way in which it may be given, however long a list is; one for all unknown fields."""
    required = [name for name, field in kind.model_fields.items() if field.is_required()]
    for name in kind.model_fields:
        for value in MISTAKES:
            assert mistakes(kind, {name: value}) <= len(required) + 5, name
    assert mistakes(kind, {f"x{at}": at for at in range(MANY)}) <= len(required) + 1


def test_without_the_bounds_all_mistakes_are_told() -> None:
    class Open(BaseModel):
        ids: list[int]

    assert mistakes(Open, {"ids": [None] * MANY}) == MANY


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_list_text_and_mapping_is_bounded(kind: type[BaseModel]) -> None:
    """But for what is said to the model, which the context bounds, and objects that are looked at elsewhere."""
    free = {"prompt", "input", "instructions", "suffix", "guided_json"}
    schema = kind.model_json_schema()
    for name, field in schema["properties"].items():
        for way in field.get("anyOf", [field]):
            least = {"array": "maxItems", "object": "maxProperties", "string": "maxLength"}.get(way.get("type", ""))
            if least is not None and not (name in free and way["type"] in ("string", "object")):
                assert least in way or "enum" in way or "const" in way, f"{name}: {way}"


@pytest.fixture(scope="module")
def door() -> Iterator[Running]:
    """Without an engine: what is refused needs none."""
    with Running("no-model", begin=False) as running:
        yield running


def peak() -> int:
    """The most bytes this process has held since the last call."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(found.split()[1]) << 10


MEGABYTES = 4 << 20
BODIES = {
    "zeros": (b'{"model":"m","messages":[', b"0,", b"0]}"),
    "numbers": (b'{"model":"m","prompt":[', b"1.5,", b"0]}"),
    "lists": (b'{"model":"m","prompt":[', b"[1.5],", b"0]}"),
    "words": (b'{"model":"m","prompt":"a","bad_words":[', b"[1],", b"[1]]}"),
    "ids": (b'{"model":"m","prompt":"a","stop_token_ids":[', b"1,", b"1]}"),
    "valid ids": (b'{"model":"m","prompt":[', b"1,", b"1]}"),
    "texts": (b'{"model":"m","prompt":[', b'"a",', b'"a"]}'),
    "stops": (b'{"model":"m","prompt":"a","stop":[', b'"a",', b'"a"]}'),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_large_body_of_mistakes_is_refused_and_leaves_no_trace(door: Running, name: str) -> None:
    """4 MiB: a 400, with a tenth of the work and of the memory that all its mistakes would take."""
    first, each, last = BODIES[name]
    body = first + each * ((MEGABYTES - len(first) - len(last)) // len(each)) + last
    path = "/v1/chat/completions" if b"messages" in first else "/v1/completions"
    peak()
    before = peak()
    began = time.process_time()
    answer = door.http.post(path, content=body, headers={"Content-Type": "application/json"})
    used = time.process_time() - began
    assert answer.status_code == 400, answer.text
    assert used < 5  # seconds of this process, server and client
    assert peak() - before < 200 << 20


def test_many_unknown_fields_are_refused_for_one(door: Running) -> None:
    body = {"model": "m", "prompt": "a", **{f"unknown{at}": 1 for at in range(MANY)}}
    answer = door.post("/v1/completions", body)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "unknown field 'unknown0'; remove it")


LONG = "The mill stands by the river and grinds. " * 12_000  # half a megabyte


def longest_wait(work: Callable[[], Any]) -> float:
    """The longest time for which this thread did not come to its turn while another did `work`, as a share of all of it."""
    thread = threading.Thread(target=work)
    began = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
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


def test_the_schemas_of_tools_are_looked_at_where_that_can_be_stopped(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minutes of work that are not this process's, and are ended: a 400, and others are answered meanwhile."""
    monkeypatch.setattr("headrace.server.tools.prepare", never)
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


def never(schema: Any) -> Any:
    raise AssertionError("a schema was looked at in the web process")


def test_tools_are_looked_at_once_and_by_nobody_else(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    ask = GrammarCheck._ask

    async def counted(self: GrammarCheck, question: dict[str, Any]) -> dict[str, Any]:
        asked.append(sorted(question))
        return await ask(self, question)

    monkeypatch.setattr(GrammarCheck, "_ask", counted)
    monkeypatch.setattr("headrace.server.tools.prepare", never)
    body = {"model": "tiny", "messages": TALK, "max_tokens": 2, **as_tool({"type": "string", "minLength": 17})}
    for _ in range(2):
        said = server.post("/v1/chat/completions", body).json()
        assert "context" in said["error"]["message"]  # the tiny model's, which ends before what is said of tools
        assert asked == [["schemas"], ["spec"]]
    body = {"model": "tiny", "messages": TALK, **as_tool({"$ref": "#/none"})}
    assert "tools: number 0: the JSON schema refers to" in server.post("/v1/chat/completions", body).json()["error"]["message"]
