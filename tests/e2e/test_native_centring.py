"""Centred K (without the part of its bias that softmax ignores): rounding loses as little as for K without a bias."""

from functools import lru_cache

import numpy as np
import pytest
import torch

from headrace.backends.native.weights import PackedWeights
from headrace.models.base import Model
from headrace.runner import centring
from headrace.runner.record import Node, record
from tests.models.feeding import feed
from tests.tiny import tiny_config, tiny_model
from tests.tiny_native import Feeder, as_bfloat16, native_program, packed

TEXTS = np.random.default_rng(5).integers(0, 97, (3, 40)).tolist()


@lru_cache(maxsize=1)
def biased() -> Model:
    """Qwen2-like: K's bias is up to some hundreds where the rotation hardly turns, and small elsewhere."""
    model = tiny_model(tiny_config("qwen2", head_dim=32))
    still = model.ropes[0].inv_freq * 512 < 0.5  # type: ignore[attr-defined]
    for layer in model.layers:
        _, k, _ = layer.qkv.bias.split(layer.qkv.sizes)
        k.view(-1, 32).mul_(torch.where(still, 500.0, 1.0).repeat(2))
    return as_bfloat16(model)


def error(kv_dtype: str) -> float:
    """RMS error of the core's logits, in units of their spread."""
    got = Feeder(native_program(biased(), kv_dtype=kv_dtype), TEXTS).whole()
    wanted = [rows.numpy() for rows in feed(biased(), TEXTS, "whole", torch.float64)]
    return float(np.mean([np.sqrt(np.mean(np.square(a - b))) / b.std() for a, b in zip(got, wanted, strict=True)]))


@pytest.mark.parametrize(("kv_dtype", "gain"), [("bfloat16", 5), ("int8", 5)])
def test_rounding_costs_less(kv_dtype: str, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the control that K as it is, with its bias, is much worse."""
    exact, centred = error("float32"), error(kv_dtype)
    monkeypatch.setattr("headrace.backends.native.lowering.k_shift", lambda *_: None)
    plain, plain_exact = error(kv_dtype), error("float32")
    print(f"{kv_dtype}: {centred:.4f}, K as it is {plain:.4f}, K and V in float32 {exact:.4f} and {plain_exact:.4f}")
    assert exact == pytest.approx(plain_exact, rel=0.05), "softmax does not see it"
    assert gain * centred < plain


def shifts(model: Model) -> list[np.ndarray | None]:
    weights: PackedWeights = packed(model)
    made = []
    for segment in record(model).layers:
        (node,) = (node for node in segment.nodes if node.op == "attention")
        made.append(centring.k_shift(segment, node, weights.bias, model.config))
    return made


def test_slow_rotary_biases_are_subtracted_from_keys() -> None:
    model = biased()
    for layer, shift in zip(model.layers, shifts(model), strict=True):
        _, k, _ = layer.qkv.bias.float().split(layer.qkv.sizes)
        assert shift is not None
        taken = shift != 0
        assert np.array_equal(shift[taken], k.numpy()[taken])
        assert np.abs(k.numpy()[~taken]).max() < 5 < np.abs(shift).max()
        assert taken.reshape(2, 2, 16)[0, 0].tolist() == [number >= 11 for number in range(16)]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3_text", "gpt2"])
def test_models_without_such_a_bias_keep_their_k(architecture: str) -> None:
    assert shifts(as_bfloat16(tiny_model(tiny_config(architecture)))) == [None, None]


@pytest.mark.parametrize("name", ["k_norm", "softcap", "sinks"])
def test_where_more_than_softmax_sees_the_scores_nothing_is_taken_off(name: str) -> None:
    model = biased()
    segment = record(model).layers[0]
    (node,) = (node for node in segment.nodes if node.op == "attention")
    assert centring.k_shift(segment, node, packed(model).bias, model.config) is not None
    other = Node(node.op, node.inputs, {**node.settings, name: 30.0}, node.outputs)
    assert centring.k_shift(segment, other, packed(model).bias, model.config) is None
