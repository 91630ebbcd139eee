"""`LLM` among faults and threads: a strategy that fails, in whatever hook, ends its request with an error and nobody waits for
ever; of many threads that call at once each gets what it would get alone."""

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.data.params import SamplingParams
from headrace.data.plan import AnyWant, Feed, Ranked, Top, Want, Where
from headrace.data.types import Child, Draft, Request, Sequence
from headrace.decoding.base import Outputs, Strategy
from headrace.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class Best(Strategy):
    """The likeliest token; what its subclasses change of it is wrong."""

    streams = True

    def width(self, request: Request) -> int:
        return 1

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (Top(1),) if last else ()

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return [[Child(token=answer.ids[0])] for _, (answer,) in outputs if isinstance(answer, Ranked)]

    def done(self, request: Request) -> bool:
        return False

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        return [(seq, 0.0) for seq in request.finished]


def fail(*args: object) -> object:
    raise ArithmeticError("wrong")


WRONG: dict[str, tuple[dict[str, object], str]] = {
    "want raises": ({"want": fail}, "ArithmeticError: wrong"),
    "an unknown want": ({"want": lambda *a: (Want(),)}, "returned unknown wants"),
    "a want that is no tuple": ({"want": lambda *a: Top(1)}, "returned unknown wants"),
    "a want of rows that are not there": ({"want": lambda *a: (Top(1, at=Where.ALL),)}, "returned unknown wants"),
    "observe raises": ({"observe": fail}, "ArithmeticError: wrong"),
    "select raises": ({"select": fail}, "ArithmeticError: wrong"),
    "too few children": ({"select": lambda *a: []}, "children for 0 sequences of 1"),
    "too many children": ({"select": lambda *a: [[Child(token=1), Child(token=2)]]}, "width() says at most 1"),
    "no such token": ({"select": lambda *a: [[Child(token=10**6)]]}, "chose token 1000000"),
    "no such output": ({"select": lambda *a: [[Child(token=1, index=3)]]}, "child index 3, and n is 1"),
    "no child at all": ({"select": lambda *a: [None]}, "TypeError"),
    "done raises": ({"done": fail}, "ArithmeticError: wrong"),
    "results raise": ({"streams": False, "results": fail}, "ArithmeticError: wrong"),
    "results say None": ({"streams": False, "results": lambda *a: None}, "TypeError"),
    "no result": ({"streams": False, "results": lambda *a: []}, "nothing that may come"),
    "too many results": ({"streams": False, "results": lambda s, r: [(r.finished[0], 0.0)] * 2}, "2 outputs, and n is 1"),
    "draft raises": ({"draft": fail, "nodes": lambda *a: 4}, "ArithmeticError: wrong"),
    "an empty draft": ({"draft": lambda *a: Draft([], [], True), "nodes": lambda *a: 4}, "drafted no node"),
    "a draft too large": ({"draft": lambda *a: Draft([1] * 5, [-1] * 5, True), "nodes": lambda *a: 4}, "5 nodes"),
    "a draft of no token": ({"draft": lambda *a: Draft([-3], [-1], True), "nodes": lambda *a: 4}, "not in the vocabulary"),
    "a draft without root": ({"draft": lambda *a: Draft([1], [0], True), "nodes": lambda *a: 4}, "the parent of each node"),
}


@pytest.mark.parametrize("hook", ["width", "nodes", "shares"])
def test_a_failing_strategy_hook_fails_only_its_caller(tiny_llm: LLM, hook: str) -> None:
    alone = tiny_llm.generate("the mill", GREEDY)[0].outputs[0].token_ids
    beside = tiny_llm.add("the mill", GREEDY)
    with pytest.raises(ArithmeticError, match="wrong"):
        tiny_llm.generate("the mill", GREEDY, strategy=type("Wrong", (Best,), {hook: fail})())
    while not beside.finished:
        tiny_llm.step()
    assert beside.outputs[0].token_ids == alone
    assert not tiny_llm.engine.requests


@pytest.mark.parametrize("what", WRONG)
def test_a_failing_strategy_fails_no_other_request(tiny_llm: LLM, what: str) -> None:
    changes, message = WRONG[what]
    wrong = type("Wrong", (Best,), dict(changes))()
    alone = tiny_llm.generate("the mill", GREEDY)[0].outputs[0].token_ids
    beside = tiny_llm.add("the mill", GREEDY)
    (output,) = tiny_llm.generate("the mill", GREEDY, strategy=wrong)
    assert output.error is not None
    assert message in output.error
    assert output.outputs[0].finish_reason == "error"
    while not beside.finished:
        tiny_llm.step()
    assert beside.error is None
    assert beside.outputs[0].token_ids == alone
    assert not tiny_llm.engine.busy
    assert tiny_llm.engine.blocks.used == 0
    assert not tiny_llm.callers.open


def test_a_lost_request_raises_an_error(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the engine to forget a request, its caller would be told."""
    add = tiny_llm.engine.add

    def forgotten(*args: Any, **more: Any) -> Request:
        request = add(*args, **more)
        tiny_llm.engine.scheduler.finish(request)
        del tiny_llm.engine.requests[request.id]
        return request

    monkeypatch.setattr(tiny_llm.engine, "add", forgotten)
    with pytest.raises(RuntimeError, match="has lost request"):
        tiny_llm.generate("the mill", GREEDY)
    assert not tiny_llm.callers.open


def test_requests_that_cannot_be_scheduled_end(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the scheduler to feed nobody any more, callers would be told."""
    monkeypatch.setattr(tiny_llm.engine.scheduler, "schedule", lambda: None)
    (output,) = tiny_llm.generate("the mill", GREEDY)
    assert output.error is not None
    assert "can feed no request" in output.error


def test_concurrent_threads_get_the_outputs_of_one(tiny_gguf: Path) -> None:
    """Eight threads with fifty prompts each, generating, streaming and adding in turns."""
    llm = LLM(tiny_gguf, threads=2, max_num_seqs=16)
    words = ("mill", "water", "wheel", "stone", "race", "dam", "mud", "ice")
    prompts = [[f"{word} {number}" for number in range(50)] for word in words]
    params = SamplingParams(temperature=0.8, max_tokens=6, seed=1)
    alone = [[output.outputs[0].text for output in llm.generate(batch, params)] for batch in prompts]

    def work(number: int) -> list[str]:
        batch = prompts[number]
        if number % 3 == 1:
            return ["".join(delta.text for delta in llm.stream(prompt, params)) for prompt in batch]
        return [output.outputs[0].text for output in llm.generate(batch, params)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == alone
    assert not llm.engine.busy
    llm.close()


def test_an_exception_in_one_thread_affects_no_other(tiny_llm: LLM) -> None:
    """A thread whose call raises in its middle takes nothing of the others with it."""
    alone = tiny_llm.generate("the mill", GREEDY)[0].outputs[0].token_ids
    turn = itertools.count()

    def cancelled() -> bool:
        if next(turn) > 2:
            raise KeyError("a caller's own")
        return False

    def wrong(_: int) -> object:
        with pytest.raises(KeyError, match="caller's own"):
            list(tiny_llm.stream("the wheel", GREEDY, cancelled=cancelled))
        return alone

    def right(_: int) -> object:
        return tiny_llm.generate("the mill", GREEDY)[0].outputs[0].token_ids

    jobs: list[Callable[[int], object]] = [wrong, right, wrong, right, right, right]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda job: job(0), jobs)) == [alone] * 6
    assert not tiny_llm.engine.busy
    assert not tiny_llm.callers.open
