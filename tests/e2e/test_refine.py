"""Blocks filled in by the engine equal a reference that knows no cache, batch or loop, and leave in the pool what known tokens
would."""

import itertools
import random
from typing import Any

import pytest
import torch

from headrace.data.params import RefineParams, SamplingParams
from headrace.data.plan import StepPlan
from headrace.data.types import Child, Request
from headrace.decoding.base import Outputs
from headrace.decoding.refine import Refine
from headrace.decoding.sampling import Sampling
from headrace.drafting.lookahead import Jacobi
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.models.base import Model
from tests.refine_reference import dense, paged, refined
from tests.tiny import VOCAB, finish, run_alone, tiny_config, tiny_engine, tiny_model, tokens_of

MASK = 7
PARAMS = [
    RefineParams(block=1),
    RefineParams(block=6, passes=1),
    RefineParams(block=6, passes=4),
    RefineParams(block=5, passes=5),
    RefineParams(block=8, passes=3, remask="masked"),
    RefineParams(block=8, passes=8, length=13),
]
TOKENS = 13


@pytest.fixture(scope="module")
def model() -> Model:
    return tiny_model(tiny_config(kv_heads=4))


def with_masks(engine: Engine) -> Engine:
    """Its model fills in masks."""
    engine.limits.mask_id = MASK
    return engine


def prompts(*lengths: int) -> list[list[int]]:
    rng = random.Random(3)
    return [rng.choices(range(8, VOCAB), k=length) for length in lengths]


def params_of(refine: RefineParams) -> SamplingParams:
    return SamplingParams(refine=refine, max_tokens=TOKENS)


def outputs(engine: Engine, jobs: list[tuple[list[int], SamplingParams]]) -> list[list[int]]:
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    return [tokens_of(request)[0] for request in requests]


@pytest.mark.parametrize("budget", [64, 9])
def test_it_equals_the_reference(model: Model, budget: int) -> None:
    """Of all settings in one batch, in chunks, beside plain decoding, and again from the prefix cache."""
    jobs = [(prompt, params_of(one)) for prompt, one in zip(prompts(1, 9, 4, 17, 8, 12), PARAMS, strict=True)]
    forward = dense(model)
    expected = [refined(forward, prompt, one, MASK, TOKENS) for (prompt, _), one in zip(jobs, PARAMS, strict=True)]
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    plain = run_alone(model, jobs[1][0], greedy)
    engine = with_masks(tiny_engine(model, budget=budget, blocks=160))
    assert outputs(engine, [*jobs, (jobs[1][0], greedy)]) == [*expected, plain]
    assert outputs(engine, jobs) == expected
    wrong = [refined(forward, prompt, one, MASK, TOKENS, surest=True) for (prompt, _), one in zip(jobs, PARAMS, strict=True)]
    assert [a == b for a, b in zip(wrong, expected, strict=True)] == [True, True, False, False, False, False]  # the control


def test_it_equals_the_reference_when_it_is_preempted(model: Model) -> None:
    jobs = [(prompt, params_of(PARAMS[2])) for prompt in prompts(9, 4, 17, 8)]
    forward = dense(model)
    engine = with_masks(tiny_engine(model, blocks=18))
    assert outputs(engine, jobs) == [refined(forward, prompt, PARAMS[2], MASK, TOKENS) for prompt, _ in jobs]
    assert engine.scheduler.preemptions > 0


def test_layers_that_slide() -> None:
    """An open block longer than their window, in pages and chunks, and in a pool of one block."""
    sliding = tiny_model(tiny_config("gemma3_text", slides=(True, True)))
    (prompt,) = prompts(30)
    one = RefineParams(block=20, passes=2)
    expected = refined(paged(sliding), prompt, one, MASK, 20)
    assert outputs(with_masks(tiny_engine(sliding, budget=24)), [(prompt, params_of(one).replace(max_tokens=20))]) == [expected]


def watched(engine: Engine) -> list[tuple[int, int, bool]]:
    """Of every feed with nodes: known tokens, masks, and whether the nodes see each other."""
    seen: list[tuple[int, int, bool]] = []
    submit = engine.executor.submit

    def watching(plan: StepPlan) -> Any:
        seen.extend((feed.count, feed.nodes.count(MASK), feed.full) for feed in plan.feeds if feed.nodes)
        return submit(plan)

    engine.executor.submit = watching  # type: ignore[method-assign]
    return seen


