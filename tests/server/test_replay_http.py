"""Replay through HTTP: the engine process is killed under every kind of request, and no client sees more than a pause."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.server.engines.messages import FromEngine
from tests.server.batching import answers, end, lines, start
from tests.server.harness import Running, in_thread, until

TOKENS = 400
BODY: dict[str, Any] = {"temperature": 1.0, "seed": 5}
MORE: dict[str, Any] = {"ignore_eos": True}
TALK: Any = [{"role": "user", "content": "Tell me about the mill."}]
SCHEMA = {"type": "array", "items": {"enum": ["wood", "iron"]}, "minItems": 80, "maxItems": 80}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "mill", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server(endless: Path) -> Iterator[Running]:
    with Running(endless) as running:
        running.llm.replica.supervision.pauses = (0.0,)
        yield running


def completion(server: Running) -> Any:
    made = server.complete(**BODY, max_tokens=TOKENS, logprobs=1, extra_body=MORE)
    return made.choices[0].text, made.choices[0].logprobs, made.usage


def several(server: Running) -> Any:
    made = server.complete(**BODY, max_tokens=TOKENS, n=2, extra_body=MORE)
    return [choice.text for choice in made.choices], made.usage


def chat_stream(server: Running) -> Any:
    options = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": TOKENS, "extra_body": MORE}
    chunks = list(server.openai.chat.completions.create(model="tiny", messages=TALK, **BODY, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason]
    return text, ends, chunks[-1].usage


def schema_stream(server: Running) -> Any:
    options = {"stream": True, "max_tokens": 10 * TOKENS, "response_format": FORMAT}
    chunks = server.openai.chat.completions.create(model="tiny", messages=TALK, **BODY, **options)
    return json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


def response_stream(server: Running) -> Any:
    events = server.openai.responses.create(
        model="tiny", input="Name a river.", temperature=0, max_output_tokens=TOKENS, stream=True
    )
    kinds, texts, last = [], [], None
    for event in events:
        kinds.append(event.type)
        texts.append(getattr(event, "delta", ""))
        last = getattr(event, "response", last)
    return sorted(set(kinds)), "".join(texts), last.output_text, last.usage


def batch(server: Running) -> Any:
    body = {**BODY, **MORE, "model": "tiny", "prompt": "A river", "max_tokens": TOKENS}
    made = start(server.openai, lines([{**body, "seed": seed} for seed in (1, 2)]))
    found = answers(server.openai, end(server.openai, made.id).output_file_id)
    return sorted((one["custom_id"], one["response"]["body"]["choices"][0]["text"]) for one in found)


KINDS: list[Callable[[Running], Any]] = [completion, several, chat_stream, schema_stream, response_stream, batch]


def kill_under(server: Running, count: int, tokens: int = 6) -> None:
    """Kill the engine once `count` requests have `tokens` tokens each."""
    replica = server.llm.replica
    take, pid = replica._take, server.llm.pid
    assert pid is not None

    def taken(message: FromEngine) -> None:
        take(message)
        if sum(one.generated >= tokens for one in server.llm.inflight.values()) == count:
            replica._take = take
            os.kill(pid, signal.SIGKILL)

    replica._take = taken


def lost(server: Running, tokens: int) -> list[Any]:
    """The answers of all kinds of requests, whose engine is killed after `tokens` tokens of each."""
    before, replayed = server.health()["restarts"], server.figure("request_replays_total")
    count = len(KINDS) + 1  # the batch has two lines
    with server.paused():
        kill_under(server, count, tokens)
        waiting = [in_thread(lambda kind=kind: kind(server)) for kind in KINDS]  # type: ignore[misc]
        until(lambda: len(server.llm.inflight) == count)
    found = [one.result() for one in waiting]
    assert server.health()["restarts"] == before + 1
    assert server.figure("request_replays_total") == replayed + count
    assert not server.llm.inflight
    return found


def test_no_client_sees_a_killed_engine(server: Running) -> None:
    right = [kind(server) for kind in KINDS]
    assert lost(server, 6) == right


@pytest.mark.slow
def test_no_client_sees_an_engine_killed_after_any_token(server: Running) -> None:
    right = [kind(server) for kind in KINDS]
    for tokens in range(24):
        assert lost(server, tokens) == right, tokens
