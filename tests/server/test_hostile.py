"""Requests that cost little to send: none of them asks another host, keeps others waiting, or fills the memory."""

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import msgspec
import pytest

from headrace.confined.pool import shared
from headrace.confined.worker import Task, Worker
from headrace.decoding.looking import LOOK
from headrace.server import fields, reading
from headrace.server.bounds import Strict
from headrace.server.errors import ApiError
from headrace.server.page import markdown
from headrace.server.page.routes import RenderRequest
from headrace.text.tokenizer import Tokenizer
from tests.server.harness import PATIENCE, Running, in_thread, until
from tests.trap import trap
from tests.unit.vocabularies import byte_level

TALK: Any = [{"role": "user", "content": "hi"}]
OUTWARD = [
    {"oneOf": [{"const": 1}, {"$dynamicRef": "URL"}]},
    {"oneOf": [{"const": 1}, {"not": {"$dynamicRef": "URL"}, "multipleOf": 7}]},
    {"$ref": "URL"},
]


MOST_HELD = 0.1  # seconds


class Held:
    """What this test's event loops did at most: the longest that one callback worked (CPU time of its thread, which no busy
    machine makes longer), and how many bytes this process took."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        self.most = MOST_HELD
        peak()
        self._before = peak()
        run = asyncio.events.Handle._run

        def timed(handle: Any) -> None:
            began = time.thread_time()
            run(handle)
            self.seconds = max(self.seconds, time.thread_time() - began)

        monkeypatch.setattr(asyncio.events.Handle, "_run", timed)

    def check(self) -> None:
        assert self.seconds < self.most
        assert peak() - self._before < 200 << 20


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    """Every request of this file leaves the loop to others, and takes little memory."""
    found = Held(monkeypatch)
    yield found
    found.check()


def peak() -> int:
    """The most bytes this process has held since the last call."""
    found = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return int(found.split()[1]) << 10


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
MEGABYTES = 4 << 20  # bytes of a body at most
REQUESTS = [
    kind for kind in vars(fields).values() if isinstance(kind, type) and issubclass(kind, Strict) and kind is not Strict
] + [RenderRequest]
EACH = (
    b"null",
    b"1.5",
    b"-1",
    b"1",
    b"true",
    b'"x"',
    b'""',
    b"[]",
    b"{}",
    b"[null]",
    b"[[1]]",
    b'{"a":1}',
    b"[[[[[]]]]]",
)


def filled(each: bytes, size: int) -> bytes:
    """A list of so many bytes."""
    return b"[" + b",".join([each] * (size // (len(each) + 1))) + b"]"


@pytest.fixture(scope="module")
def fillings() -> dict[str, bytes]:
    """Values as large as a body may be."""
    size = MEGABYTES - 200
    made = {each.decode()[:10]: filled(each, size) for each in EACH}
    made["many names"] = b"{" + b",".join(b'"%d":null' % at for at in range(size // 15)) + b"}"
    made["a text"] = b'"' + b"x" * size + b'"'
    made["quotes in a text"] = b'"' + rb"\"[" * (size // 3) + b'"'
    made["digits"] = b"1" * size
    made["digits behind a point"] = b"0." + b"1" * size
    made["depth"] = b"[" * size
    made["a long list behind a good one"] = b"[[1]," + filled(b"null", size)[1:]
    return made


EVERY_FIELD = {f"{kind.__name__}.{one.name}": (kind, one) for kind in REQUESTS for one in msgspec.structs.fields(kind)}
# One of each kind: what differs in its bounds alone is read alike.
FIELDS = {re.sub(r"Meta\([^)]*\)|\d+", "", str(one.type)): place for place, (_, one) in EVERY_FIELD.items()}.values()
MOST_READ = 0.1  # seconds of CPU time until a large body is refused: some 0.02, and four times that where others work
TRIES = 5  # what takes too long does so each time


def refused(kind: type[Strict], body: bytes) -> tuple[float, ApiError | None]:
    """What is said of a body, and the least time that took."""
    least, error = float("inf"), None
    for _ in range(TRIES):
        began = time.thread_time()
        try:
            reading.read_body(body, kind)
        except ApiError as said:
            error = said
        least = min(least, time.thread_time() - began)
        if least < MOST_READ:
            break
    return least, error


def check_filled(place: str, fillings: dict[str, bytes]) -> None:
    kind, field = EVERY_FIELD[place]
    for what, value in fillings.items():
        seconds, error = refused(kind, b'{"%s":%s}' % (field.name.encode(), value))
        assert seconds < MOST_READ, what
        if error is not None:
            assert error.status == 400
            assert len(error.message) < 400
            assert "\n" not in error.message


@pytest.mark.parametrize("place", FIELDS)
def test_a_field_filled_with_megabytes_is_refused_at_once(place: str, fillings: dict[str, bytes]) -> None:
    check_filled(place, fillings)


@pytest.mark.slow
@pytest.mark.parametrize("place", EVERY_FIELD)
def test_every_field_filled_with_megabytes_is_refused_at_once(place: str, fillings: dict[str, bytes]) -> None:
    check_filled(place, fillings)


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_unknown_fields_by_the_thousand_are_refused_for_the_first(kind: type[Strict]) -> None:
    body = b"{" + b",".join(b'"unknown%d":1' % at for at in range(MEGABYTES // 18)) + b"}"
    seconds, error = refused(kind, body)
    assert seconds < MOST_READ
    assert error is not None
    assert (error.message, error.param) == ("unknown field 'unknown0'; remove it", "unknown0")


def test_what_a_body_may_hold_is_counted_outside_of_its_texts() -> None:
    """A text may be full of brackets and quotes; more arrays, objects and texts than there may be are told by their number."""
    text = rb"[{\"\\" * (reading.CONTAINERS // 2)
    body = b'{"model":"m","prompt":"%s"}' % text
    assert body.count(b"[") + body.count(b"{") > reading.CONTAINERS
    assert reading.read_body(body, fields.CompletionRequest).prompt == json.loads(body)["prompt"]
    for value, most, what in (
        (filled(b"[]", 3 * reading.CONTAINERS), reading.CONTAINERS, "arrays and objects"),
        (filled(b'"a["', 6 * reading.STRINGS), reading.STRINGS, "texts and names"),
        (filled(b"1", 3 * reading.VALUES), reading.VALUES, "values"),
    ):
        with pytest.raises(ApiError, match=rf"the body holds more than {most} {what}; send less"):
            reading.read_body(b'{"model":"m","messages":[],"audio":%s}' % value, fields.ChatRequest)
    just = filled(b"[]", 3 * (reading.CONTAINERS - 4))
    assert reading.read_body(b'{"model":"m","messages":[],"audio":%s}' % just, fields.ChatRequest).audio


def test_without_the_count_a_million_small_lists_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    body = b'{"model":"m","prompt":%s}' % filled(b"[1]", MEGABYTES - 50)
    counted, _ = refused(fields.CompletionRequest, body)
    monkeypatch.setattr(reading, "check_size", lambda data: None)
    assert refused(fields.CompletionRequest, body)[0] > 3 * counted


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: kind.__name__)
def test_every_list_text_and_mapping_is_bounded(kind: type[Strict]) -> None:
    """But for what is said to the model, which the context bounds, and objects that are looked at elsewhere."""
    free = {"prompt", "input", "instructions", "suffix", "guided_json"}
    schema = msgspec.json.schema_components((kind,))[1][kind.__name__]
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


def test_tools_are_looked_at_once_and_by_nobody_else(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    ask = Worker.ask

    def counted(self: Worker, task: Task, frame: bytes) -> Any:
        asked.append((task.function, *sorted(msgspec.msgpack.decode(frame)[3])))
        return ask(self, task, frame)

    monkeypatch.setattr(Worker, "ask", counted)
    monkeypatch.setattr("headrace.decoding.tools.prepare", never)
    body = {"model": "tiny", "messages": TALK, "max_tokens": 2, **as_tool({"type": "string", "minLength": 17})}
    for _ in range(2):
        said = server.post("/v1/chat/completions", body).json()
        assert "context" in said["error"]["message"]  # the tiny model's, which ends before what is said of tools
        assert [one for one in asked if one[0] == "look"] == [("look", "schemas"), ("look", "spec")]
    body = {"model": "tiny", "messages": TALK, **as_tool({"$ref": "#/none"})}
    assert "tools: number 0: the JSON schema refers to" in server.post("/v1/chat/completions", body).json()["error"]["message"]


LONG_PROSE = LONG * 3  # 1.5 MB
WORK: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
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
def test_the_loop_stays_free(server: Running, name: str) -> None:
    """Work whose cost a client chooses is not the web process's (`held` looks at that)."""
    path, body, statuses = WORK[name]
    model = {} if path == "/page/render" else {"model": "tiny"}
    answer = server.post(path, {**model, **body})
    assert answer.status_code in statuses, answer.text[:300]


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


def test_who_leaves_is_not_worked_for(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema would be looked at for ten minutes; its client has gone after a second."""
    monkeypatch.setattr("headrace.server.structured.LOOK", replace(LOOK, seconds=600.0, remembered=False))
    body = {"model": "tiny", "messages": TALK, "tools": [{"type": "function", "function": {"name": "f", "parameters": COSTLY}}]}
    with pytest.raises(httpx.ReadTimeout):
        server.http.post("/v1/chat/completions", json=body, timeout=1.0)
    until(lambda: not shared()._working)


def test_how_late_the_loop_is_is_a_figure(server: Running) -> None:
    def count() -> float:
        lines = server.http.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith("headrace:event_loop_lag_seconds_count")))

    before = count()
    until(lambda: count() > before + 2)
