"""Messages between the web process and the engine process: round trips, refusal of other bytes, and the admission queue."""

import ast
import asyncio
import re
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

import headrace.server
from headrace.data.params import SamplingParams
from headrace.data.plan import Exited, TokenLogprob
from headrace.data.structured import ConstraintError
from headrace.data.types import Delta, RequestMetrics
from headrace.server.access.queueing import AdmissionQueue, QueueFullError
from headrace.server.engines import messages
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.engine_client import EngineConnection, EngineGoneError
from headrace.server.engines.engine_process import _message
from headrace.server.engines.inflight import (
    EngineDownError,
    InflightRequest,
    RequestFailedError,
    WakeupEvent,
    collect_answer,
    stream_deltas,
)
from headrace.server.engines.messages import (
    PREFIX,
    Abort,
    Deltas,
    Draining,
    Ended,
    FrameError,
    Join,
    Load,
    Loaded,
    NotLoaded,
    Refused,
    Stats,
    Submit,
    frame,
    frame_length,
    read_from_engine,
    read_to_engine,
)
from tests.server.harness import PATIENCE

SERVER = Path(headrace.server.__file__).parent
UNSAFE = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "multiprocessing", "zmq"}
SCORED = TokenLogprob(5, -0.25, 1, [5, 6], [-0.25, -1.5])

TO_ENGINE: list[Any] = [
    Load("model", {"dtype": "float32", "threads": None}, 30, 1.0),
    Submit("a-1", [1, 2, 3], SamplingParams(n=2, stop=("x",), logit_bias={4: -1.5}, bad_words=((1, 2),)), b"salt"),
    Abort("a-1"),
    Join("0.1.0", "digest"),
]
FROM_ENGINE: list[Any] = [
    Loaded(256, 32, 402, 512, 16, "note"),
    NotLoaded("no such file"),
    Refused("a-1", "too long"),
    Draining(),
    Ended("was stopped", "silent"),
    Deltas(
        [Delta("a-1", 1, [5], "é", (SCORED,), "stop", "x", finished=True)],
        {"a-1": RequestMetrics(arrival=1.5, cached_tokens=16)},
        {"a-1": [None, SCORED]},
        Stats(1, 2, 3, 4),
    ),
]


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_to_the_engine_round_trip(message: Any) -> None:
    data = frame(message)
    assert frame_length(data[: PREFIX.size]) == len(data) - PREFIX.size
    assert read_to_engine(data[PREFIX.size :]) == message
    with pytest.raises(FrameError):
        read_from_engine(data[PREFIX.size :])


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_messages_from_the_engine_round_trip(message: Any) -> None:
    assert read_from_engine(frame(message)[PREFIX.size :]) == message
    with pytest.raises(FrameError):
        read_to_engine(frame(message)[PREFIX.size :])


def test_invalid_messages_are_refused() -> None:
    good = frame(TO_ENGINE[1])[PREFIX.size :]
    unknown = msgspec.msgpack.encode({"type": "Run", "code": "print(1)"})
    bad_value = good.replace(b"\xa1n\x02", b"\xa1n\x00")
    assert bad_value != good
    for data in (b"", good[:-1], b"\xff" * 50, b"\x80\x04\x95", unknown, bad_value):
        with pytest.raises(FrameError):
            read_to_engine(data)
    with pytest.raises(FrameError, match="is the most"):
        frame_length(PREFIX.pack(messages.MAX_FRAME + 1))


def test_the_server_neither_unpickles_nor_opens_other_listeners() -> None:
    sources = {path.name: path.read_text("utf-8") for path in SERVER.rglob("*.py")}
    assert len(sources) > 10
    for name, source in sources.items():
        assert not imported(source) & UNSAFE, name
        assert re.search(r"(?<!\w)(?:eval|exec)\(", source) is None, name
    listening = re.compile(r"create_server|start_server|Listener\(")
    listeners = ["engine_port.py", "kv_peers.py", "serving.py"]
    assert sorted(name for name, source in sources.items() if listening.search(source)) == listeners
    assert imported("import pickle\nfrom multiprocessing.connection import Listener") == {"pickle", "multiprocessing"}


