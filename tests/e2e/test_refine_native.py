"""Blocks filled in on the native core: as the reference in its own arithmetic, and to the bit as known tokens in the pool."""

from collections.abc import Iterator

import numpy as np
import pytest

from headrace import core
from headrace.data.params import RefineParams, SamplingParams
from headrace.data.types import Request
from headrace.engine.engine import Engine
from headrace.models.base import Model
from tests.e2e.test_refine import MASK, TOKENS, FromTheOpenPass, outputs, params_of, prompts, with_masks
from tests.native_reference import bfloat16_attention, reference_of
from tests.refine_reference import dense, paged, refined

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

from tests.e2e import test_refine_sources as from_sources
from tests.e2e.test_sources_native import ROUNDED, Reader, apart, engine, held, program
from tests.tiny_native import BLOCK, Feeder, native_engine, native_model, native_program, packed

ONE = RefineParams(block=6, passes=3)


@pytest.fixture(scope="module")
def model() -> Model:
    return native_model("llama")


@pytest.fixture
def reference(model: Model, monkeypatch: pytest.MonkeyPatch) -> Iterator[Model]:
    with bfloat16_attention(monkeypatch):
        yield reference_of(model, packed(model))


@pytest.mark.parametrize("budget", [64, 9])
def test_it_equals_the_reference(model: Model, reference: Model, budget: int) -> None:
    each = [ONE, RefineParams(block=1, passes=1), RefineParams(block=8, passes=2, remask="masked")]
    jobs = [(prompt, params_of(one)) for prompt, one in zip(prompts(5, 9, 20), each, strict=True)]
    expected = [refined(paged(reference), prompt, one, MASK, TOKENS) for (prompt, _), one in zip(jobs, each, strict=True)]
    engine = with_masks(native_engine(model, budget=budget))
    assert outputs(engine, jobs) == expected
    assert outputs(engine, jobs) == expected  # from the prefix cache


def stored_kv(engine: Engine, request: Request, tokens: int) -> list[np.ndarray]:
    """K and V of a request's first tokens in each layer, as the pool has them."""
    program = engine.executor.runner.programs[0]  # type: ignore[attr-defined]
    (table,) = request.seqs[0].kv.tables
    places = np.array([table[at // BLOCK] * BLOCK + at % BLOCK for at in range(tokens)], np.int32)
    layer = program.config.layers[0]
    found = []
    for number in range(program.config.num_layers):
        k, v = (np.zeros((tokens, layer.kv_heads, layer.head_dim), np.float32) for _ in "kv")
        program.kv.read(number, places, k, v)
        found += [k, v]
    return found


def after_two_blocks(model: Model, prompt: list[int], right: bool) -> tuple[list[int], list[np.ndarray]]:
    """The tokens then, and what the pool has of them."""
    engine = with_masks(native_engine(model))
    strategy = None if right else FromTheOpenPass(ONE, MASK, 256)
    request = engine.add(prompt, SamplingParams(refine=ONE, max_tokens=40), strategy=strategy)
    while len(request.seqs[0].output) < 12:
        engine.step()
    (seq,) = request.seqs
    assert seq.kv.computed[0] == len(seq.tokens)
    return list(seq.tokens), stored_kv(engine, request, len(seq.tokens))


def test_the_pool_equals_that_of_a_fresh_prefill(model: Model) -> None:
    """Bit for bit; the control has not."""
    (prompt,) = prompts(11)
    for right in (True, False):
        tokens, found = after_two_blocks(model, prompt, right)
        engine = native_engine(model)
        request = engine.add(tokens, SamplingParams(temperature=0.0, max_tokens=2))
        engine.step()
        fresh = stored_kv(engine, request, len(tokens))
        assert all(np.array_equal(a, b) for a, b in zip(found, fresh, strict=True)) == right


def test_other_requests_change_no_bit_of_a_block(model: Model) -> None:
    """Logits of an open block alone, and between others; a causal one has others."""
    one, two, three = prompts(5, 20, 9)
    block, chain = [MASK] * 6, list(range(-1, 5))
    feeder = Feeder(native_program(model), [one, two, three])
    feeder.whole()
    (alone,) = feeder.feed((1, 20, 0), nodes=block, parents=chain, full=True)
    *_, among = feeder.feed((0, 4, 1), (2, 0, 9), (1, 20, 0), nodes=block, parents=chain, full=True)
    assert np.array_equal(alone, among)
    (causal,) = feeder.feed((1, 20, 0), nodes=block, parents=chain)
    assert not np.array_equal(alone, causal)


@pytest.mark.parametrize("count", [3, 48])
def test_windows_are_as_in_torch(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An open block that is longer than the window of the layers that slide, in one tile and in several."""
    model = native_model("gemma3_text", slides=(True, True))
    (prompt,) = prompts(30)
    block = prompts(count)[0]
    with bfloat16_attention(monkeypatch):
        expected = paged(reference_of(model, packed(model)))(prompt, block)
    feeder = Feeder(native_program(model), [prompt])
    feeder.whole()
    chain = list(range(-1, count - 1))
    (found,) = feeder.feed((0, 30, 0), nodes=block, parents=chain, full=True)
    assert np.abs(found - expected.numpy()).max() < 0.05 * np.abs(expected.numpy()).max()
    (causal,) = feeder.feed((0, 30, 0), nodes=block, parents=chain)
    assert np.abs(causal - expected.numpy()).max() > 0.05 * np.abs(expected.numpy()).max()


# -- from a source -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", from_sources.KINDS)
def test_an_open_block_reads_its_source(kind: str) -> None:
    """In the core's own arithmetic; a causal block's logits are others."""
    (source, *_), known, block = from_sources.sources(), [5, 9, 11], [MASK] * 6
    exact = reference_of(held(kind)[0], program(kind).weights)
    expected = dense(exact, source)(known, block).numpy()
    off = []
    for full in (True, False):
        reader = Reader(program(kind, kv_dtype="float32"), [(source, known)])
        (rows,) = reader.feed((0, 0, len(known)), nodes=block, parents=list(range(-1, 5)), full=full)
        off.append(float(apart([rows[len(known) :]], [expected], exact.config.never)[0].max()))
    assert off[0] < ROUNDED < off[1]


@pytest.mark.parametrize("kind", from_sources.KINDS)
def test_other_requests_change_no_block_of_a_source(kind: str) -> None:
    """Nor chunks, nor requests that drive each other out."""
    jobs = from_sources.jobs()
    alone = [outputs(with_masks(engine(kind)), [job])[0] for job in jobs]
    assert len({tuple(each) for each in alone}) == len(alone)
    for running in (engine(kind), engine(kind, budget=9), engine(kind, blocks=6)):
        assert outputs(with_masks(running), jobs) == alone
