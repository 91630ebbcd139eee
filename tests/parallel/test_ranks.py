"""Several ranks compute the bits of one: logits of all architectures, kinds and worlds, tokens of all decoding methods."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace import core
from headrace.backends.native import lowering
from headrace.data.explicit import params_of
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.models.base import Model
from headrace.parallel.ranks.share import LayerShare, Share, unsupported_world
from headrace.runner.span import ATTENTION
from headrace.weights.kinds import KINDS
from tests.native_blocks import INTEGER_KINDS
from tests.parallel import ranks
from tests.parallel.ranks import engine_of, own_pools, ranked
from tests.parallel.test_cut_weights import kind_source
from tests.parallel.test_cut_weights import model as kind_model
from tests.tiny import finish, tokens_of
from tests.tiny_native import Feeder, native_model

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

pytestmark = pytest.mark.usefixtures("own_pools")
__all__ = ["own_pools"]

TEXTS = [np.random.default_rng(at).integers(0, 590, length).tolist() for at, length in enumerate((37, 1, 20))]
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3_text", "gpt2")


def model(architecture: str = "llama", **changes: Any) -> Model:
    """9 heads on 3 K/V heads: a K/V head has query heads on two ranks. gpt2 has as many K/V heads as heads."""
    sizes = {"heads": 9, "kv_heads": 9 if architecture == "gpt2" else 3, "head_dim": 64, "ffn": 512, "vocab_size": 600}
    made = native_model(architecture, **{**sizes, "hidden_size": 64, **changes})
    assert not unsupported_world(made.config, 8)
    return made


def logits(program: Any) -> list[np.ndarray]:
    """Of a prompt in two chunks beside another, then of a draft tree."""
    feeder = Feeder(program, TEXTS)
    first = feeder.feed((0, 0, 16), (1, 0, 1))
    second = feeder.feed((2, 0, 20), (0, 16, 21), nodes=[5, 6, 7], parents=[-1, 0, 0])
    return first + second


def equal(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x.view(np.uint32), y.view(np.uint32)) for x, y in zip(a, b, strict=True))


def both(made: Model, world: int, **options: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    with ranked(made, 1, **options) as one:
        expected = logits(one)
    with ranked(made, world, **options) as program:
        return expected, logits(program)


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "granite", "glm4", "arcee", "ministral3"])
def test_logits_of_architectures(architecture: str, world: int) -> None:
    assert equal(*both(model(architecture), world))


@pytest.mark.parametrize("kind", [*INTEGER_KINDS, "F32"])
def test_logits_of_stored_kinds(kind: str) -> None:
    made = kind_model(KINDS[kind].block)
    for world in (2, 4):
        assert equal(*both(made, world, source=kind_source(kind, made))), world


@pytest.mark.parametrize("kv_dtype", ["int8", "int4", "float32"])
def test_logits_with_other_kv(kv_dtype: str) -> None:
    assert equal(*both(model(), 2, kv_dtype=kv_dtype))


@pytest.mark.parametrize("activations", ["token", "tensor"])
def test_logits_with_scales_of_whole_rows(activations: str) -> None:
    for world in (2, 4):
        assert equal(*both(model(), world, activations=activations, quantize="int8")), world


@pytest.mark.parametrize("activations", ["token", "tensor"])
def test_logits_with_weights_and_inputs_of_one_scale_a_row(activations: str) -> None:
    """C8 by row: exact integer sums of each segment. The control: a scale for 32 inputs gives other logits."""
    made = kind_model(KINDS["C8"].block)
    for world in (2, 4):
        expected, found = both(made, world, source=kind_source("C8", made), activations=activations)
        assert equal(expected, found), world
    with ranked(made, 1, source=kind_source("C8", made)) as by_group:
        assert not equal(expected, logits(by_group))


@pytest.mark.parametrize("fuse", [frozenset()])
def test_logits_without_fusions(fuse: frozenset[str]) -> None:
    assert equal(*both(model(), 2, fuse=fuse))


# -- rows split over the ranks -----------------------------------------------------------------------------------------
def long_logits(program: Any) -> list[np.ndarray]:
    """Of steps with 68 and 52 rows, then of a draft tree after a step that is too short to be split."""
    feeder = Feeder(program, [list(range(1, 61)), list(range(200, 260))])
    steps = feeder.feed((0, 0, 60), (1, 0, 8)), feeder.feed((1, 8, 52)), feeder.feed((0, 59, 1), nodes=[5, 6], parents=[-1, 0])
    return [rows for step in steps for rows in step]


def split(made: Model, world: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> bool:
    """Whether ranks that split the rows of steps have the bits of one rank."""
    monkeypatch.setattr(lowering, "SPLIT_FROM", 40)
    with ranked(made, 1, **options) as one:
        expected = long_logits(one)
    with ranked(made, world, **options) as program:
        return equal(expected, long_logits(program))


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_split_rows_of_architectures(architecture: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert split(model(architecture), world, monkeypatch)


@pytest.mark.parametrize(
    "options",
    [
        {"activations": "token", "quantize": "int8"},
        {"activations": "tensor", "quantize": "int8"},
        {"fuse": frozenset()},
        {"kv_dtype": "int8", "threads": 2},
    ],
    ids=str,
)
def test_split_rows_with_settings(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert split(model(), 2, monkeypatch, **options)


def test_rows_of_other_ranks_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: each rank sums its rows only, and nothing gathers them."""
    monkeypatch.setattr(lowering.Lowering, "_by_rows", lambda self, *values, to=None: {})
    assert not split(model(), 2, monkeypatch)


