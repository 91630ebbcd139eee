"""Layers that read the K/V of an earlier layer by its number, which need not be the nearest: numbers of a hand-written float64
reference, the same bits in any batch and chunk on the native core, and one-line refusals."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from headrace.data.config import LayerConfig, ModelConfig
from headrace.data.params import SamplingParams
from headrace.kv.layout import KVPlace, kv_places, kv_shapes
from headrace.kv.pool import FreshPool
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from headrace.runner.span import ATTENTION, MLP
from headrace.training.selfdraft import SpanTrial
from tests.e2e import test_equalities as equalities
from tests.kv_reference import reference
from tests.models.feeding import feed
from tests.tiny import run_alone, tiny_config, tiny_model
from tests.tiny_native import Feeder, as_bfloat16, native_alone, native_engine, native_program

# Layers 2 and 4 read layers 0 and 1; the nearest layers below with K/V of their own are 1 and 3.
SOURCES = (None, None, 0, None, 1)
NEAREST = (None, None, 1, None, 3)
PROMPTS = [[5, 9, 2, 44, 3, 17, 60, 8, 71, 30, 1, 66], [13, 80, 41], [7] * 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def reading(sources: tuple[int | None, ...], config: ModelConfig) -> ModelConfig:
    """The config with these `kv_from`."""
    return replace(config, layers=tuple(replace(layer, kv_from=at) for layer, at in zip(config.layers, sources, strict=True)))


@lru_cache(maxsize=4)
def made(sources: tuple[int | None, ...]) -> Model:
    """The same weights for the same layers with K/V."""
    return as_bfloat16(tiny_model(reading(sources, tiny_config(num_layers=len(sources)))))


@pytest.mark.parametrize("mode", ["whole", "chunks", "tokens"])
def test_torch_equals_the_reference(mode: str) -> None:
    """And the control: with the nearest layer's K/V the reference gives other logits."""
    model = made(SOURCES)
    found = feed(model, PROMPTS, mode, torch.float64)
    for logits, prompt in zip(found, PROMPTS, strict=True):
        assert (logits - reference(model, prompt, SOURCES)).abs().max() < 1e-10
        assert (logits - reference(model, prompt, NEAREST)).abs().max() > 0.1 or len(prompt) == 1


def test_whole_texts_with_gradients_equal_the_reference() -> None:
    model = made(SOURCES)
    with torch.no_grad():
        ctx = build(FreshPool(model.config, 2, 16, torch.float64), [FeedRows(PROMPTS[0], [0])])
        assert (model(ctx) - reference(model, PROMPTS[0], SOURCES)).abs().max() < 1e-10


def test_the_native_core_has_the_same_bits_in_any_chunk_and_batch() -> None:
    whole = Feeder(native_program(made(SOURCES), kv_dtype="float32"), PROMPTS).whole()
    for which, (prompt, together) in enumerate(zip(PROMPTS, whole, strict=True)):
        chunks = Feeder(native_program(made(SOURCES), kv_dtype="float32"), [prompt])
        parts = [chunks.feed((0, start, min(3, len(prompt) - start)))[0] for start in range(0, len(prompt), 3)]
        assert np.array_equal(np.concatenate(parts), together), which
        wanted = reference(made(SOURCES), prompt, SOURCES).numpy()  # inputs are rounded to bfloat16
        assert np.abs(together - wanted).mean() < 0.05
        other = reference(made(SOURCES), prompt, NEAREST).numpy()
        assert np.abs(together - other).mean() > 0.1
    nearest = Feeder(native_program(made(NEAREST), kv_dtype="float32"), PROMPTS).whole()
    assert not any(np.array_equal(ours, theirs) for ours, theirs in zip(whole, nearest, strict=True))


@pytest.mark.parametrize(
    "check", [equalities.test_a_prefix_hit_equals_a_miss, equalities.test_batched_and_chunked_equal_single]
)
@pytest.mark.parametrize("native", [False, True], ids=["torch", "native"])
def test_outputs_do_not_depend_on_batch_chunk_and_cache(native: bool, check: object, monkeypatch: pytest.MonkeyPatch) -> None:
    if native:
        monkeypatch.setattr(equalities, "tiny_engine", native_engine)
        monkeypatch.setattr(equalities, "run_alone", native_alone)
    more = {"budget": 5} if "chunked" in check.__name__ else {}  # type: ignore[attr-defined]
    check(made(SOURCES), **more)  # type: ignore[operator]


def test_engines_write_what_the_reference_writes() -> None:
    tokens = list(PROMPTS[0])
    for _ in range(GREEDY.max_tokens or 0):
        tokens.append(int(reference(made(SOURCES), tokens, SOURCES)[-1].argmax()))
    assert run_alone(made(SOURCES), PROMPTS[0], GREEDY) == tokens[len(PROMPTS[0]) :]
    assert run_alone(made(NEAREST), PROMPTS[0], GREEDY) != tokens[len(PROMPTS[0]) :]


# -- numbers ----------------------------------------------------------------------------------------------------------------


def test_a_layer_has_the_place_of_the_layer_that_it_reads() -> None:
    config = made(SOURCES).config
    assert kv_places(config, 0) == [KVPlace(0, at) for at in (0, 1, 0, 2, 1)]
    assert [shape.layers for shape in kv_shapes(config, 0)] == [3]
    assert (config.kv_layers, config.shares_kv) == ([0, 1, 3], True)
    with pytest.raises(ValueError, match="do not share K and V by groups of neighbours"):
        _ = config.kv_share
    trial = object.__new__(SpanTrial)
    trial.runner = native_engine(made(SOURCES)).executor.runner  # type: ignore[attr-defined]
    assert [trial.sublayers(at) for at in range(5)] == [(MLP,), (MLP,), (ATTENTION, MLP), (ATTENTION, MLP), (ATTENTION, MLP)]


def test_a_part_of_the_layers_has_numbers_of_its_own() -> None:
    config = reading((None, None, 1, None, 3), tiny_config(num_layers=5))
    assert [layer.kv_from for layer in config.of_layers(range(3, 5)).layers] == [None, 0]
    assert [layer.kv_from for layer in config.of_layers([0, 1, 2]).layers] == [None, None, 1]
    with pytest.raises(ValueError, match="layer 2 reads the K/V of layer 1; keep them together"):
        config.of_layers([0, 2])
    assert config.of_layers(range(5)) == config


@pytest.mark.parametrize(
    ("sources", "why"),
    [
        ((None, 2, None), "layer 1 has kv_from 2, which is no earlier layer; name a layer below 1"),
        ((None, 1, None), "layer 1 has kv_from 1, which is no earlier layer; name a layer below 1"),
        ((0, None, None), "layer 0 has kv_from 0, which is no earlier layer; name a layer below 0"),
        ((None, -1, None), "layer 1 has kv_from -1, which is no earlier layer"),
        ((None, 0, 1), "layer 2 has kv_from 1, and layer 1 reads the K/V of layer 0 itself; name a layer with K/V of its own"),
    ],
)
def test_other_numbers_are_refused(sources: tuple[int | None, ...], why: str) -> None:
    with pytest.raises(ValueError, match="kv_from") as refused:
        reading(sources, tiny_config(num_layers=3))
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_layer_with_other_sizes_is_refused() -> None:
    layers = (LayerConfig(4, 2, 8, 16), LayerConfig(4, 1, 16, 16, kv_from=0))
    with pytest.raises(
        ValueError, match="kv_from 0, whose K/V are 2 heads of 8, and its own sizes are 1 heads of 16; give both"
    ):
        ModelConfig("llama", 16, 16, layers, 64)
