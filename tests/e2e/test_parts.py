"""Steps that skip sublayers (attention, MLP or both) on both back ends."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headrace import core
from headrace.backends.eager.program import EagerProgram
from headrace.data.params import SamplingParams
from headrace.data.plan import Feed, NewSlot, Score, Scores, StepPlan, TableDelta
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.registry import OPS
from headrace.runner.program import Program
from headrace.runner.runner import Runner
from headrace.runner.span import ATTENTION, MLP, Span
from tests.tiny import tiny_config, tiny_model

TEXT = [5, 6, 7, 8, 30, 31, 5, 6, 90, 2, 17, 44]
HALVES = [Span(skips=skips) for skips in itertools.product((0, ATTENTION, MLP, ATTENTION | MLP), repeat=2) if any(skips)]
ARCHITECTURES = ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2"]


def scores(program: Program, span: Span, tokens: Sequence[int] = TEXT) -> list[float]:
    """Log-probability of each token after the first."""
    new = NewSlot(slot=0, prompt_len=len(tokens), tokens=list(tokens), params=SamplingParams())
    runner = Runner(program)
    runner.slots.apply(StepPlan(0, new=[new], tables=[TableDelta(0, 0, 0, [0, 1])]))
    feed = Feed(0, 0, len(tokens), (), (Score(),))
    ((answer,),) = runner.run(StepPlan(0, feeds=[feed]), span).feeds
    assert isinstance(answer, Scores)
    return [score.logprob for score in answer.scores]


def torch_program(model: Model) -> EagerProgram:
    return EagerProgram(model, KVPool(model.config, 2, 16, torch.float64))


def silenced(architecture: str, part: Span) -> Model:
    """The model whose left-out sublayers add nothing, because their last linear layer is zero."""
    model = tiny_model(tiny_config(architecture))
    for number, block in enumerate(model.layers):
        for bit, name in ((ATTENTION, "out"), (MLP, "down")):
            if part.skip(number) & bit:
                for parameter in getattr(block, name).parameters():
                    parameter.zero_()
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("part", HALVES, ids=lambda part: "-".join(map(str, part.skips)))
def test_torch_skips_only_the_named_parts(architecture: str, part: Span) -> None:
    program = torch_program(tiny_model(tiny_config(architecture)))
    expected = scores(torch_program(silenced(architecture, part)), Span())
    assert scores(program, part) == expected
    assert scores(program, Span()) != expected


def test_skipped_parts_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in ("attention", "act_mul"):
        body = OPS[name].reference

        @functools.wraps(body)
        def counted(*args: Any, body: Any = body, name: str = name, **more: Any) -> Any:
            ran.append(name)
            return body(*args, **more)

        monkeypatch.setattr(OPS[name], "reference", counted)
    scores(torch_program(tiny_model()), Span(skips=(ATTENTION, MLP)))
    assert ran == ["act_mul", "attention"]


@pytest.mark.skipif(not core.available(), reason=core.reason() or "native")
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_both_back_ends_leave_out_the_same(architecture: str) -> None:
    """Scores are as near as those of the whole models are; of the parts no two are."""
    from tests.tiny_native import native_model, native_program

    model = native_model(architecture)
    ours, theirs = native_program(model), torch_program(model)
    found = {part: (scores(ours, part), scores(theirs, part)) for part in [Span(), *HALVES]}

    def apart(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) for x, y in zip(a, b, strict=True))

    bound = 8 * apart(*found[Span()])
    for part, (native_scores, torch_scores) in found.items():
        assert apart(native_scores, torch_scores) <= bound, part
        for other in found.keys() - {part}:
            assert apart(native_scores, found[other][1]) > bound, (part, other)
