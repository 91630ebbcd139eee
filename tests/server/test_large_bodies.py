"""Bodies as large as they may be, and wrong: one clear 400 at once, without much memory."""

import json
import re
import time
from collections.abc import Iterator

import msgspec
import pytest

from headrace.server.http import body_limits as reading
from headrace.server.http.api_error import ApiError
from headrace.server.http.limits_check import StrictStruct
from headrace.server.page.routes import RenderRequest
from headrace.server.protocols import fields
from tests.server.harness import Running
from tests.server.resource_limits import TRIES, held, peak

__all__ = ["held"]

MANY = 50_000
MEGABYTES = 4 << 20  # bytes of a body at most
REQUESTS = [
    kind
    for kind in vars(fields).values()
    if isinstance(kind, type) and issubclass(kind, StrictStruct) and kind is not StrictStruct
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


def refused(kind: type[StrictStruct], body: bytes) -> tuple[float, ApiError | None]:
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
def test_unknown_fields_by_the_thousand_are_refused_for_the_first(kind: type[StrictStruct]) -> None:
    body = b"{" + b",".join(b'"unknown%d":1' % at for at in range(MEGABYTES // 18)) + b"}"
    seconds, error = refused(kind, body)
    assert seconds < MOST_READ
    assert error is not None
    assert (error.message, error.param) == ("unknown field 'unknown0'; remove it", "unknown0")


LARGE = {
    "numbers": b'{"model": "m", "prompt": [' + b"1.0," * 200_000 + b"1]}",
    "messages": b'{"model": "m", "messages": [' + b'{"role": "user", "x": null},' * 20_000 + b"{}]}",
}


@pytest.mark.parametrize("name", LARGE)
def test_large_bodies_are_not_normalized(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is work in Python for each value, on the event loop."""
    monkeypatch.setattr(reading, "normalize", lambda *_: pytest.fail("the body was normalized"))
    with pytest.raises(ApiError, match=r"prompt.0: must be an integer|messages: must be a list of at most"):
        reading.read_body(LARGE[name], fields.ChatRequest if name == "messages" else fields.CompletionRequest)


def test_an_unknown_name_of_megabytes_is_refused_at_once() -> None:
    for value in (b"1", b"null"):
        start = time.process_time()
        with pytest.raises(ApiError, match="unknown field 'kkk"):
            reading.read_body(b'{"model": "m", "' + b"k" * 4_000_000 + b'": ' + value + b"}", fields.CompletionRequest)
        assert time.process_time() - start < 2


def test_commas_in_texts_are_not_counted() -> None:
    body = b'{"model": "m", "prompt": "' + b"a, [" * 100_000 + b'", "max_tokens": 5.0, "other": null}'
    assert reading.read_body(body, fields.CompletionRequest).max_tokens == 5


def test_containers_and_strings_of_a_body_are_counted_outside_its_texts() -> None:
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
def test_every_list_text_and_mapping_is_bounded(kind: type[StrictStruct]) -> None:
    """But for what is said to the model, which the context bounds, and objects that are looked at elsewhere."""
    free = {"prompt", "input", "instructions", "suffix", "guided_json", "query", "text"}
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
def test_a_large_invalid_body_is_refused_with_little_memory(door: Running, name: str) -> None:
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
