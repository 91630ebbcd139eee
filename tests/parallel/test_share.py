"""Shares of a model: which heads, columns and tokens each rank holds."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.data.config import LayerConfig, ModelConfig
from headrace.parallel.ranks.share import UNIT, WORLDS, Share, unsupported_world


def config(heads: int, kv_heads: int, head_dim: int = 64, ffn: int = 1536, vocab: int = 49152, **more: Any) -> ModelConfig:
    return ModelConfig("llama", vocab, 576, (LayerConfig(heads, kv_heads, head_dim, ffn),), 2048, **more)


def shares(whole: ModelConfig, world: int) -> list[Share]:
    return [Share(rank, world, whole) for rank in range(world)]


@pytest.mark.parametrize(
    ("whole", "world", "heads", "held", "units"),
    [
        (config(9, 3), 2, [4, 5], [2, 2], [12, 12]),
        (config(9, 3), 4, [2, 2, 2, 3], [1, 2, 1, 1], [6, 6, 6, 6]),
        (config(14, 2, ffn=4864), 2, [7, 7], [1, 1], [38, 38]),
        (config(14, 2, ffn=4864), 4, [3, 4, 3, 4], [1, 1, 1, 1], [19, 19, 19, 19]),
        (config(12, 2, 128, 8960), 2, [6, 6], [1, 1], [70, 70]),
        (config(12, 2, 128, 8960), 4, [3, 3, 3, 3], [1, 1, 1, 1], [35, 35, 35, 35]),
    ],
)
def test_known_models(whole: ModelConfig, world: int, heads: list[int], held: list[int], units: list[int]) -> None:
    """SmolLM2 135M, Qwen2.5 0.5B and 1.5B."""
    layers = [share.layers[0] for share in shares(whole, world)]
    assert [len(layer.heads) for layer in layers] == heads
    assert [len(layer.kv_heads) for layer in layers] == held
    assert [len(layer.ffn) // UNIT for layer in layers] == units


def test_a_kv_head_with_query_heads_on_two_ranks_is_on_both() -> None:
    first, second = (share.layers[0] for share in shares(config(9, 3), 2))
    assert (first.kv_heads, first.group, first.first) == (range(2), 3, 0)
    assert (second.kv_heads, second.group, second.first) == (range(1, 3), 3, 1)
    assert first.cut("heads", "q") == range(4 * 64)
    assert second.cut("heads", "k") == range(64, 3 * 64)
    assert second.cut("ffn", "gate") == range(768, 1536)


@given(
    groups=st.integers(1, 6),
    kv_heads=st.integers(1, 6),
    head_dim=st.sampled_from([8, 32, 64, 80, 96, 128, 256]),
    ffn=st.integers(1, 4000),
    vocab=st.integers(1, 5000),
    world=st.sampled_from(WORLDS),
)
def test_ranks_hold_each_head_column_and_token_once(
    groups: int, kv_heads: int, head_dim: int, ffn: int, vocab: int, world: int
) -> None:
    whole = config(groups * kv_heads, kv_heads, head_dim, ffn, vocab)
    ranks = shares(whole, world)
    for parts, size in (
        ([share.layers[0].heads for share in ranks], groups * kv_heads),
        ([share.layers[0].ffn for share in ranks], ffn),
        ([share.vocab for share in ranks], vocab),
    ):
        assert [each for part in parts for each in part] == list(range(size))
    for share in ranks:
        layer = share.layers[0]
        assert {head // groups for head in layer.heads} == set(layer.kv_heads)
        assert [layer.kv_heads.start + (at + layer.first) // layer.group for at in range(len(layer.heads))] == [
            head // groups for head in layer.heads
        ]
    if not unsupported_world(whole, world):
        assert all(share.layers[0].heads and share.layers[0].ffn and share.vocab for share in ranks)


@given(units=st.integers(1, 40), world=st.sampled_from(WORLDS))
def test_ranks_hold_whole_segments(units: int, world: int) -> None:
    """A border between ranks is a border of the eight segments, which end before unit (i + 1) * units // 8."""
    ends = [(segment + 1) * units // 8 for segment in range(8)]
    for share in shares(config(units, units), world):
        assert share.portion(units * UNIT).stop == ends[(share.rank + 1) * 8 // world - 1] * UNIT


def test_the_narrowed_config_changes_only_the_widths() -> None:
    whole = config(9, 3, qk_norm=True)
    narrow = Share(1, 2, whole).narrowed()
    assert (narrow.layers[0].heads, narrow.layers[0].kv_heads, narrow.layers[0].ffn) == (5, 2, 768)
    assert (narrow.vocab_size, narrow.hidden_size, narrow.qk_norm) == (49152, 576, True)


@pytest.mark.parametrize(
    ("whole", "world", "reason"),
    [
        (config(9, 3), 3, "tp must be 1, 2, 4 or 8, not 3"),
        (config(3, 3), 4, "layer 0 has 3 heads of 64, which are 3 units of 64 columns; use tp=2"),
        (config(4, 2, 8), 2, "layer 0 has 4 heads of 8, which are 1 units of 64 columns; use tp=1"),
        (config(9, 3, ffn=100), 4, "layer 0 has an MLP of 100 columns, which are 2 units of 64 columns; use tp=2"),
        (config(9, 3, vocab=64), 2, "the vocabulary of 64 tokens is 1 units of 64; use a smaller tp"),
        (config(9, 3), 8, ""),
    ],
)
def test_unsupported_worlds_are_explained(whole: ModelConfig, world: int, reason: str) -> None:
    assert unsupported_world(whole, world) == reason


def test_layers_with_the_same_k_and_v_have_the_same_heads() -> None:
    """Otherwise a rank would hold other K/V heads of one than of the other."""
    whole = config(8, 4)
    first = whole.layers[0]
    for heads, reason in ((8, ""), (4, "layer 1 reads the K/V of layer 0, which has another number of heads; leave tp out")):
        layers = (first, replace(first, kv_from=0, heads=heads))
        assert unsupported_world(replace(whole, layers=layers), 2) == reason
