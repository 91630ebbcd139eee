"""The loop of the engine process, in this one: what it does with requests that are held to something."""

import threading
from typing import Any

import pytest

from headrace.data.params import SamplingParams
from headrace.decoding.constrained import Grammars
from headrace.decoding.looking import look
from headrace.llm import LLM
from headrace.server.engine_process import EngineLoop
from headrace.server.messages import Abort, Deltas, Refused, Submit
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
    grammar = look({"spec": SPEC})["grammar"]
    monkeypatch.setattr("headrace.decoding.constrained.grammar_of", never)
    monkeypatch.setattr("headrace.decoding.constrained.REMEMBERED", 0)
    loop._take(Submit("a", [1, 2, 3], PARAMS, grammar=grammar))
    loop._take(Submit("b", [1, 2, 3], PARAMS))
    assert loop.channel == [Refused("b", "the constraint was not looked at")]
    until(lambda: (loop._compiled(), not loop._compiling)[1])  # type: ignore[func-returns-value]
    said = ""
    while loop.engine.busy:
        step = loop._step()
        assert isinstance(step, Deltas)
        said += "".join(delta.text for delta in step.deltas)
    assert said.lstrip().startswith("{")


def test_a_grammar_nobody_waits_for_is_not_compiled(loop: EngineLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on, compiled = threading.Event(), threading.Event(), []

    def slow(self: Grammars, spec: Any, grammar: str = "") -> Any:
        compiled.append(grammar)
        begun.set()
        assert go_on.wait(PATIENCE)

    monkeypatch.setattr(Grammars, "constraint", slow)
    loop._take(Submit("a", [1], PARAMS, grammar="first"))
    loop._take(Submit("b", [1], PARAMS, grammar="second"))
    assert begun.wait(PATIENCE)
    for name in ("a", "b"):
        loop._take(Abort(name))
    go_on.set()
    loop._compiler.shutdown()
    assert compiled == ["first"]
    assert not loop._compiling
