"""Encoder-decoders on the native core: torch's arithmetic, and bits that depend on source and output alone."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace import core
from headrace.backends.native import encoder, lowering
from headrace.backends.native.distances import bias_by_distance, buckets
from headrace.backends.native.encoder import NativeEncoder
from headrace.backends.native.live import NativeLive
from headrace.backends.native.program import NativeProgram
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.data.sources import Tokens
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.layout import kv_shape
from headrace.llm import LLM
from headrace.models.base import Model
from headrace.ops import attention
from headrace.runner.runner import Runner
from headrace.weights.loader import load_model
from tests.beams import add_beam
from tests.models.zoo import MemorySource
from tests.native_reference import reference_of
from tests.tiny import finish, tokens_of
from tests.tiny_native import BLOCK, Feeder
from tests.tiny_sources import VOCAB, logits, oracle, source_of, write_tiny_marian

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = tuple(module.cpu_info()["isas"])
KINDS = ("marian", "marian-gelu", "t5", "t5-gated")
# Of a row's spread: what sums in float32 leave; what a value between two bfloat16 numbers makes, rounded the other way (in the
# encoder, of all rows that read the source); what rounding leaves.
NEAR, ROUNDED, CLOSE = 1e-5, 0.1, 0.06
LENGTHS = ((1, 3), (7, 12), (16, 10), (30, 8), (42, 30))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@lru_cache(maxsize=4)
def held(kind: str) -> tuple[Model, MemorySource]:
    """A model in float64 whose matrices are what bfloat16 holds, and its file."""
    theirs = oracle(kind)
    with torch.no_grad():
        for value in [*theirs.parameters(), *theirs.buffers()]:
            value.copy_(value.bfloat16() if value.dim() == 2 else value.float())
    source = source_of(theirs)
    return load_model(source, torch.float64), source


def program(kind: str, blocks: int = 64, **options: Any) -> NativeProgram:
    sizes = {"num_blocks": blocks, "block_size": BLOCK, "max_positions": 320, "threads": 1}
    return NativeProgram(*held(kind), **{**sizes, **options})


def texts(lengths: Sequence[tuple[int, int]] = LENGTHS) -> list[tuple[list[int], list[int]]]:
    """Sources, and what is written from them."""
    rng = np.random.default_rng(5)
    return [(rng.integers(0, VOCAB - 1, a).tolist(), rng.integers(0, VOCAB - 1, b).tolist()) for a, b in lengths]


class Reader(Feeder):
    """Outputs and their sources on a program, which encodes these at once."""

    def __init__(self, program: NativeProgram, pairs: Sequence[tuple[list[int], list[int]]], encode: bool = True) -> None:
        super().__init__(program, [ids for _, ids in pairs])
        at = max(max(sequence.table) for sequence in self.sequences) + 1
        params, written = module.SampleParams(), self.sequences
        self.sequences = [module.Sequence(ids, params, len(source)) for source, ids in pairs]
        for sequence, old, (source, _) in zip(self.sequences, written, pairs, strict=True):
            count = -(-len(source) // BLOCK)
            sequence.set_table(0, 0, old.table)
            sequence.set_table(1, 0, list(range(at, at + count)))
            at += count
        if encode:
            assert program.encoder is not None
            program.encoder.encode(
                [(Tokens(tuple(source)), one.source_table) for (source, _), one in zip(pairs, self.sequences, strict=True)]
            )


def apart(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray], never: int | None) -> list[np.ndarray]:
    """Per text and row the largest difference of a logit, relative to the row's spread."""
    kept = [token for token in range(VOCAB) if token != never]
    pairs = [(a[:, kept], b[:, kept]) for a, b in zip(got, wanted, strict=True)]
    return [(np.abs(a - b) / b.std(-1, keepdims=True)).max(-1) for a, b in pairs]


def distance(kind: str, reference: Model, **options: Any) -> tuple[float, float]:
    """The median of the texts' medians, and the largest."""
    pairs = texts()
    got = Reader(program(kind, **options), pairs).whole()
    found = apart(got, [logits(reference, *pair).numpy() for pair in pairs], reference.config.never)
    usual, largest = float(np.median([np.median(rows) for rows in found])), float(np.max(np.concatenate(found)))
    print(f"{kind}: median {usual:.1e}, largest {largest:.1e} of a row's spread")
    return usual, largest


