"""The memory plan: exact numbers, and messages that name a setting that works."""

import re
from dataclasses import replace

import pytest

from headrace.backends import memory
from headrace.kv.layout import kv_places, kv_shape, kv_shapes
from tests.tiny import tiny_config

GIB = 2**30


def plan(free: int, *, encoder: bool = False, **settings: object) -> memory.MemoryPlan:
    config = replace(tiny_config(max_position=4096), encoder=encoder)  # 2 layers * 2 * 2 heads * 8 = 64 elements a token
    block_bytes = kv_shape(config).block_bytes(16, 2)
    arguments = {"block_bytes": block_bytes, "block_size": 16, "free": free, "max_num_seqs": 4, **settings}
    return memory.plan(config, **arguments)  # type: ignore[arg-type]


def test_layers_of_one_shape_make_a_pool_and_others_are_refused() -> None:
    wide = tiny_config(head_dim=16).layers
    assert kv_shape(tiny_config()) == (2, 2, 8)
    with pytest.raises(ValueError, match=r"K and V of one shape, and this llama has \[\(2, 8\), \(2, 16\)\]"):
        kv_shape(replace(tiny_config(), layers=(*tiny_config().layers, *wide)))


def test_the_default_is_2048_tokens_per_sequence_and_at_least_one_context_with_draft_nodes() -> None:
    """128 bytes per token. The pool holds a full batch of 2,048 tokens per sequence, not 32 full contexts."""
    assert plan(GIB).kv_bytes == 4 * 2048 * 128
    assert plan(GIB, max_num_seqs=32).kv_bytes == 32 * 2048 * 128
    assert plan(GIB, max_num_seqs=1).kv_bytes == (4096 + 64) * 128
    assert plan(GIB, max_model_len=1024, max_num_seqs=32).kv_bytes == 32 * 1024 * 128
    assert plan(GIB, max_num_seqs=1).max_model_len == plan(GIB, max_num_seqs=32).max_model_len == 4096


def test_the_default_kv_cache_is_at_most_a_quarter_of_free_memory() -> None:
    tight = plan(4 * 2**20, max_num_seqs=32)
    assert tight.kv_bytes == 2**20
    assert tight.num_blocks == 512
    assert tight.summary == "KV cache of at most 1.0 MiB for 8,192 tokens, context 4,096"
    assert plan(GIB, max_num_seqs=32).summary == "KV cache of at most 8.0 MiB for 65,536 tokens, context 4,096"


def test_the_summary_of_an_encoder_names_no_cache() -> None:
    assert plan(GIB, encoder=True).summary == "texts of at most 4,096 tokens"


def test_a_default_context_is_shortened_to_the_pool() -> None:
    assert plan(2**20).max_model_len == 2048


def test_a_requested_context_that_does_not_fit_is_refused_with_working_values() -> None:
    with pytest.raises(ValueError, match="kv_cache_memory=") as caught:
        plan(2**20, max_model_len=4096)
    message = str(caught.value)
    length = int(re.search(r"max_model_len=(\d+)", message)[1])  # type: ignore[index]
    size = int(re.search(r"kv_cache_memory=(\d+)", message)[1])  # type: ignore[index]
    assert plan(2**20, max_model_len=length).max_model_len == length
    assert plan(2**20, max_model_len=4096, kv_cache_memory=size).max_model_len == 4096


def test_sizes_beyond_free_memory_or_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="lower it to"):
        plan(2**20, kv_cache_memory="2GiB")
    with pytest.raises(ValueError, match="larger than the model.s context of 4096"):
        plan(GIB, max_model_len=5000)
    for narrower, said in ((" ", "model or  , or"), ("", "choose a smaller model, or free memory")):
        with pytest.raises(ValueError, match=said):
            memory.check_weights_fit(10 * GIB, GIB, "big", narrower=narrower)


@pytest.mark.parametrize(
    ("text", "size"),
    [("2GiB", 2 * GIB), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), (77, 77), ("12", 12), ("3 kib", 3072)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert memory.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "two", "-3", "1.2.3GB", "5 TB", 0, -1, "."])
def test_an_invalid_size_is_refused(text: int | str) -> None:
    with pytest.raises(ValueError, match="is not a size|must be above 0"):
        memory.parse_bytes(text)


