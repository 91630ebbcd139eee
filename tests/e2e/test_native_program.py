"""Native programs beyond a full step: fusions, parts of a model, taps, skips, companion models."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from headrace import core
from headrace.backends.native.lowering import FUSIONS, Lowering
from headrace.backends.native.program import NativeProgram
from headrace.data.config import LayerConfig, ModelConfig
from headrace.models import registry
from headrace.models.base import Model
from headrace.models.families import FAMILIES
from headrace.models.layers import Embedding, Group, Linear, Norm
from headrace.ops.vocabulary import act, act_mul, attention, embed, head, linear, norm, residual, tap
from headrace.runner.record import RecordError
from headrace.runner.span import ATTENTION, MLP
from headrace.weights.source import WeightError
from tests.models.feeding import feed
from tests.native_reference import bfloat16_attention, reference_of
from tests.tiny import tiny_config, tiny_model
from tests.tiny_native import Feeder, all_fusions, as_bfloat16, family, native_model, native_program, packed, source_of

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2")
TEXTS = np.random.default_rng(3).integers(0, 97, (3, 21)).tolist()


@pytest.mark.parametrize("quantize", ["", "int8"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gemma2", "glm4", "olmo2", "arcee", "ministral3"])
def test_fused_equals_unfused(architecture: str, quantize: str) -> None:
    """Bitwise: every fusion does the arithmetic of the phases it replaces."""
    model = native_model(architecture, head_dim=32)
    whole = Feeder(native_program(model, quantize=quantize), TEXTS).whole()
    for fuse in all_fusions():
        for ours, theirs in zip(Feeder(native_program(model, quantize=quantize, fuse=fuse), TEXTS).whole(), whole, strict=True):
            assert np.array_equal(ours, theirs), f"without {sorted(FUSIONS - fuse)}"


PHASES = ("norm", "quantize", "act", "act_mul", "residual")  # what a fusion may take away
# What a program has more of when one fusion is left out: for each of two layers, and the head.
TAKEN = {"norm_linear": {"norm": 5}, "linear_act_mul": {"act_mul": 2, "quantize": 2}, "attention_linear": {"quantize": 2}}
TAKEN["linear_residual"] = {"residual": 4}
# An activation after a plain linear layer, and a norm between a linear layer and the addition, are not fused.
UNFUSED = {("gpt2", "linear_act_mul"), ("gemma3_text", "linear_residual")}


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Counter[str]]:
    """phases(model, quantize, fusions): how many phases of each of PHASES such a program is made of."""
    counts: Counter[str] = Counter()

    class Counting(core.module().Program):  # type: ignore[misc]
        pass

    def count(name: str) -> Callable[..., None]:
        def add(program: Any, *args: Any, **settings: Any) -> None:
            counts[name] += 1
            getattr(core.module().Program, name)(program, *args, **settings)

        return add

    for name in PHASES:
        setattr(Counting, name, count(name))
    counting = SimpleNamespace(**{**vars(core.module()), "Program": Counting})

    def of(model: Model, quantize: str, fuse: frozenset[str]) -> Counter[str]:
        counts.clear()
        monkeypatch.setattr("headrace.backends.native.lowering.core", SimpleNamespace(module=lambda: counting))
        native_program(model, quantize=quantize, fuse=fuse)
        return counts.copy()

    return of


@pytest.mark.parametrize("quantize", ["", "int8"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_fusion_takes_phases_away(architecture: str, quantize: str, phases: Callable[..., Counter[str]]) -> None:
    """What is compared above are different programs: each fusion leaves out its own phases, and no other."""
    model = native_model(architecture, head_dim=32)
    fused = phases(model, quantize, FUSIONS)
    for name in FUSIONS:
        taken = {} if (architecture, name) in UNFUSED else TAKEN[name]
        assert phases(model, quantize, FUSIONS - {name}) - fused == taken, name


def test_a_fusion_that_never_happens_is_seen(phases: Callable[..., Counter[str]]) -> None:
    """Negative control: a head of 8 columns is no whole group of int8, so attention cannot leave what a linear layer reads."""
    model = native_model("llama", head_dim=8)
    assert phases(model, "int8", FUSIONS - {"attention_linear"}) == phases(model, "int8", FUSIONS)


# -- segments ----------------------------------------------------------------------------------------------------------


def run_parts(feeder: Feeder, cuts: list[int]) -> np.ndarray:
    """One text through the layers in parts, by way of hidden rows; logits of the last part."""
    hidden = None
    for first, last in pairwise(cuts):
        out = np.empty((21, 32), np.float32)
        (rows,) = feeder.feed((0, 0, 21), layers=(first, last), hidden=hidden, hidden_out=out)
        hidden = out
    return rows


def test_layers_can_be_run_in_parts() -> None:
    model = native_model("llama", num_layers=4)
    program = native_program(model)
    (whole,) = Feeder(program, TEXTS[:1]).whole()
    for cuts in ([0, 4], [0, 1, 4], [0, 2, 3, 4], [0, 0, 4, 4]):
        assert np.array_equal(run_parts(Feeder(program, TEXTS[:1]), cuts), whole), cuts
    assert not np.array_equal(run_parts(Feeder(program, TEXTS[:1]), [0, 3]), whole)


def test_an_early_exit_equals_the_shorter_model() -> None:
    """The head after layer 2 of 4 gives what a model of the first two layers gives."""
    model, short = native_model("llama", num_layers=4), tiny_model(tiny_config(num_layers=2))
    own = dict(model.named_parameters())
    for name, parameter in short.named_parameters():
        parameter.copy_(own[name])
    (left,) = Feeder(native_program(model), TEXTS[:1]).feed((0, 0, 21), layers=(0, 2))
    (whole,) = Feeder(native_program(short), TEXTS[:1]).whole()
    assert np.array_equal(left, whole)


def test_taps_are_the_hidden_rows_after_their_layer() -> None:
    program = native_program(native_model("llama", num_layers=3))
    feeder = Feeder(program, TEXTS[:1])
    assert list(program.taps) == ["layer.0", "layer.1", "layer.2"]
    tapped = [np.empty((21, 32), np.float32) for _ in range(2)]
    (logits,) = feeder.feed((0, 0, 21), taps=[(program.taps["layer.0"], tapped[0]), (program.taps["layer.1"], tapped[1])])
    for layer, rows in enumerate(tapped):
        out = np.empty((21, 32), np.float32)
        feeder.feed((0, 0, 21), layers=(0, layer + 1), hidden_out=out)
        assert np.array_equal(rows, out)
    assert np.array_equal(logits, feeder.whole()[0])


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_sublayer_passes_the_rows_through(architecture: str, fused: bool) -> None:
    """Like a model whose sublayer adds nothing: its last linear layer is zero."""
    layers: dict[str, Any] = {"slides": (True, True, False)} if architecture == "gemma3_text" else {"num_layers": 3}
    model = native_model(architecture, **layers)
    options: dict[str, Any] = {} if fused else {"fuse": frozenset()}
    program = native_program(model, **options)
    (whole,) = Feeder(program, TEXTS[:1]).whole()
    for layer, mark, name in ((1, ATTENTION, "out"), (0, MLP, "down"), (2, ATTENTION | MLP, "out down")):
        (skipped,) = Feeder(program, TEXTS[:1]).feed((0, 0, 21), skips=[mark if i == layer else 0 for i in range(3)])
        other = tiny_model(model.config)
        for mine, its in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(its)
        for part in name.split():
            getattr(other.layers[layer], part).weight.zero_()
        (wanted,) = Feeder(native_program(other), TEXTS[:1]).whole()
        assert np.array_equal(skipped, wanted), (layer, name)
        assert not np.array_equal(skipped, whole)


def test_a_companion_runs_on_the_same_sequences() -> None:
    """A second program with a pool of its own reads the same tables and tokens."""
    model, small = native_model("llama"), native_model("llama", num_layers=1)
    feeder = Feeder(native_program(model), TEXTS)
    target = feeder.whole()
    feeder.program = native_program(small)
    companion = feeder.whole()
    assert all(np.array_equal(a, b) for a, b in zip(companion, Feeder(native_program(small), TEXTS).whole(), strict=True))
    feeder.program = native_program(model)
    assert all(np.array_equal(a, b) for a, b in zip(feeder.whole(), target, strict=True))


# -- what is asked of logits -------------------------------------------------------------------------------------------


def run_want(
    program: NativeProgram, ask_of: Callable[[Any], Any], nodes: Sequence[int] = (), parents: Sequence[int] = ()
) -> Any:
    """Feed the first text whole, with a draft, and ask one thing of its logits: the step, and what `ask_of` returned."""
    feeder = Feeder(program, TEXTS[:1])
    step = core.module().Step()
    step.feed(feeder.sequences[0], 0, 21, 1 + len(nodes), list(nodes), list(parents))
    asked = ask_of(step)
    program.core.run(step)
    return step, asked


def drawn(program: NativeProgram, tokens: list[int], key: tuple[int, int]) -> int:
    """The token after `tokens`, drawn alone."""
    feeder = Feeder(program, [tokens])
    step = core.module().Step()
    step.feed(feeder.sequences[0], 0, len(tokens), 1)
    number = step.draw(0, [key])
    program.core.run(step)
    return int(step.tokens(number)[0])


def test_verification_walks_the_path_that_sampling_would_take() -> None:
    program, key = native_program(native_model("llama")), (3, 4)
    text = list(TEXTS[0])
    first = drawn(program, text, key)
    second = drawn(program, [*text, first], key)
    third = drawn(program, [*text, first, second], key)
    wrong = (second + 1) % 97
    step, number = run_want(program, lambda step: step.verify(0, key), [wrong, first, second, wrong], [-1, -1, 1, 1])
    assert step.path(number) == [1, 2]
    assert step.tokens(number) == [first, second, third]
    step, number = run_want(program, lambda step: step.verify(0, key), [wrong], [-1])
    assert (step.path(number), step.tokens(number)) == (([], [first]) if wrong != first else ([0], [first, second]))


def test_many_wants_share_a_row() -> None:
    """A draw edits its row for a while: what is asked beside it must not see that. More rows than are held at once."""
    program = native_program(native_model("llama"), threads=3, blocks=200)
    params = core.module().SampleParams()
    params.logit_bias = [(5, 50.0)]
    texts = np.random.default_rng(5).integers(0, 97, (6, 60)).tolist()
    feeder = Feeder(program, texts)
    plain = feeder.whole()
    step, asked = core.module().Step(), []
    biased = [core.module().Sequence(text, params) for text in texts]
    for which, (sequence, text) in enumerate(zip(biased, texts, strict=True)):
        sequence.set_table(0, 0, list(range(8 * which, 8 * which + 4)))
        step.feed(sequence, 0, len(text), len(text))
        asked.append((step.draw(59, [(1, 2)]), step.logits(59), step.score(0, 2), step.top(59, 3)))
    program.core.run(step)
    for rows, (draw, logits, (first, count), top) in zip(plain, asked, strict=True):
        assert step.tokens(draw) == [5]
        assert np.array_equal(np.frombuffer(step.row_of_logits(logits), "<f4"), rows[59])
        assert step.reports(top)[0].top_ids == np.argsort(-rows[59], kind="stable")[:3].tolist()
        assert count == 59
        logprobs = torch.from_numpy(rows.copy()).double().log_softmax(-1)
        for at in range(count):
            (report,) = step.reports(first + at)
            assert report.logprob == pytest.approx(float(logprobs[at, report.id]), abs=1e-5)


# -- models that no fusion fits ----------------------------------------------------------------------------------------


class OddBlock(Group):
    def __init__(self, c: ModelConfig, layer: LayerConfig) -> None:
        self.q, self.k, self.v = (Linear(c.hidden_size, size) for size in layer.qkv.values())
        self.out = Linear(layer.q_size, c.hidden_size, bias=True, columns="heads")
        self.attn_norm, self.mlp_norm = Norm(c.hidden_size, 1e-5), Norm(c.hidden_size, 1e-5, "layer")
        self.gate_up = Linear(c.hidden_size, {"gate": layer.ffn, "up": layer.ffn})
        self.middle = Linear(layer.ffn, layer.ffn)
        self.down = Linear(layer.ffn, c.hidden_size, columns="ffn")


class Odd(Model):
    """Attention and MLP side by side, q, k and v apart, activations the epilogues do not know, a head with a scale."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [OddBlock(config, layer) for layer in config.layers]
        self.norm = Norm(config.hidden_size, 1e-5)
        self.output = Linear(config.hidden_size, config.vocab_size, bias=True, rows="vocab")

    def embed(self, ctx: Any) -> Any:
        return norm(embed(ctx.ids, self.tokens), self.norm)

    def layer(self, i: int, x: Any, ctx: Any) -> Any:
        block = self.layers[i]
        h = norm(x, block.attn_norm)
        attended = attention(*(linear(h, each, ctx) for each in (block.q, block.k, block.v)), ctx, i)  # type: ignore[call-arg]
        gated = act_mul(linear(norm(x, block.mlp_norm), block.gate_up, ctx), "gelu")
        made = linear(act(linear(gated, block.middle, ctx), "relu"), block.down, ctx)
        return tap(residual(residual(x, linear(attended, block.out, ctx)), made), "after", ctx)

    def head(self, x: Any) -> Any:
        return head(act(norm(x, self.norm), "silu"), self.output, scale=0.5, softcap=4.0)


