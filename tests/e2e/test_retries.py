"""A step that fails: its requests are tried again one by one, and come out as if nothing had happened, to the last bit of a
log-probability on the native core. Only the one ends with the error that fails alone, too."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.data.plan import StepOutput, StepPlan
from headrace.data.structured import StructuredOutputs
from headrace.engine.engine import Engine
from headrace.engine.feeding import Flight
from headrace.llm import LLM

POISON = 666  # the seed of a request under which every step fails
PROMPTS = [
    "the mill",
    "water " * 40,
    "the mill by the river",
    "a b c a b c a b c",
    "x",
    "the mill by the river",
    "stone",
    "mud",
]
KINDS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=1, max_tokens=20, logprobs=2, prompt_logprobs=1, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, n=3, max_tokens=20, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, repetition_penalty=1.2, presence_penalty=0.3, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, max_tokens=20, mirostat_tau=3.0, mirostat_eta=0.1, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=5, max_tokens=20, dry_multiplier=0.8, no_repeat_ngram=3, logprobs=1, ignore_eos=True),
    SamplingParams(
        temperature=0.7, seed=6, max_tokens=20, logprobs=1, structured_outputs=StructuredOutputs(regex="[a-z ]{12}")
    ),
    SamplingParams(temperature=0.0, max_tokens=12, penalty_alpha=0.6, top_k=4, ignore_eos=True),
]
WAYS: dict[str, dict[str, Any]] = {
    "plain": {"speculate": None},
    "ngram": {"speculate": "ngram", "draft_tokens": 3},
    "draft": {"speculate": "draft", "draft_tokens": 3},
    "small pool": {"speculate": None, "max_model_len": 128, "kv_cache_memory": 16 * 4096, "max_num_batched_tokens": 24},
}


class Faults:
    """Steps of several requests fail with some probability, before or after they were carried out; those with the poison
    in them always do."""

    def __init__(self, engine: Engine, rate: float) -> None:
        self.failed = self.retried = 0
        self._engine, self._rng, self._rate = engine, random.Random(7), rate
        runner: Any = engine.executor.runner  # type: ignore[attr-defined]
        self._execute, runner.execute = runner.execute, self._break

    def _break(self, plan: StepPlan) -> StepOutput:
        slots = {feed.slot for feed in plan.feeds}
        fed = [r for r in self._engine.requests.values() if any(seq.wire.slot in slots for seq in r.seqs)]
        retry = bool(fed) and fed[0] in self._engine.scheduler.retries
        self.retried += retry
        struck = bool(fed) and not retry and self._rng.random() < self._rate
        poisoned = any(request.params.seed == POISON for request in fed)
        self.failed += struck or poisoned
        if (struck and self._rng.random() < 0.5) or (poisoned and self._rng.random() < 0.5):
            raise RuntimeError("poison" if poisoned else "chance")
        output: StepOutput = self._execute(plan)
        if struck or poisoned:
            raise RuntimeError("poison" if poisoned else "chance")
        return output


@pytest.fixture(scope="module", params=WAYS)
def model_and_mode(request: pytest.FixtureRequest, tiny_gguf: Path) -> tuple[Path, dict[str, Any]]:
    way = dict(WAYS[request.param])
    if way["speculate"] == "draft":
        way["draft"] = tiny_gguf
    return tiny_gguf, way


def opened(model_and_mode: tuple[Path, dict[str, Any]], backend: str) -> LLM:
    path, way = model_and_mode
    dtype = "auto" if backend == "native" else "float64"
    return LLM(path, backend=backend, dtype=dtype, threads=1, max_num_seqs=12, **way)


def results_of(outputs: list[RequestOutput]) -> list[Any]:
    """Everything that came of requests."""
    return [
        (output.error, output.prompt_logprobs, [(one.index, one.token_ids, one.text, one.logprobs) for one in output.outputs])
        for output in outputs
    ]


def tokens(outputs: list[Any]) -> list[Any]:
    return [[ids for _, ids, *_ in one] for *_, one in outputs]


def play(
    model_and_mode: tuple[Path, dict[str, Any]],
    rate: float,
    poison: int,
    tamper: Callable[[Engine], None] | None,
    backend: str = "native",
) -> tuple[list[Any], list[RequestOutput], Faults]:
    """What came of the innocent and of the poison."""
    llm = opened(model_and_mode, backend)
    if tamper is not None:
        tamper(llm.engine)
    faults = Faults(llm.engine, rate)
    bad = SamplingParams(temperature=0.5, seed=POISON, max_tokens=8)
    outputs = llm.generate([*PROMPTS, *["the mill turns"] * poison], [*KINDS, *[bad] * poison])
    assert not llm.engine.busy
    assert llm.engine.blocks.used == 0
    llm.engine.check()
    llm.close()
    return results_of(outputs[: len(KINDS)]), outputs[len(KINDS) :], faults


@pytest.mark.parametrize("poison", [0, 2])
def test_a_failing_request_changes_no_other(model_and_mode: tuple[Path, dict[str, Any]], poison: int) -> None:
    undisturbed, _, quiet = play(model_and_mode, 0.0, 0, None)
    assert quiet.failed == quiet.retried == 0
    disturbed, ended, faults = play(model_and_mode, 0.0 if poison else 0.3, poison, None)
    assert disturbed == undisturbed
    assert faults.failed > (0 if poison else 5)
    assert faults.retried > 2
    assert [output.error for output in ended] == ["the step failed: poison"] * poison
    assert all(error is None for error, *_ in undisturbed)


def test_in_torch_the_tokens_are_the_same(tiny_gguf: Path) -> None:
    """Of the log-probabilities the last bits may differ, as rows are summed with others."""
    model_and_mode = (tiny_gguf, WAYS["ngram"])
    undisturbed, _, _ = play(model_and_mode, 0.0, 0, None, "torch")
    disturbed, ended, faults = play(model_and_mode, 0.2, 1, None, "torch")
    assert tokens(disturbed) == tokens(undisturbed)
    assert ended[0].error == "the step failed: poison"
    assert faults.retried > 8


def test_steps_that_fail_in_a_row_are_counted(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """To try a request again and to succeed says nothing of the next step; a step of all that goes well does."""
    engine, runner = tiny_llm.engine, tiny_llm.runner
    execute = runner.execute
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    wanted = results_of(tiny_llm.generate(["the mill", "stone", "mud"], params))
    counted: list[int] = []

    def fails(plan: StepPlan) -> StepOutput:
        counted.append(engine.failing)
        if len(plan.feeds) > 1:
            raise RuntimeError("more than one")
        return execute(plan)

    monkeypatch.setattr(runner, "execute", fails)
    assert results_of(tiny_llm.generate(["the mill", "stone", "mud"], params)) == wanted
    assert counted[:5] == [0, 1, 1, 1, 1]
    assert engine.failing == 2
    tiny_llm.generate("the mill", params)
    assert engine.failing == 0
    monkeypatch.setattr(runner, "execute", lambda plan: 1 / 0)
    outputs = tiny_llm.generate(["the mill", "stone"], params)
    assert [output.error for output in outputs] == ["the step failed: division by zero"] * 2
    assert engine.failing == 3
    monkeypatch.undo()
    tiny_llm.generate("the mill", params)
    assert engine.failing == 0


# -- negative controls -------------------------------------------------------------------------------------------------------


def keep_kv_of_failed_steps(engine: Engine) -> None:
    """What a failed step was to compute is taken for computed, and found again."""
    fail, computed = engine.scheduler.fail, engine.scheduler._computed

    def failing(flight: Flight) -> None:
        for work in flight.works:
            computed(work.seq, work.feed.start + work.feed.count)
            engine.blocks.publish(work.seq)
        fail(flight)

    engine.scheduler.fail = failing  # type: ignore[method-assign]


def test_keeping_kv_of_failed_steps_changes_the_output(tiny_gguf: Path) -> None:
    model_and_mode = (tiny_gguf, WAYS["plain"])
    undisturbed, _, _ = play(model_and_mode, 0.0, 0, None)
    disturbed, _, _ = play(model_and_mode, 0.3, 0, keep_kv_of_failed_steps)
    assert disturbed != undisturbed