# -- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"max_model_len": 48}])
def test_the_memory_plan_includes_the_encoder_scratch(tmp_path: Path, settings: dict[str, Any]) -> None:
    """As much as the pools take, of the model and of one that drafts for it; in torch one source at a time."""
    folder = write_tiny_marian(tmp_path)
    with LLM(folder, device="cpu", threads=1, draft=folder, **settings) as llm:
        encoders = [made.encoder for made in llm.runner.programs]  # type: ignore[attr-defined]
        assert llm.memory_plan.scratch == sum(each.scratch_bytes for each in encoders)
        assert llm.memory_plan.scratch == 2 * 2 * 1024 * 4 * 16 * 4  # models, K and V of a layer, tokens, heads of 16, float32
    with LLM(folder, device="cpu", threads=1, backend="torch", **settings) as llm:
        assert llm.memory_plan.scratch == 2 * 2 * settings.get("max_model_len", 96) * 32 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_encoder_layers_share_blocks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as with blocks for each layer, in half the memory of two layers. Control: all K and V in one block."""

    def whole() -> tuple[list[np.ndarray], int]:
        made = program(kind)
        assert made.encoder is not None
        return Reader(made, texts()).whole(), made.encoder.scratch_bytes

    shared, size = whole()
    feed_rows = encoder.feed_rows

    def together(step: Any, ids: Sequence[int], table: Sequence[int]) -> None:
        feed_rows(step, ids, [table[0]] * len(table) if isinstance(table, range) else table)

    with monkeypatch.context() as slip:
        slip.setattr(encoder, "feed_rows", together)
        assert not all(np.array_equal(a, b) for a, b in zip(whole()[0], shared, strict=True))
    monkeypatch.setattr(encoder, "scratch_shape", kv_shape)
    apart, larger = whole()
    assert larger == held(kind)[0].encoder.config.num_layers * size  # type: ignore[union-attr]
    assert all(np.array_equal(a, b) for a, b in zip(apart, shared, strict=True))


# -- numbers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_the_same_arithmetic(kind: str) -> None:
    """With K and V in float32 nothing but the inputs of linear layers is rounded."""
    usual, largest = distance(kind, reference_of(held(kind)[0], program(kind).weights), kv_dtype="float32")
    assert usual < NEAR
    assert largest < ROUNDED


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_close_to_torchs(kind: str) -> None:
    """As it runs by default, beside the same weights in float64."""
    usual, largest = distance(kind, held(kind)[0])
    assert usual < CLOSE
    assert largest < 5 * CLOSE


def not_clamped(weight: np.ndarray, most: int, both: bool) -> np.ndarray:
    """As if there were numbers for some distances more, which are those of near ones."""
    right = lowering_by_distance(weight, most, both)
    return np.pad(right, ((0, 0), (9, 9)), mode="wrap")


lowering_by_distance = bias_by_distance


def both_ways(weight: np.ndarray, most: int, both: bool) -> np.ndarray:
    return lowering_by_distance(weight, most, True)


@pytest.mark.parametrize("wrong", [not_clamped, both_ways])
def test_wrong_distances_change_the_logits(wrong: Callable[..., np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    right = reference_of(held("t5")[0], program("t5").weights)
    monkeypatch.setattr(lowering, "bias_by_distance", wrong)
    _, largest = distance("t5", right, kv_dtype="float32")
    assert largest > 5 * ROUNDED


@pytest.mark.parametrize(("count", "most"), [(8, 20), (32, 128), (16, 64), (32, 17)])
@pytest.mark.parametrize("both", [True, False])
def test_buckets_equal_those_of_torch(count: int, most: int, both: bool) -> None:
    far = np.arange(-3 * most, 3 * most + 1)
    assert buckets(far, count, most, both).tolist() == attention.buckets(torch.from_numpy(far), count, most, both).tolist()


# -- bits ----------------------------------------------------------------------------------------------------------------


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.uint32), b.view(np.uint32))


def alone(kind: str, pairs: Sequence[tuple[list[int], list[int]]], **options: Any) -> list[np.ndarray]:
    return [Reader(program(kind, **options), [pair]).whole()[0] for pair in pairs]


@pytest.mark.parametrize("quantize", ["", "int8"])
@pytest.mark.parametrize("kind", ["marian", "t5-gated"])
def test_a_rows_bits_depend_only_on_its_source_and_tokens(kind: str, quantize: str) -> None:
    """In a batch, on more threads, in chunks beside others, as a draft's nodes, and where all sources were encoded at once."""
    pairs = texts(((1, 3), (7, 12), (42, 30), (260, 9)))
    wanted = alone(kind, pairs, quantize=quantize)
    for threads in (1, 2):
        reader = Reader(program(kind, threads=threads, quantize=quantize), pairs)
        assert all(same(a, b) for a, b in zip(reader.whole(), wanted, strict=True))
        reader.feed((2, 0, 11), (1, 0, 5))
        middle, *_ = reader.feed((2, 11, 1), (3, 0, 9), (1, 5, 2))
        assert same(middle, wanted[2][11:12])
        (rest,) = reader.feed((2, 12, 1), nodes=[3, *pairs[2][1][13:20]], parents=[-1, -1, 1, 2, 3, 4, 5, 6])
        assert same(rest[2:], wanted[2][13:20])


@pytest.mark.parametrize("kind", ["marian", "t5"])
@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_keeps_the_rule(kind: str, isa: str) -> None:
    pairs = texts()
    wanted = alone(kind, pairs, isa=isa)
    reader = Reader(program(kind, isa=isa, threads=2), pairs)
    assert all(same(a, b) for a, b in zip(reader.whole(), wanted, strict=True))
    assert max(rows.max() for rows in apart(wanted, alone(kind, pairs, isa=ISAS[0]), held(kind)[0].config.never)) < 5 * CLOSE