@pytest.fixture
def odd(monkeypatch: pytest.MonkeyPatch) -> Model:
    monkeypatch.setitem(registry.MODELS, "odd", Odd)
    monkeypatch.setitem(FAMILIES, "odd", family("odd"))
    return as_bfloat16(tiny_model(tiny_config(architecture="odd", rope=None, tied_head=False)))


@pytest.mark.parametrize("quantize", ["", "int8"])
def test_a_model_without_fusions_runs_phase_by_phase(odd: Model, quantize: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = native_program(odd, quantize=quantize)
    got = Feeder(program, TEXTS).whole()
    with bfloat16_attention(monkeypatch):
        wanted = feed(reference_of(odd, packed(odd, quantize)), TEXTS, "whole", torch.float64)
    apart = np.concatenate([np.abs(a - b.numpy()).max(-1) / b.numpy().std(-1) for a, b in zip(got, wanted, strict=True)])
    assert np.median(apart) < 1e-5
    assert apart.max() < 0.1
    feeder = Feeder(native_program(odd, quantize=quantize, threads=2), TEXTS)
    feeder.feed((0, 0, 9))
    (rest,) = feeder.feed((0, 9, 12))
    assert np.array_equal(rest, got[0][9:])
    assert program.taps == {"after": 0}


def test_a_model_with_entangled_sublayers_ignores_skips(odd: Model) -> None:
    """Where a sublayer reads what another began with, leaving one out has no meaning: the skip is without effect."""
    program = native_program(odd)
    (whole,) = Feeder(program, TEXTS[:1]).whole()
    (skipped,) = Feeder(program, TEXTS[:1]).feed((0, 0, 21), skips=[ATTENTION])
    assert np.array_equal(skipped, whole)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_an_invalid_step_is_refused_and_changes_nothing() -> None:
    program = native_program(native_model("llama"))
    feeder = Feeder(program, TEXTS[:1])
    (whole,) = feeder.whole()
    stranger = Feeder(program, [[3, 500]])
    with pytest.raises(IndexError, match="outside the vocabulary"):
        stranger.whole()
    with pytest.raises(ValueError, match="a step has at least one row"):
        program.core.run(core.module().Step())
    with pytest.raises(ValueError, match="needs hidden rows"):
        feeder.feed((0, 0, 21), layers=(1, 2))
    with pytest.raises(ValueError, match="layers that the model has not"):
        feeder.feed((0, 0, 21), layers=(0, 9))
    with pytest.raises(ValueError, match="known tokens"):
        feeder.feed((0, 0, 22))
    with pytest.raises(ValueError, match="parent must come before"):
        feeder.feed((0, 0, 21), nodes=[1], parents=[0])
    unmapped = Feeder(program, TEXTS[:1])
    unmapped.sequences[0].set_table(0, 0, [])
    with pytest.raises(IndexError, match="table"):
        unmapped.whole()
    assert np.array_equal(feeder.whole()[0], whole)


def test_an_op_without_a_phase_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Lowering, "_residual")
    model = native_model("llama")
    with pytest.raises(RecordError, match="no phase for 'residual'"):
        NativeProgram(model, source_of(model), num_blocks=4, block_size=16, max_positions=64, threads=1, fuse=frozenset())


def test_weights_that_are_not_finite_are_refused() -> None:
    model = native_model("qwen2")
    for quantize in ("", "int8"):
        source = source_of(model)
        name = "model.layers.1.mlp.up_proj.weight"
        source.tensors[name] = source.tensors[name].clone()
        source.tensors[name][3, 5] = float("nan") if quantize else float("inf")
        with pytest.raises(WeightError, match=r"up_proj.*NaN or infinite"):
            NativeProgram(model, source, num_blocks=4, block_size=16, max_positions=64, threads=1, quantize=quantize)
