"""The loop of the engine process, run in the test's process: compilation of grammars for waiting requests."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace.data.params import SamplingParams
from headrace.data.structured import StructuredOutputs
from headrace.decoding import constrained
from headrace.decoding.constrained import Grammars
from headrace.decoding.constraint_check import inspect_constraint
from headrace.llm import LLM
from headrace.server.engines.engine_process import CHEAP_SECONDS, COSTLY_PERIOD, MOST_LARGE, EngineLoop, GrammarQueue
from headrace.server.engines.messages import Deltas, Grammar, Refused, Submit
from tests.server.harness import PATIENCE, until

SPEC = {"json": '{"type": "object", "properties": {"a": {"oneOf": [{"const": 1}, {"const": 2}]}}, "required": ["a"]}'}
PARAMS = SamplingParams(max_tokens=20, structured_outputs=SPEC)


class Heard(list[Any]):
    """A channel that keeps what is said."""

    send = list.append


@pytest.fixture
def loop(offline: LLM) -> EngineLoop:
    offline.engine.grammars._ready.clear()  # type: ignore[union-attr]
    return EngineLoop(offline, channel=Heard(), beat=1.0)  # type: ignore[arg-type]


def never(*_: Any) -> Any:
    raise AssertionError("a schema was rewritten")


def test_no_schema_is_rewritten_in_the_engine_process(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled from what the look at it gave, and a request that brings nothing is refused; also where as many others
    were compiled meanwhile as are remembered."""
    grammar = Grammar(inspect_constraint({"spec": SPEC})["grammar"], 1000)
    monkeypatch.setattr("headrace.decoding.constrained.grammar_of", never)
    monkeypatch.setattr("headrace.decoding.constrained.REMEMBERED", 0)
    loop._take(Submit("a", [1, 2, 3], PARAMS, grammar=grammar))
    loop._take(Submit("b", [1, 2, 3], PARAMS))
    assert loop.channel == [Refused("b", "the constraint was not compiled in a confined process")]
    until(lambda: (loop._compiled(), not loop.compiling)[1])  # type: ignore[func-returns-value]
    said = ""
    while loop.engine.busy:
        step = loop._step()
        assert isinstance(step, Deltas)
        said += "".join(delta.text for delta in step.deltas)
    assert said.lstrip().startswith("{")


class Slow:
    """Compilations that end when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()
        monkeypatch.setattr(Grammars, "constraint", self._constraint)

    def _constraint(self, spec: StructuredOutputs, grammar: str, size: int) -> Any:
        self.begun.append(grammar)
        assert self.go_on.wait(PATIENCE)


def queue(
    compiling: GrammarQueue, name: str, *, turn: int = 0, size: int = 1000, regex: str = "", seconds: float = 0.0
) -> None:
    params = SamplingParams(max_tokens=2, structured_outputs={"regex": regex or name})
    compiling.add(Submit(name, [1], params, turn=turn, grammar=Grammar(name, size, seconds)))


@pytest.fixture
def compiling(loop: EngineLoop) -> Iterator[GrammarQueue]:
    assert loop.compiling is not None
    yield loop.compiling
    loop.compiling.close()


def test_grammars_of_cancelled_requests_are_not_compiled(compiling: GrammarQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two that are being compiled go on, as nothing can stop them; those behind them never start."""
    slow = Slow(monkeypatch)
    for name in "abcd":
        queue(compiling, name)
    assert compiling.take() == []
    for name in "abc":
        compiling.end(name)
    assert compiling.take() == []  # both threads still work
    slow.go_on.set()
    until(lambda: [message.request_id for message, _ in compiling.take()] == ["d"])
    assert sorted(slow.begun) == ["a", "b", "d"]
    assert not compiling


def test_the_grammar_with_the_smallest_turn_is_compiled_first(compiling: GrammarQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's third request comes after another's first, though it was sent before it."""
    monkeypatch.setattr("headrace.server.engines.engine_process.CHEAP_THREADS", 1)
    slow = Slow(monkeypatch)
    for turn, name in enumerate("abc"):
        queue(compiling, name, turn=turn + 1)
    compiling.take()
    queue(compiling, "other", turn=1)
    slow.go_on.set()
    until(lambda: (compiling.take(), not compiling)[1])
    assert slow.begun == ["a", "other", "b", "c"]


def test_costly_grammars_are_compiled_one_by_one(compiling: GrammarQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not occupy the threads for cheap grammars."""
    slow = Slow(monkeypatch)
    for name in ("costly", "costly too"):
        queue(compiling, name, seconds=2 * CHEAP_SECONDS)
    for name in ("cheap", "cheap too"):
        queue(compiling, name, seconds=CHEAP_SECONDS)
    compiling.take()
    until(lambda: len(slow.begun) == 3)
    compiling.end("costly")  # it goes on, as nothing can stop it
    assert compiling.take() == []
    assert "costly too" not in slow.begun
    slow.go_on.set()
    until(lambda: (compiling.take(), not compiling)[1])
    assert sorted(slow.begun) == ["cheap", "cheap too", "costly", "costly too"]


def test_next_to_running_requests_costly_grammars_have_pauses(compiling: GrammarQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twentieth of the time of one thread at most; an idle engine compiles them at once, and cheap ones never wait."""
    now = [100.0]
    compiling._clock = lambda: now[0]
    Slow(monkeypatch).go_on.set()
    done: list[str] = []

    def take(busy: bool) -> list[str]:
        for _ in range(100):  # longer than a compilation takes here
            done.extend(message.request_id for message, _ in compiling.take(busy))
            time.sleep(0.001)
        return done

    for name in "abc":
        queue(compiling, name, seconds=0.5)
    queue(compiling, "cheap")
    assert sorted(take(busy=True)) == ["a", "cheap"]
    now[0] += 0.5 * COSTLY_PERIOD - 0.01
    assert len(take(busy=True)) == 2
    now[0] += 0.01
    assert take(busy=True)[2:] == ["b"]
    assert take(busy=False)[3:] == ["c"]


def test_one_grammar_is_compiled_once(compiling: GrammarQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    queue(compiling, "a", regex="x")
    queue(compiling, "b", regex="x")
    compiling.take()
    assert slow.begun in (["a"], [])
    slow.go_on.set()
    until(lambda: (compiling.take(), not compiling)[1])
    assert slow.begun == ["a", "b"]  # the second would be found, were anything remembered here


def test_large_grammars_wait_for_memory(compiling: GrammarQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones pass, and the end of a request makes room."""
    slow = Slow(monkeypatch)
    slow.go_on.set()
    done: list[str] = []

    def take() -> list[str]:
        done.extend(message.request_id for message, _ in compiling.take())
        return done

    queue(compiling, "a", size=MOST_LARGE)
    queue(compiling, "b", size=MOST_LARGE // 2)
    queue(compiling, "c", size=1000)
    until(lambda: sorted(take()) == ["a", "c"])
    assert compiling
    compiling.end("a")
    until(lambda: take()[2:] == ["b"])


def test_remembered_grammars_are_bounded_in_bytes(loop: EngineLoop) -> None:
    grammars = loop.engine.grammars
    assert grammars is not None
    specs = [StructuredOutputs(regex=f"{name}[0-9]") for name in "abcd"]
    most = constrained.REMEMBERED // 3 - constrained.GROWTH
    for spec in specs:
        grammars.constraint(spec, size=most)
    assert [grammars.find(spec) is not None for spec in specs] == [False, True, True, True]
    grammars.constraint(StructuredOutputs(regex="e"), size=constrained.REMEMBERED)
    assert [grammars.find(spec) is not None for spec in specs] == [False] * 4