def test_a_pass_without_tokens_sets_no_first_token_time(model: Model) -> None:
    """Times move on in the steps that bring tokens, and in no other."""
    engine = with_masks(tiny_engine(model))
    engine._clock = itertools.count().__next__  # type: ignore[assignment]
    request = engine.add(prompts(5)[0], params_of(RefineParams(block=6, passes=4)))
    silent = 0
    while engine.busy:
        before = request.metrics.last_token
        came = any(delta.token_ids for delta in engine.step())
        assert (request.metrics.last_token != before) == came
        silent += not came
        assert (request.metrics.first_token is None) == (request.metrics.last_token is None)
    assert silent > 6
    assert request.metrics.first_token is not None
    assert request.metrics.first_token < (request.metrics.last_token or 0)


@pytest.mark.parametrize(("block", "passes", "masks"), [(8, 1, [8]), (8, 2, [8, 4]), (8, 4, [8, 6, 4, 2]), (3, 3, [3, 2, 1])])
def test_passes_and_masks_are_counted(model: Model, block: int, passes: int, masks: list[int]) -> None:
    engine = with_masks(tiny_engine(model))
    seen = watched(engine)
    outputs(engine, [(prompts(5)[0], SamplingParams(refine=RefineParams(block=block, passes=passes), max_tokens=2 * block))])
    each = [(0, count, True) for count in masks] + [(0, 0, False)]
    assert seen == [(5, *each[0][1:]), *each[1:], *each]  # the first pass comes with the prompt


def test_an_end_token_ends_the_answer_inside_a_block(model: Model) -> None:
    (prompt,) = prompts(9)
    whole = refined(dense(model), prompt, PARAMS[2], MASK, 6)
    params = params_of(PARAMS[2]).replace(stop_token_ids=(whole[3],))
    assert outputs(with_masks(tiny_engine(model)), [(prompt, params)]) == [whole[: whole.index(whole[3]) + 1]]


def test_the_end_of_the_context_is_the_end_of_a_block(model: Model) -> None:
    (prompt,) = prompts(250)  # of 256
    (made,) = outputs(with_masks(tiny_engine(model, blocks=80, budget=512)), [(prompt, params_of(PARAMS[4]))])
    assert made == refined(dense(model), prompt, RefineParams(block=6, passes=3, remask="masked"), MASK, 6)


class FromTheOpenPass(Refine):
    """The block is kept as the last open pass has left it."""

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        made = super().select(request, outputs)
        for (seq, _), (child,) in zip(outputs, made, strict=True):
            if child.state is not None and child.state.done == self.params.passes:
                assert seq.decode.draft is not None
                seq.decode.draft.tokens[:] = child.state.tokens
                child.path, child.state = tuple(range(len(child.state.tokens))), None
        return made


def test_kv_of_an_open_pass_changes_the_output(model: Model) -> None:
    """Negative control: what other tokens of the block have seen of the future stays in the pool."""
    (prompt,) = prompts(9)
    one = RefineParams(block=6, passes=4)
    params = SamplingParams(refine=one, max_tokens=24)
    expected = refined(dense(model), prompt, one, MASK, 24)
    engine = with_masks(tiny_engine(model))
    request = engine.add(prompt, params, strategy=FromTheOpenPass(one, MASK, 256))
    finish(engine)
    assert tokens_of(request)[0][:6] == expected[:6]
    assert tokens_of(request)[0] != expected


class Hasty(Sampling):
    """Believes the guess behind what was verified, not the answer that came there: Jacobi's trajectory, one pass short."""

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        made = super().select(request, outputs)
        for (seq, _), (child,) in zip(outputs, made, strict=True):
            draft = seq.decode.draft
            if draft is not None and len(child.path) < len(draft.tokens):
                child.token = draft.tokens[len(child.path)]
        return made


def test_a_trajectory_that_ends_one_pass_short_would_be_seen(model: Model) -> None:
    """Negative control of Jacobi, which is greedy decoding otherwise."""
    greedy = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    jobs = prompts(5, 9)
    for strategy, equal in ((None, True), (Hasty(), False)):
        engine = tiny_engine(model, speculation=Speculation([Jacobi()], 256, 4))
        requests = [engine.add(prompt, greedy, strategy=strategy) for prompt in jobs]
        finish(engine)
        assert ([tokens_of(one)[0] for one in requests] == [run_alone(model, prompt, greedy) for prompt in jobs]) == equal


def test_the_two_references_agree(model: Model) -> None:
    """The pool's masks are the matrix's."""
    known, block = prompts(11, 9)
    assert torch.allclose(dense(model)(known, block), paged(model)(known, block), atol=1e-9)
