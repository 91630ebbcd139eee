"""Choosing a part of a model that drafts for it: what is measured, what is searched, what is kept."""

from pathlib import Path

import pytest

from headrace.backends.eager.program import EagerProgram
from headrace.data.params import SamplingParams
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.runner.runner import Runner
from headrace.runner.span import ATTENTION, MLP, Span
from headrace.startup import selfdraft
from headrace.training.selfdraft import SpanReport, SpanTrial, search
from tests.tiny import run_alone, tiny_config, tiny_model


@pytest.fixture
def trial() -> SpanTrial:
    return trial_of(tiny_model(tiny_config(num_layers=3)))


def trial_of(model: Model) -> SpanTrial:
    prompt = [5, 6, 7, 8]
    text = [*prompt, *run_alone(model, prompt, SamplingParams(temperature=0.0, max_tokens=24))]
    return SpanTrial(Runner(EagerProgram(model, KVPool(model.config, 16, 16))), [(text, 4)], 16, 3)


def test_the_full_model_agrees_with_itself_and_a_part_does_not(trial: SpanTrial) -> None:
    assert trial.rate(Span()).alpha == 1.0
    assert trial.rate(Span(layers=3)).alpha == 1.0
    assert trial.rate(Span(layers=1)).alpha < 1.0
    for bits in (ATTENTION, MLP, ATTENTION | MLP):
        assert trial.rate(Span(skips=(0, bits))).alpha < 1.0


def test_the_search_selects_the_fastest_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention of layer 1 and the MLP of layer 2 do nothing in this model; a clock counts what is left out."""
    model = tiny_model(tiny_config(num_layers=3))
    model.layers[1].out.weight.zero_()
    model.layers[2].down.weight.zero_()

    def seconds(self: SpanTrial, nodes: int, part: Span, repeats: int) -> float:
        left_out = sum(bits.bit_count() for bits in part.skips) + 2 * (3 - part.layers if part.layers else 0)
        return max(1.0 - 0.3 * left_out, 0.4) * (1.0 + 0.05 * nodes)

    monkeypatch.setattr(SpanTrial, "_seconds", seconds)
    trial = trial_of(model)
    best = search(trial, 3600)
    assert best.span == Span(skips=(0, ATTENTION, MLP))
    assert best.alpha == 1.0
    assert best.speedup > 1.3
    assert trial.repeat(best) == (best.speedup, best.speedup)
    assert best.name == "without 2 sublayers"
    assert trial.rate(Span(skips=(ATTENTION,))).name == "without 1 sublayer"


def test_the_spread_of_a_speed_up_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third round a step of the span takes three times as long."""
    trial, costs = trial_of(tiny_model(tiny_config(num_layers=3))), iter((0.5, 0.5, 1.5, 0.5, 0.5))
    monkeypatch.setattr(trial, "_seconds", lambda nodes, span, repeats: 1.0 if span == Span() else next(costs))
    slowest, fastest = trial.repeat(SpanReport(Span(layers=2), alpha=0.9, cost=0.5, speedup=1.0, gamma=1))
    assert slowest < 1.0 < fastest


def test_a_choice_is_stored_for_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    one, other = tmp_path / "one.gguf", tmp_path / "other.gguf"
    one.write_bytes(b"1")
    other.write_bytes(b"2")
    part = Span(skips=(0, 3, 1))
    kept = selfdraft.save(one, part)
    assert selfdraft.load(one, 3) == part
    with pytest.raises(ValueError, match=r"run: headrace bench self-draft .*other\.gguf"):
        selfdraft.load(other, 3)
    with pytest.raises(ValueError, match=r"belongs to another model than one\.gguf, which has 2 layers; run"):
        selfdraft.load(one, 2)
    for text in ('{"layers": 4, "skips": []}', '{"layers": -1, "skips": []}', '{"layers": 1, "skips": [4]}'):
        kept.write_text(text)
        with pytest.raises(ValueError, match="belongs to another model"):
            selfdraft.load(one, 3)
    for text in ("{", '{"x": ' + "[" * 100_000):
        kept.write_text(text)
        with pytest.raises(ValueError, match="cannot be read"):
            selfdraft.load(one, 3)