def imported(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    return names


def test_an_invalid_frame_from_the_engine_ends_it() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        engine = EngineConnection(reader, writer, None)  # type: ignore[arg-type]
        theirs.sendall(PREFIX.pack(3) + b"abc")
        with pytest.raises(EngineGoneError, match="an invalid message"):
            await engine.receive()
        theirs.sendall(PREFIX.pack(2**32 - 1))
        with pytest.raises(EngineGoneError, match="is the most"):
            await engine.receive()
        writer.close()
        theirs.close()

    asyncio.run(main())


def test_the_queue_is_bounded_by_requests_and_by_tokens() -> None:
    waiting = AdmissionQueue(max_requests=2, max_tokens=100)
    waiting.enter([500])  # alone, a long prompt is let in
    with pytest.raises(QueueFullError, match="500 prompt tokens are waiting and 100 may"):
        waiting.enter([1])
    waiting.leave(500)
    waiting.enter([40, 40])
    with pytest.raises(QueueFullError, match="2 requests are waiting and 2 may") as full:
        waiting.enter([1])
    assert full.value.retry_after >= 1
    waiting.leave(40)
    with pytest.raises(QueueFullError, match="40 prompt tokens"):
        waiting.enter([61])
    waiting.enter([60])
    for tokens in (40, 60):
        waiting.leave(tokens)
    assert (waiting.requests, waiting.tokens) == (0, 0)


def test_a_failed_request_leaves_others_running_and_hides_details() -> None:
    async def main() -> None:
        waiting = AdmissionQueue(9, 99)
        waiting.enter([1, 1])
        wakeup = WakeupEvent()
        bad, good = (InflightRequest(name, [1], SamplingParams(), waiting, wakeup) for name in ("bad", "good"))
        llm = AsyncLLM("none")
        llm.inflight |= {"bad": bad, "good": good}
        failed = Delta("bad", 0, finish_reason="error", error="the step failed: /secret/path", finished=True)
        ends = {name: RequestMetrics() for name in ("bad", "good")}
        llm.requests.take(Deltas([failed, Delta("good", 0, [5], "a", finish_reason="length", finished=True)], ends))
        assert [delta.text async for _, delta in stream_deltas([good])] == ["a"]
        with pytest.raises(RequestFailedError) as error:
            [delta async for _, delta in stream_deltas([bad])]
        assert "secret" not in str(error.value)
        assert not llm.inflight
        assert waiting.requests == 0

    asyncio.run(main())


def test_an_error_after_a_token_is_delivered() -> None:
    async def main() -> None:
        waiting = AdmissionQueue(9, 99)
        waiting.enter([1])
        submitted = InflightRequest("a", [1], SamplingParams(), waiting, WakeupEvent())
        heard = stream_deltas([submitted])
        submitted.put(Delta("a", 0, [5], "x"))
        assert (await anext(heard))[1].text == "x"
        submitted.put(Delta("a", 0, [5], "y"))
        submitted.fail(EngineDownError("gone"))
        assert (await anext(heard))[1].text == "y"
        with pytest.raises(EngineDownError, match="gone"):
            await asyncio.wait_for(anext(heard), PATIENCE)

    asyncio.run(main())


def test_a_wakeup_event_wakes_its_waiter_once() -> None:
    async def main() -> None:
        wakeup = WakeupEvent()
        wakeup.set()
        await wakeup.wait()  # what came before is not lost
        for _ in range(3):
            waiter = asyncio.create_task(wakeup.wait())
            await asyncio.sleep(0)
            assert not waiter.done()
            wakeup.set()
            wakeup.set()
            await asyncio.wait_for(waiter, PATIENCE)
        waiter = asyncio.create_task(wakeup.wait())
        await asyncio.sleep(0)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        wakeup.set()  # nobody waits any more
        await asyncio.wait_for(wakeup.wait(), PATIENCE)

    asyncio.run(main())


def test_the_error_of_a_grammar_hides_internal_details(caplog: pytest.LogCaptureFixture) -> None:
    assert _message(ConstraintError("the regex is too large")) == "the regex is too large"
    assert "/secret" not in _message(OSError("/secret/path"))
    assert "/secret" in caplog.text


def test_a_collected_answer_has_all_fields() -> None:
    waiting = AdmissionQueue(4, 64)
    waiting.enter([1])
    submitted = InflightRequest("a", [1], SamplingParams(), waiting, WakeupEvent())
    parts = [
        Delta("a", 0, [number], str(number), (TokenLogprob(number, -1.0, 1, ()),), exits=(Exited(number),))
        for number in range(3)
    ]
    for part in (*parts, Delta("a", 0, finish_reason="stop", finished=True)):
        submitted.put(part)
    submitted.end(RequestMetrics())
    whole = asyncio.run(collect_answer(submitted))
    assert (whole.token_ids, whole.text, whole.finish_reason) == ([0, 1, 2], "012", "stop")
    assert [one.token for one in whole.logprobs] == [one.layers for one in whole.exits] == [0, 1, 2]
    assert submitted.take() == [whole]