# -- tokens ------------------------------------------------------------------------------------------------------------
METHODS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "max_tokens": 12},
    {"seed": 3, "top_p": 0.9, "max_tokens": 12},
    {"seed": 4, "n": 3},
    {"seed": 5, "repetition_penalty": 1.3, "no_repeat_ngram": 2},
    {"beam_width": 3},
    {"temperature": 0.0, "prompt_logprobs": 2},
)


def outputs(made: Model, world: int, speculation: bool, **options: Any) -> list[Any]:
    """Tokens, and log-probabilities of the prompt, of all requests in one engine whose small pool makes it preempt."""
    drafting = Speculation([PromptLookup()], 256) if speculation else None
    repeated = [7, 8, 9, 10] * 6
    with ranked(made, world, num_blocks=24, **options) as program:
        engine = engine_of(program, speculation=drafting, budget=48, blocks=24)
        requests = [engine.add([*repeated, at], params_of({"max_tokens": 8, **fields})) for at, fields in enumerate(METHODS)]
        finish(engine)
        return [(tokens_of(request), request.prompt_logprobs) for request in requests]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("speculation", [False, True])
def test_tokens_of_decoding_methods(world: int, speculation: bool) -> None:
    assert outputs(model(), world, speculation) == outputs(model(), 1, speculation)


# -- controls ----------------------------------------------------------------------------------------------------------
def changed_layers(monkeypatch: pytest.MonkeyPatch, change: Callable[[LayerShare], LayerShare]) -> None:
    layer = Share._layer
    monkeypatch.setattr(Share, "_layer", lambda self, of: change(layer(self, of)))


def test_a_rank_that_counts_the_heads_of_a_shared_kv_head_from_its_own_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranked(model(), 1) as one:
        expected = logits(one)
    changed_layers(monkeypatch, lambda part: replace(part, first=0))
    with ranked(model(), 2) as program:
        assert not equal(logits(program), expected)


def test_a_rank_without_the_kv_head_that_it_shares_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(part: LayerShare) -> LayerShare:
        held = part.kv_heads
        return replace(part, kv_heads=range(held.start + (part.first > 0), held.stop), first=0)

    changed_layers(monkeypatch, lacking)
    with pytest.raises(ValueError, match="attention has a multiple of the 1 KV heads, not 5"), ranked(model(), 2):
        pass


def test_borders_that_are_not_those_of_the_packed_table_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Share, "borders", property(lambda self: [0, 128, self.config.vocab_size]))
    with pytest.raises(ValueError, match="a rank's table has the rows of its part"), ranked(model(), 2):
        pass


def test_a_rank_that_does_not_hear_of_skipped_layers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The follower computes a sublayer that the first rank skips: their exchanges differ, and the group is lost."""
    skips = [0, ATTENTION]

    def skipping(program: Any) -> list[np.ndarray]:
        return Feeder(program, TEXTS).feed((0, 0, 16), skips=skips)

    with ranked(model(), 1) as one:
        expected = skipping(one)
    with ranked(model(), 2) as program:
        assert equal(skipping(program), expected)
    mark = lowering.Lowering._mark

    def deaf(self: lowering.Lowering, index: int, name: str) -> dict[str, Any]:
        assert self.share is not None
        return {**mark(self, index, name), **({"sublayer": 0} if self.share.rank else {})}

    monkeypatch.setattr(lowering.Lowering, "_mark", deaf)
    monkeypatch.setattr(ranks, "TIMEOUT", 2.0)
    with pytest.raises((core.module().RankLost, AssertionError)), ranked(model(), 2) as program:
        assert equal(skipping(program), expected)