def test_encoder_scratch_reduces_the_kv_cache() -> None:
    """What that takes is not there for K and V, and where it is all there is, the message says so."""
    both = plan(4 * 2**20, max_num_seqs=32, scratch=2 * 2**20)
    assert (both.scratch, both.kv_bytes, both.bytes) == (2 * 2**20, 2**19, 2**19 + 2 * 2**20)
    assert both.spare == 4 * 2**20 - both.bytes
    assert both.summary.endswith("context 4,096, sources encoded in 2.0 MiB")
    with pytest.raises(ValueError, match=r"sources are encoded in 2.0 MiB, and 1.0 MiB are free next to the weights"):
        plan(2**20, scratch=2 * 2**20)


def test_hidden_states_are_bounded_by_spare_memory() -> None:
    """1 MiB of KV (128 bytes a token), hidden states of as many bytes a token."""
    free = 2**20 + 2**19
    whole = plan(free, kv_cache_memory=2**20)
    assert whole.spare == 2**19
    memory.check_hidden_fits(whole, 2**18, GIB)
    with pytest.raises(ValueError, match="leave penalty_alpha out") as caught:
        memory.check_hidden_fits(whole, 2**20, GIB)  # blocks nobody wrote yet do not count as free
    size = int(re.search(r"kv_cache_memory=(\d+)", str(caught.value))[1])  # type: ignore[index]
    assert 2**19 < size < 2**20
    smaller = plan(free, kv_cache_memory=size)
    memory.check_hidden_fits(smaller, smaller.kv_bytes, GIB)
    with pytest.raises(ValueError, match="leave penalty_alpha out"):
        memory.check_hidden_fits(smaller, smaller.kv_bytes, 2**10)  # what is free now bounds it too


def test_window_layers_take_blocks_of_their_own() -> None:
    """Full layers of 128 bytes a token, window layers of 512: their pool has what sequences and a step need, at most as many
    blocks as the other."""
    assert memory.window_blocks(512, 16, 4, 500) == 4 * (36 + 2) + 32
    pool = memory.WindowPool(512, 16 * 512, memory.window_blocks(512, 16, 4, 500))
    large = plan(GIB, window=pool)
    assert (large.num_blocks, large.window, large.window_blocks) == (4 * 128, 512, 184)
    assert large.kv_bytes == 4 * 2048 * 128 + 184 * 16 * 512
    assert large.summary == (
        "KV cache of at most 2.4 MiB for 8,192 tokens, context 4,096 (1.0 MiB of layers that see all tokens, 1.4 MiB of layers "
        "that see 512)"
    )
    for budget in (2**20, 3 * 2**20, 2**22):
        tight = plan(GIB, window=pool, kv_cache_memory=budget, max_model_len=1024)
        assert budget - 16 * 640 < tight.kv_bytes <= budget
        assert tight.window_blocks == min(tight.num_blocks, 184)
    short = plan(2**20, window=pool)  # the context is shortened to less than the window
    assert (short.max_model_len, short.window, short.window_blocks) == (short.num_blocks * 16, 0, 0)
    whole = plan(GIB, window=pool, block_bytes=0)  # no layer sees all tokens
    assert (whole.num_blocks, whole.kv_bytes) == (4 * 128, 184 * 16 * 512)


def test_pools_of_a_config() -> None:
    layers = [replace(tiny_config().layers[0], window=window) for window in (12, None, 40, 600)]
    config = replace(tiny_config(), layers=tuple(layers))
    assert config.shared_window(500) == 40
    assert [tuple(place) for place in kv_places(config, 40)] == [(1, 0), (0, 0), (1, 1), (0, 1)]
    assert [shape.layers for shape in kv_shapes(config, 40)] == [2, 2]
    assert config.shared_window(30) == 12
    assert config.shared_window(12) == replace(config, encoder=True).shared_window(500) == 0
    assert config.sharing(2).shared_window(500) == 0  # layer 1 sees all tokens and reads layer 0
    reads = replace(config, layers=(*layers, *(replace(layers[at], kv_from=at) for at in (2, 1))))
    assert (reads.shared_window(500), [tuple(place) for place in kv_places(reads, 40)][-2:]) == (40, [(1, 1), (0, 0)])
    within = replace(config, layers=(*layers, replace(layers[0], kv_from=1)))  # a window over K/V that are all kept
    assert (within.shared_window(500), kv_places(within, 40)[-1]) == (40, (0, 0))
