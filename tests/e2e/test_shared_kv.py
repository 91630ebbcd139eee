"""Layers that read the K and V of a layer below (cross-layer attention): the same whatever the batch, on both back ends; the
model without sharing where both would have the same K and V; half of K and V."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.backends.native.program import pool_block_bytes
from headrace.compress.export import hf_config
from headrace.data.config import LayerConfig
from headrace.data.params import SamplingParams
from headrace.kv.layout import KVPlace, kv_places, kv_shape
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.models.registry import describe, read_config
from headrace.runner.span import ATTENTION, MLP
from headrace.training.selfdraft import SpanTrial
from headrace.weights.loader import Allocator
from tests.cli_shell import Shell
from tests.e2e import test_equalities as equalities
from tests.e2e.test_draft_model import Native, Torch
from tests.early_exits import Propagated, Reference, engine_of, expected, jobs_of, played
from tests.models.feeding import feed
from tests.models.zoo import MemorySource
from tests.tiny import run_alone, tiny_config, tiny_model
from tests.tiny_files import write_tiny_gguf
from tests.tiny_native import Feeder, as_bfloat16, native_alone, native_engine, native_model, native_program, source_of

PROMPTS = [[5, 9, 2, 44, 3, 17, 60, 8, 71, 30, 1, 66], [13, 80, 41]]
SHARING = {"num_layers": 4, "share": 2}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("check", [equalities.test_a_prefix_hit_equals_a_miss, equalities.test_preempted_equals_not_preempted])
def test_outputs_depend_on_nothing_else(architecture: str, check: object) -> None:
    check(tiny_model(tiny_config(architecture, **SHARING)))  # type: ignore[operator]


@pytest.mark.parametrize(
    "check", [equalities.test_a_prefix_hit_equals_a_miss, equalities.test_batched_and_chunked_equal_single]
)
def test_shared_kv_on_the_native_core(check: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equalities, "tiny_engine", native_engine)
    monkeypatch.setattr(equalities, "run_alone", native_alone)
    more = {"budget": 5} if "chunked" in check.__name__ else {}  # type: ignore[attr-defined]
    check(native_model("qwen2", **SHARING), **more)  # type: ignore[operator]


@pytest.mark.parametrize("share", [2, 3])
def test_both_back_ends_agree(share: int) -> None:
    model = native_model("llama", num_layers=5, share=share, window=7)
    wanted = feed(model, PROMPTS, "whole", torch.float64)
    found = Feeder(native_program(model, kv_dtype="float32"), PROMPTS).whole()
    for ours, theirs in zip(found, wanted, strict=True):  # inputs are rounded to bfloat16, so as near as without sharing
        assert (ours.argmax(1) == theirs.numpy().argmax(1)).all()
        assert np.abs(ours - theirs.numpy()).mean() < 0.05


def alike(*, same: bool = True) -> tuple[Model, Model]:
    """Two layers that make K and V alike, as nothing is added between them, and the same model with the first one's for both.
    `same` no: the second's differ."""
    whole = tiny_model(tiny_config(qkv_bias=True), seed=3)
    first, second = whole.layers
    for holder in (first.out, first.down):
        holder.weight.zero_()
    second.attn_norm.weight.copy_(first.attn_norm.weight)
    own = tiny_config().layers[0]
    for name in ("weight", "bias"):
        rows = getattr(second.qkv, name)
        rows[own.q_size :] = getattr(first.qkv, name)[own.q_size :]
        if not same:
            rows[own.q_size :] *= 2
    shared = describe(whole.config.sharing(2))
    fill(shared, whole)
    return as_bfloat16(whole), as_bfloat16(shared)


def fill(model: Model, other: Model) -> None:
    """The weights of another model, of which a layer that shares has q alone."""
    theirs = dict(other.named_parameters())
    for path, holder in model.holders():
        holder.create(Allocator(torch.float64))
        for name in holder.params():
            own = getattr(holder, name)
            own.copy_(theirs[f"{path}.{name}"][: len(own)])
        holder.finish()


@pytest.mark.parametrize("same", [True, False])
def test_equal_k_and_v_give_the_same_bits(same: bool) -> None:
    """In torch but for the order of sums; and K and V that differ do not: the control."""
    whole, shared = alike(same=same)
    ours, theirs = (feed(model, PROMPTS, "chunks", torch.float64) for model in (shared, whole))
    assert all(torch.allclose(a, b, atol=1e-12, rtol=0) for a, b in zip(ours, theirs, strict=True)) == same
    natively = [Feeder(native_program(model), PROMPTS).whole() for model in (shared, whole)]
    assert all(np.array_equal(a, b) for a, b in zip(*natively, strict=True)) == same


