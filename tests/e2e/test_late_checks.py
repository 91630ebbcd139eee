"""Schema keywords that no mask enforces are checked on the finished text, outside the engine's turn."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.decoding import constraint_check
from headrace.engine import lockstep as callers
from headrace.llm import LLM

LATE = {"type": "string", "pattern": "^(?=a)a", "maxLength": 1}  # a lookahead is checked late
HELD = SamplingParams(temperature=0.0, max_tokens=40, structured_outputs={"json": LATE})
FREE = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def by_generate(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    return llm.generate(prompts, HELD)


def by_step(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    outputs, ended = [llm.add(prompt, HELD) for prompt in prompts], []
    while len(ended) < len(outputs):
        ended += llm.step()
    assert {id(one) for one in ended} == {id(one) for one in outputs}
    return outputs


def by_stream(llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    found: list[RequestOutput] = []
    for prompt in prompts:
        deltas = list(llm.stream(prompt, HELD, output=found))
        assert deltas[-1].finished
    return found


@pytest.mark.parametrize("run", [by_generate, by_step, by_stream])
def test_a_check_does_not_block_other_threads(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    """Another thread generates to its end while an output is checked."""
    ended = []

    def check(output: RequestOutput) -> None:
        other = threading.Thread(target=lambda: ended.extend(tiny_llm.generate([[5, 6]], FREE)), daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), "the other thread waits for the check"

    monkeypatch.setattr(callers, "check_outputs", check)
    assert [output.finished for output in run(tiny_llm, [[7, 8]])] == [True]
    assert [len(one.outputs[0].token_ids) for one in ended] == [4]
    assert not tiny_llm.callers.open


@pytest.mark.parametrize("run", [by_generate, by_step, by_stream])
def test_a_failing_check_fails_only_its_output(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> None:
    def broken() -> object:
        raise BlockingIOError("no process can be started")

    monkeypatch.setattr(constraint_check, "shared_pool", broken)
    outputs = run(tiny_llm, [[7, 8], [9, 10], [11, 12]])
    reasons = {one.outputs[0].finish_reason for one in outputs}
    assert reasons <= {"error", "length"}
    assert "error" in reasons
    assert {one.error for one in outputs if one.outputs[0].finish_reason == "error"} == {
        "the output cannot be checked against its JSON schema (BlockingIOError: no process can be started)"
    }
    assert not tiny_llm.callers.open
    assert tiny_llm.generate([[5, 6]], FREE)[0].error is None


def test_an_interrupted_check_is_not_an_answer(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(output: RequestOutput) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(callers, "check_outputs", interrupted)
    output = tiny_llm.add([7, 8], HELD)
    with pytest.raises(KeyboardInterrupt):
        _run_to_the_end(tiny_llm, output)
    assert output.error == "the output was not checked against its constraint: interrupted"
    assert not tiny_llm.callers.open


def _run_to_the_end(llm: LLM, output: RequestOutput) -> None:
    while not output.finished:
        llm.step()


def test_an_abort_before_the_check_ends_as_aborted(tiny_llm: LLM) -> None:
    found: list[RequestOutput] = []
    list(tiny_llm.stream([7, 8], HELD, output=found, cancelled=lambda: bool(tiny_llm.callers._unchecked)))
    assert found[0].finished
    assert found[0].outputs[0].finish_reason in ("abort", "length")
    assert not tiny_llm.callers.open
