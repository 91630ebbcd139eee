"""Recording a model file, and playing the recording back: the same logits, for every architecture."""

from typing import Any

import pytest
import torch

from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.ops.context import Context, FeedRows, build
from headrace.ops.registry import OPS
from headrace.runner.record import RecordError, Segment, record, record_cross
from tests.tiny import tiny_config, tiny_model

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2")


def play(segment: Segment, values: dict[int, torch.Tensor], ctx: Context) -> torch.Tensor:
    """Carry out a recorded segment with the torch ops."""
    for node in segment.nodes:
        arguments: dict[str, Any] = {**node.settings, **{name: values[number] for name, number in node.inputs.items()}}
        if node.op in ("linear", "attention", "tap"):
            arguments["ctx"] = ctx
        result = OPS[node.op].reference(**arguments)
        results = result if isinstance(result, tuple) else (result,)
        values |= dict(zip(node.outputs, results, strict=True))
    return values[segment.result]


def step(model: Model) -> Context:
    pool = KVPool(model.config, 8, 4, torch.float64)
    return build(pool, [FeedRows([3, 1, 4, 1, 5], [2, 6]), FeedRows([9, 2], [0], nodes=[7, 8], parents=[-1, -1])])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_playing_a_recording_gives_the_models_logits(architecture: str) -> None:
    model = tiny_model(tiny_config(architecture))
    recording = record(model)
    ctx = step(model)
    x = play(recording.embed, {0: ctx.ids, 1: ctx.positions}, ctx)
    for layer in recording.layers:
        x = play(layer, {0: x}, ctx)
    logits = play(recording.head, {0: x}, ctx)
    assert torch.equal(logits, model(step(model)))


def test_a_recording_lists_the_ops_of_the_model_file() -> None:
    recording = record(tiny_model())
    ops = [node.op for node in recording.layers[0].nodes]
    assert ops == [
        "norm", "linear", "attention", "linear", "residual",
        "norm", "linear", "act_mul", "linear", "residual", "tap",
    ]  # fmt: skip
    qkv = recording.layers[0].nodes[1]
    assert len(qkv.outputs) == 3
    assert recording.layers[0].uses(qkv.outputs[0]) == [recording.layers[0].nodes[2]]
    assert recording.layers[0].nodes[2].settings["layer"] == 0
    assert recording.layers[1].nodes[2].settings["layer"] == 1


def test_a_cross_attention_recording_has_one_segment_per_layer() -> None:
    """Normed, multiplied and stored; the rows are handed on as they are."""
    encoder = tiny_config("t5", encoder=True, buckets=8, bucket_distance=20)
    model = describe(tiny_config("t5", source=encoder, buckets=8, bucket_distance=20, num_layers=3))
    recording = record_cross(model)
    assert [[node.op for node in layer.nodes] for layer in recording.layers] == [["norm", "linear", "store"]] * 3
    for number, layer in enumerate(recording.layers):
        norm, linear, store = layer.nodes
        assert norm.settings["w"] is model.encoder.norm  # type: ignore[union-attr]
        assert linear.settings["w"] is model.layers[number].cross_kv
        assert store.inputs == dict(zip("kv", linear.outputs, strict=True))
        assert store.settings == {"layer": number, "rope": None, "k_norm": None}
        assert layer.result == layer.entry
    assert not recording.embed.nodes
    assert not recording.head.nodes


def test_code_outside_the_ops_is_refused() -> None:
    class Adds(type(tiny_model())):  # type: ignore[misc]
        def layer(self, i: int, x: Any, ctx: Any) -> Any:
            return super().layer(i, x, ctx) + 1

    class Reads(type(tiny_model())):  # type: ignore[misc]
        def layer(self, i: int, x: Any, ctx: Any) -> Any:
            return OPS["residual"](x, ctx.positions)

    with pytest.raises(RecordError, match="layer 0"):
        record(Adds(tiny_config()))
    with pytest.raises(RecordError, match="layer 0 reads ids or positions"):
        record(Reads(tiny_config()))