def test_kv_of_another_layer_changes_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: each layer that shares reads the pool of the layer with K and V that comes next."""
    model = native_model("llama", num_layers=6, share=2)
    right = run_alone(model, PROMPTS[0], GREEDY), native_alone(model, PROMPTS[0], GREEDY)
    assert right[0] == right[1]
    own = [layer.kv_from is None for layer in model.config.layers]
    layers = [KVPlace(0, min(sum(own[: at + 1]) - own[at], 2)) for at in range(6)]
    assert layers != kv_places(model.config, 0)
    for package in ("kv.pool", "backends.native.program"):
        monkeypatch.setattr(f"headrace.{package}.kv_places", lambda config, window: layers)
    wrong = as_bfloat16(tiny_model(model.config))
    assert run_alone(wrong, PROMPTS[0], GREEDY) != right[0]
    assert native_alone(wrong, PROMPTS[0], GREEDY) != right[1]


def test_tokens_exit_before_layers_that_share_kv() -> None:
    """The layers above the exit lag, and read K and V of one below it."""
    side, jobs = Native(), jobs_of(5, 4)
    side.target = native_model("llama", num_layers=3, share=3)
    outputs = expected(Reference(side), jobs)
    engine = engine_of(side, budget=7)
    assert played(engine, jobs, 3) == outputs
    assert engine.scheduler.preemptions > 0


@pytest.mark.parametrize(("kind", "share"), [(Native, 2), (Torch, 2), (Torch, 4)])
def test_rows_that_exit_are_propagated_to_layers_that_share(kind: type[Torch], share: int) -> None:
    """A layer above the exit that reads the K and V of another stores none for such a row."""
    side, jobs = kind(), jobs_of(5, 3)
    side.target = native_model("llama", num_layers=4, share=share)
    reference = Propagated(side)
    outputs = expected(reference, jobs)
    assert reference.exited > 0
    assert played(engine_of(side, budget=7, propagate=True), jobs, 3) == outputs


def test_k_and_v_take_half() -> None:
    config, half = (tiny_config(num_layers=4, share=share) for share in (1, 2))
    assert (kv_shape(config).layers, kv_shape(half).layers) == (4, 2)
    assert 2 * sum(pool_block_bytes(half, 16)) == sum(pool_block_bytes(config, 16))
    assert [place.layer for place in kv_places(half, 0)] == [0, 0, 1, 1]
    assert (config.kv_share, half.kv_share, half.sharing(1)) == (1, 2, config)
    count = [sum(each.numel() for each in tiny_model(one).parameters()) for one in (config, half)]
    layer: LayerConfig = config.layers[0]
    assert count[0] - count[1] == 2 * 2 * layer.kv_size * config.hidden_size


def test_a_folder_configures_shared_kv() -> None:
    config = tiny_config(num_layers=4, share=2)
    model = as_bfloat16(tiny_model(config))
    source = MemorySource("safetensors", source_of(model).tensors, hf_config(config, 1, 2))
    assert read_config(source) == replace(config, max_position=config.max_position)
    assert not any("layers.1.self_attn.k_proj" in name for name in source.names())


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("teacher") / "tiny.gguf", layers=4)


def test_a_student_shares_and_is_trained(shell: Shell, teacher: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("the mill stands by a stream and its wheel turns when water comes\n" * 40)
    args = ("distil", teacher, "-o", out, "--texts", text, "--steps", "2", "--window", "24", "--batch", "2", "--threads", "1")
    code, _, said = shell(*args, "--student", "share=2")
    assert code == 0, said
    made = []
    for backend in ("native", "torch"):
        with LLM(out, backend=backend, threads=1, speculate=None) as llm:
            assert llm.model_config.kv_share == 2
            made.append(llm.generate("the wheel", GREEDY)[0].outputs[0].token_ids)
    assert len(made[0]) == len(made[1])
    code, _, said = shell("compress", out, "-o", tmp_path / "small.gguf", "--format", "Q8_0", "--method", "gptq")
    assert code == 1, said
    assert "share K and V" in said
    code, _, said = shell(*args[:2], "-o", tmp_path / "no", *args[4:], "--student", "share=2", "--loss", "attention")
    assert (code, "leave the loss attention out" in said) == (1, True), said
    for wanted, words in (("share=1", "must be 2 to 4"), ("share=9", "must be 2 to 4")):
        code, _, said = shell("distil", teacher, "-o", tmp_path / "no", "--student", wanted, "--steps", "1")
        assert (code, words in said) == (1, True), said


def test_the_span_search_keeps_attention_with_shared_kv() -> None:
    """A draft that left it out would read K and V that nobody wrote."""
    trial = object.__new__(SpanTrial)
    trial.runner = native_engine(native_model("llama", **SHARING)).executor.runner  # type: ignore[attr-defined]
    assert [trial.sublayers(layer) for layer in range(4)] == [(MLP,), (ATTENTION, MLP)] * 2