def test_fused_phases_have_the_bits_of_unfused_phases() -> None:
    for kind in ("marian", "t5-gated"):
        fused, apart = (Reader(program(kind, **options), texts()).whole() for options in ({}, {"fuse": frozenset()}))
        assert all(same(a, b) for a, b in zip(fused, apart, strict=True))


def test_stale_blocks_of_a_source_are_seen() -> None:
    """The controls of all equalities: blocks of another source, none encoded, one token less; and no source at all."""
    pairs = texts(((40, 9), (40, 9)))
    (wanted, _) = alone("marian", pairs)
    reader = Reader(program("marian"), pairs)
    ours, theirs = reader.sequences
    own = ours.source_table
    assert same(reader.whole()[0], wanted)
    ours.set_table(1, 0, [own[0], theirs.source_table[1], own[2]])
    assert not same(reader.whole()[0], wanted)
    assert not same(Reader(program("marian"), pairs, encode=False).whole()[0], wanted)
    assert not same(Reader(program("marian"), [(pairs[0][0][:-1], pairs[0][1])]).whole()[0], wanted)
    without = Feeder(program("marian"), [ids for _, ids in pairs])
    with pytest.raises(ValueError, match="a feed has none"):
        without.whole()


# -- the loop --------------------------------------------------------------------------------------------------------------


def engine(kind: str, *, budget: int = 64, blocks: int = 64, **cache: bool) -> Engine:
    config = EngineConfig(
        SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=budget, max_model_len=256), CacheConfig(blocks, BLOCK, **cache)
    )
    made = program(kind, blocks)
    return Engine(InProcess(Runner(made)), config, vocab_size=VOCAB, start=made.config.start)


def sources(count: int = 6, seed: int = 3, longest: int = 40) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB - 1, int(rng.integers(1, longest))).tolist() for _ in range(count)]


def written(running: Engine, batch: list[list[int]], params: SamplingParams = GREEDY) -> list[list[list[int]]]:
    requests = [running.add(source, params) for source in batch]
    finish(running)
    return [tokens_of(request) for request in requests]


@pytest.mark.parametrize("kind", ["marian", "t5-gated"])
def test_a_request_in_a_batch_equals_the_request_alone(kind: str) -> None:
    """Beside others, from a source longer than a step's budget, and after it was preempted."""
    batch, params = sources(5), SamplingParams(temperature=0.9, n=2, max_tokens=20, seed=7)
    wanted = [written(engine(kind, prefix_caching=False), [source], params)[0] for source in batch]
    assert written(engine(kind, budget=16), batch, params) == wanted
    scarce = engine(kind, blocks=11)
    assert written(scarce, batch, params) == wanted
    assert scarce.scheduler.preemptions > 0
    assert scarce.blocks.used == 0


@pytest.mark.parametrize("kind", ["marian", "t5-gated"])
def test_beams_share_a_source_and_equal_those_alone(kind: str) -> None:
    def searched(running: Engine, *beside: list[int]) -> list[tuple[list[int], float]]:
        request = add_beam(running, source, BeamSearchParams(beam_width=4, n=4, max_tokens=10))
        for other in beside:
            running.add(other, GREEDY)
        shared = 0
        while running.busy:
            running.step()
            tables = {tuple(seq.kv.tables[1]) for seq in request.seqs}
            assert len(tables) <= 1, "hypotheses have blocks of a source of their own"
            shared = max(shared, *(running.blocks.pool.refs[block] for block in next(iter(tables), ())), 0)
            running.check()
        assert shared == 4
        return [(seq.output, score) for seq, score in request.strategy.results(request)]

    source, *others = sources()
    assert searched(engine(kind)) == searched(engine(kind), *others)


def test_equal_sources_are_encoded_once_and_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    encode = NativeEncoder._encode

    def counted(encoder: NativeEncoder, group: list[Any]) -> None:
        counts.append(len(group))
        encode(encoder, group)

    monkeypatch.setattr(NativeEncoder, "_encode", counted)
    running, (first, *others) = engine("marian"), sources(4, longest=16)
    written(running, [first, first, *others])
    assert counts == [4]
    assert running.add(first, GREEDY).finished == []
    finish(running)
    assert counts == [4]


def test_forks_with_stale_blocks_of_the_source_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    source, params = sources()[2], SamplingParams(temperature=0.9, n=3, max_tokens=10, seed=7)
    (right,) = written(engine("t5-gated"), [source], params)
    fork = NativeLive.fork

    def stale(live: NativeLive) -> NativeLive:
        made = fork(live)
        made.set_table(1, 0, list(range(63, 63 - len(made.source_table), -1)))
        return made

    monkeypatch.setattr(NativeLive, "fork", stale)
    (wrong,) = written(engine("t5-gated"), [source], params)
    assert wrong[0] == right[0]
    assert wrong[1:] != right[1:]
