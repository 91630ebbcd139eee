"""Layers with a sliding window have a pool of their own and give up the blocks before the window: outputs are those of an
engine that keeps all K and V.

Exactness class: bitwise on the native core; in torch in float64 the tokens are equal.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from headrace.backends.eager.program import EagerProgram
from headrace.data.config import ModelConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import WINDOWS
from headrace.drafting.speculation import Speculation
from headrace.drafting.suffix import SuffixTree
from headrace.engine.engine import Engine
from headrace.kv.blocks import BlockManager
from headrace.models.base import Model
from tests import beams
from tests.e2e import test_equalities as equalities
from tests.property.drafters import Guessing
from tests.tiny import VOCAB, finish, run_alone, tiny_config, tiny_engine, tiny_model, tokens_of
from tests.tiny_native import native_alone, native_engine, native_model

WINDOW = 12
SIZES = (("kv_heads", 2), ("head_dim", 16))
# Layers with a window below, between and above others; the last model has no others.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"slides": (True, True, False, True)}),
    "gemma2": ("gemma2", {"slides": (True, False)}),
    "exaone4": ("exaone4", {"slides": (False, True)}),
    "mistral": ("llama", {"window": WINDOW}),
    # The last layers read the K/V of an earlier layer of their kind, which is not the nearest.
    "reading": ("gemma3_text", {"slides": (True, False, True, False, True, False), "kv_from": (None, None, None, None, 0, 1)}),
    # Layers with a window have K/V of another size.
    "sizes": ("gemma3_text", {"slides": (True, True, False, True), "sliding": SIZES}),
    "sizes, reading": ("gemma3_text", {"slides": (True, False, True, False), "sliding": SIZES, "kv_from": (None, None, 0, 1)}),
}


class Side:
    """A back end: a model, its engines, and outputs of an engine that keeps all K and V."""

    def __init__(self, backend: str, name: str) -> None:
        architecture, changes = MODELS[name]
        native = backend == "native"
        self.model: Model = (
            native_model(architecture, **changes) if native else tiny_model(tiny_config(architecture, **changes))
        )
        self._engine: Callable[..., Engine] = native_engine if native else tiny_engine
        self.alone: Callable[..., list[int]] = native_alone if native else run_alone

    def kept(self, **options: Any) -> Engine:
        """An engine that keeps all K and V."""
        return self._engine(self.model, windows=False, **options)

    def engine(self, **options: Any) -> Engine:
        """An engine in which the blocks that window layers give up are filled with NaN."""
        engine = self._engine(self.model, **options)
        poison(engine)
        return engine


@pytest.fixture(scope="module", params=["torch", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=list(MODELS))
def side(request: pytest.FixtureRequest, backend: str) -> Side:
    return Side(backend, request.param)


@pytest.fixture(scope="module")
def gemma(backend: str) -> Side:
    return Side(backend, "gemma3")


def poison(engine: Engine) -> None:
    """Fill free blocks of window layers with NaN, and blocks that get a new holder with large numbers: the native core takes
    rows that were never written for finite."""
    pool = engine.blocks.windows
    assert pool is not None, "the model has no window"
    program: Any = engine.executor.runner.target  # type: ignore[attr-defined]
    take, retire = pool.take, pool._retire

    def fill(block: int, byte: int, value: float) -> None:
        if isinstance(program, EagerProgram):
            program.pool.parts[1][:, :, block] = value
        else:
            size = program.windows.bytes // program.windows.num_blocks
            program.windows.write_blocks([block], np.full(size, byte, np.uint8))

    def taken() -> int:
        block = take()
        fill(block, 0x42, 48.0)
        return block

    def retired(block: int) -> None:
        retire(block)
        if block in pool._free:
            fill(block, 0xFF, float("nan"))  # 0xFF: NaN in each format, or in its scales

    pool.take, pool._retire = taken, retired  # type: ignore[method-assign]


@pytest.fixture
def poisoned(side: Side, monkeypatch: pytest.MonkeyPatch) -> Side:
    """A side whose engines the tests of `test_equalities` take."""
    monkeypatch.setattr(equalities, "tiny_engine", lambda model, **options: side.engine(**options))
    monkeypatch.setattr(equalities, "run_alone", side.alone)
    return side


@pytest.mark.parametrize("budget", [256, 5])
def test_batched_and_chunked_equal_single(poisoned: Side, budget: int) -> None:
    equalities.test_batched_and_chunked_equal_single(poisoned.model, budget)


def test_a_prefix_hit_equals_a_miss(poisoned: Side) -> None:
    equalities.test_a_prefix_hit_equals_a_miss(poisoned.model)


def test_preempted_equals_not_preempted(poisoned: Side) -> None:
    jobs = [([number + 3] * 14, params.replace(max_tokens=40)) for number, (_, params) in enumerate(equalities.load(3))]
    engine = poisoned.engine(blocks=32)
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    assert engine.scheduler.preemptions > 0
    assert [tokens_of(request)[0] for request in requests] == equalities.expected(poisoned.model, jobs)


@pytest.mark.parametrize("blocks", [64, 14])
def test_forks_copy_the_blocks_of_both_tables(poisoned: Side, blocks: int) -> None:
    equalities.test_child_i_of_n_equals_the_single_run_with_its_key(poisoned.model, blocks)


@pytest.mark.parametrize("name", ["gemma3", "sizes, reading"])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
def test_every_kv_format(kv_dtype: str, name: str) -> None:
    side = Side("native", name)
    jobs = equalities.load(seed=5, count=6)
    engine = side.engine(kv_dtype=kv_dtype, budget=7)
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    assert [tokens_of(one)[0] for one in requests] == [side.alone(side.model, *job, kv_dtype=kv_dtype) for job in jobs]


@pytest.mark.parametrize("caching", [True, False])
def test_drafts_and_rejections_keep_the_window(gemma: Side, caching: bool) -> None:
    """Trees whose accepted nodes move, before and after blocks are given up."""
    jobs = equalities.load(seed=2)
    engine = gemma.engine(
        budget=24, blocks=128, prefix_caching=caching, speculation=Speculation([Guessing(3), SuffixTree()], 256, gamma=6)
    )
    requests = [engine.add(prompt, params.replace(max_tokens=40)) for prompt, params in jobs]
    finish(engine)
    assert sum(request.metrics.drafted - request.metrics.accepted for request in requests) > 20
    wanted = [gemma.alone(gemma.model, prompt, params.replace(max_tokens=40)) for prompt, params in jobs]
    assert [tokens_of(request)[0] for request in requests] == wanted


def test_beams_and_samples_with_preemption(gemma: Side) -> None:
    """Each output equals that of an engine with room for all and with all K and V kept."""

    def make(model: Model, blocks: int, **options: Any) -> Engine:
        return gemma.engine(blocks=blocks, **options) if blocks < 400 else gemma.kept(blocks=blocks, **options)

    assert beams.mixed(make=make, model=gemma.model, blocks=24) > 0


def longest(engine: Engine, table: int) -> int:
    """Most blocks that a sequence holds in a table."""
    return max(sum(block >= 0 for block in seq.kv.tables[table]) for seq in engine.scheduler.held)


def test_a_sequence_holds_its_window_and_no_more(gemma: Side) -> None:
    """In each step the window, the step's tokens, and one block at each end."""
    budget = 20
    engine = gemma.engine(budget=budget, blocks=128)
    engine.add(list(range(90)), SamplingParams(temperature=0.0, max_tokens=30))
    size, held = engine.blocks.block_size, 0
    while engine.busy:
        engine.step()
        held = max([held, *([longest(engine, WINDOWS)] if engine.scheduler.held else [])])
    assert 0 < held <= -(-(WINDOW + budget) // size) + 2 < -(-90 // size)


def give_up_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks are given up one block too early."""
    retire = BlockManager._retire

    def early(self: BlockManager, table: list[int], end: int) -> None:
        retire(self, table, min(end + 1, max(len(table) - 1, 0)))

    patch.setattr(BlockManager, "_retire", early)
    patch.setattr(BlockManager, "check", lambda self, seqs, held=(): None)


def hit_without_window(patch: pytest.MonkeyPatch) -> None:
    """A prefix hit needs the last block before its end alone."""
    seen = BlockManager.first_seen
    patch.setattr(BlockManager, "first_seen", lambda self, computed: max(seen(self, computed), computed // self.block_size - 1))
    patch.setattr(BlockManager, "retire", lambda self, seq: None)


@pytest.mark.parametrize(
    ("where", "control"), [("torch", give_up_early), ("native", give_up_early), ("torch", hit_without_window)]
)
def test_controls(where: str, control: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken rules change outputs. A window of 12 tokens in blocks of 16, as on the native core, is one block."""
    gemma = Side(where, "gemma3")
    control(monkeypatch)
    jobs = equalities.load()
    wanted = [gemma.alone(gemma.model, *job) for job in jobs]
    engine = gemma.engine(blocks=128)

    def wrong() -> bool:
        requests = [engine.add(prompt, params) for prompt, params in jobs]
        with suppress(AssertionError):
            finish(engine)
            return [tokens_of(request)[0] for request in requests] != wanted
        return True

    assert wrong() or wrong()


def test_a_layer_that_sees_all_tokens_keeps_the_k_and_v_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of a layer with a window, so both stay in one pool. Control: with a window pool for them
    it reads blocks that were given up, which are NaN here."""
    model = tiny_model(tiny_config("gemma3_text", slides=(True, False), kv_from=(None, 0)))
    prompt, params = list(range(60)), SamplingParams(temperature=0.0, max_tokens=8)

    def output() -> list[int]:
        engine = tiny_engine(model, budget=16, prefix_caching=False)
        if engine.blocks.windows is not None:
            poison(engine)
        request = engine.add(prompt, params)
        finish(engine)
        return tokens_of(request)[0]

    wanted = run_alone(model, prompt, params)
    assert output() == wanted
    monkeypatch.setattr(ModelConfig, "shared_window", lambda self, context: WINDOW)
    with pytest.raises(AssertionError, match="the largest is nan"):
        output()


def test_a_second_turn_computes_its_new_tokens(gemma: Side) -> None:
    """A chat of 120 and 20 tokens: the second turn finds the prefix although window layers gave up most of it."""
    rng = random.Random(7)
    engine = gemma.engine(blocks=160, budget=32, seqs=2)
    params = SamplingParams(temperature=0.0, max_tokens=12)
    first = engine.add([rng.randrange(VOCAB) for _ in range(120)], params)
    finish(engine)
    prompt = first.prompt + tokens_of(first)[0] + [rng.randrange(VOCAB) for _ in range(20)]
    second = engine.add(prompt, params)
    finish(engine)
    assert len(prompt) - second.metrics.cached_tokens <= 20 + 2 * engine.blocks.block_size
    assert tokens_of(second)[0] == gemma.alone(gemma.model, prompt, params)
