"""Companions: their logits through the shared slots and block ids are those of the model run alone."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.backends.eager.program import EagerProgram
from headrace.data.params import SamplingParams
from headrace.data.plan import Feed, Logits, NewSlot, Sample, StepPlan, TableDelta, Top
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.contrast import contrast
from headrace.runner.runner import Runner
from headrace.runner.span import ATTENTION, MLP, Span
from tests.tiny import VOCAB, run_alone, tiny_config, tiny_model
from tests.tiny_native import native_alone, native_model, native_program
from tests.ulps import rounded_once, ulps

BLOCK, BLOCKS = 16, 24
LOGITS = (Logits(),)


def torch_pair() -> tuple[Runner, Model, Model]:
    target, draft = tiny_model(), tiny_model(tiny_config(num_layers=1, hidden_size=16), seed=1)
    runners = [EagerProgram(model, KVPool(model.config, BLOCKS, BLOCK, torch_dtype(model))) for model in (target, draft)]
    return Runner(runners[0], runners[1:]), target, draft


def native_pair() -> tuple[Runner, Model, Model]:
    target, draft = native_model(), native_model(num_layers=1, hidden_size=64, heads=8, kv_heads=4)
    runners = [native_program(model, blocks=BLOCKS) for model in (target, draft)]
    return Runner(runners[0], runners[1:]), target, draft


def torch_dtype(model: Model) -> Any:
    return next(model.parameters()).dtype


PAIRS = {"torch": torch_pair, "native": native_pair}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[Runner, Model, Model]:
    return PAIRS[request.param]()


class Life:
    """Sequences as a scheduler would run them: every change of slots, tables and pools goes through the target's plan."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.step = 0
        self.tables: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.next_block = 0

    def target(self, *feeds: Feed, **changes: Any) -> list[Any]:
        self.step += 1
        return self.runner.execute(StepPlan(self.step, feeds=list(feeds), **changes)).feeds

    def companion(self, *feeds: Feed) -> list[Any]:
        return self.runner.execute(StepPlan(self.step, model=1, feeds=list(feeds))).feeds

    def begin(self, slot: int, prompt: list[int], params: SamplingParams, room: int = 16) -> None:
        count = -(-(len(prompt) + room) // BLOCK)
        self.tables[slot] = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        self.tokens[slot] = list(prompt)
        new = NewSlot(slot=slot, seed=params.seed or 0, prompt_len=len(prompt), tokens=list(prompt), params=params)
        self.target(new=[new], tables=[TableDelta(slot, 0, 0, self.tables[slot])])

    def fork(self, source: int, slot: int, at: int) -> None:
        """A sibling that shares every block but the one position `at` lies in, which is copied."""
        self.tables[slot] = list(self.tables[source])
        self.tokens[slot] = list(self.tokens[source])
        copied, self.tables[slot][at // BLOCK] = self.tables[slot][at // BLOCK], self.next_block
        tables = [TableDelta(slot, 0, 0, self.tables[slot])]
        self.target(new=[NewSlot(slot=slot, source=source)], tables=tables, copies=[(0, copied, self.next_block)])
        self.next_block += 1

    def logits(self, slot: int, start: int) -> np.ndarray:
        """The companion's, of the last known token, with everything from `start` on fed."""
        (out,) = self.companion(Feed(slot, start, len(self.tokens[slot]) - start, wants=LOGITS))
        return np.frombuffer(out[0].row, "<f4")


def alone(model: Model, tokens: list[int], native: bool) -> np.ndarray:
    """The logits after `tokens` of the model run by itself, fed whole."""
    if native:
        program: Any = native_program(model, blocks=BLOCKS)
    else:
        program = EagerProgram(model, KVPool(model.config, BLOCKS, BLOCK, torch_dtype(model)))
    new = NewSlot(slot=0, prompt_len=len(tokens), tokens=list(tokens), params=SamplingParams())
    tables = [TableDelta(0, 0, 0, list(range(-(-len(tokens) // BLOCK))))]
    feed = Feed(0, 0, len(tokens), wants=LOGITS)
    return np.frombuffer(Runner(program).execute(StepPlan(0, new=[new], tables=tables, feeds=[feed])).feeds[0][0].row, "<f4")


def same(runner: Runner, model: Model) -> Callable[[np.ndarray, list[int]], None]:
    native = not isinstance(runner.programs[0], EagerProgram)

    def check(logits: np.ndarray, tokens: list[int]) -> None:
        expected = alone(model, tokens, native)
        if native:
            np.testing.assert_array_equal(logits, expected)
        else:
            assert rounded_once(logits.tolist(), expected.tolist())  # the model is float64

    return check


def some(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def test_a_draft_model_computes_the_logits_that_it_computes_alone(pair: tuple[Runner, Model, Model]) -> None:
    """Through chunks, a fork with copy-on-write, and tokens that only the target was fed at first."""
    runner, _, draft = pair
    life, check = Life(runner), same(runner, draft)
    life.begin(0, some(21, 1), SamplingParams())
    life.companion(Feed(0, 0, 9))
    life.companion(Feed(0, 9, 12))
    life.fork(0, 1, at=20)
    for slot, tail in ((0, some(3, 2)), (1, some(4, 3))):
        life.tokens[slot] += tail
        life.target(Feed(slot, 20, len(tail) + 1, new=tuple(tail)))
    check(life.logits(0, 21), life.tokens[0])
    check(life.logits(1, 21), life.tokens[1])
    check(life.logits(0, 21), life.tokens[0])


def test_moves_apply_to_the_pool_of_the_draft_model(pair: tuple[Runner, Model, Model]) -> None:
    """The second of two sibling nodes is accepted: its K and V move up, in all pools."""
    runner, target, _ = pair
    models = (runner.programs[1], runner.programs[0])
    swapped = Runner(models[0], [models[1]])  # the small model verifies, so the moves are about its K and V
    life = Life(swapped)
    prompt = some(18, 4)
    life.begin(0, prompt, SamplingParams())
    life.target(Feed(0, 0, 18, nodes=(5, 6), parents=(-1, -1)))
    life.companion(Feed(0, 0, 18, nodes=(5, 6), parents=(-1, -1)))
    at = life.tables[0][19 // BLOCK] * BLOCK + 19 % BLOCK
    to = life.tables[0][18 // BLOCK] * BLOCK + 18 % BLOCK
    life.tokens[0] += [6, 7]
    life.target(Feed(0, 19, 1, new=(6, 7)), moves=[(0, at, to)])
    same(runner, target)(life.logits(0, 19), life.tokens[0])


def test_a_chain_equals_the_draws_of_the_model_alone(pair: tuple[Runner, Model, Model]) -> None:
    """Noise, penalties and bans of a chain's tokens are those of an ordinary run, for two sequences in one step."""
    runner, _, draft = pair
    life = Life(runner)
    params = [
        SamplingParams(max_tokens=6, seed=3, temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5, ignore_eos=True),
        SamplingParams(max_tokens=6, temperature=0.0, no_repeat_ngram=2, ignore_eos=True),
    ]
    for slot, each in enumerate(params):
        life.begin(slot, some(14 + slot, 10 + slot), each)
    want = (Sample(),)
    known = [len(life.tokens[slot]) for slot in range(2)]
    chains: list[list[int]] = [[], []]
    outs = life.companion(*(Feed(slot, 0, known[slot], wants=want) for slot in range(2)))
    for k in range(6):
        for slot, out in enumerate(outs):
            chains[slot] += out[0].tokens
        feeds = [Feed(slot, known[slot] + k, 0, wants=want, nodes=tuple(chains[slot][-1:]), parents=(-1,)) for slot in range(2)]
        outs = life.companion(*feeds)
    native = not isinstance(runner.programs[0], EagerProgram)
    for slot, each in enumerate(params):
        run = native_alone if native else run_alone
        assert chains[slot] == run(draft, life.tokens[slot], each)
        assert len(life.runner.slots[slot]) == known[slot]  # nothing of a chain becomes known


def test_contrasted_rows_equal_those_of_both_models_alone(pair: tuple[Runner, Model, Model]) -> None:
    """Of the last known token and of draft nodes; a plain sequence in the same step keeps the expert's logits."""
    runner, target, draft = pair
    life = Life(Runner(runner.programs[0], runner.programs[1:], amateur=1))
    prompts = [some(19, 5), some(12, 6)]
    life.begin(0, prompts[0], SamplingParams(contrastive_beta=0.5, contrastive_alpha=0.2))
    life.begin(1, prompts[1], SamplingParams())
    life.target(Feed(0, 0, 7))
    outs = life.target(Feed(0, 7, 12, wants=LOGITS), Feed(1, 0, 12, wants=LOGITS))
    native = not isinstance(runner.programs[0], EagerProgram)
    rows = [alone(model, prompts[0], native) for model in (target, draft)]
    expected = contrast(*(torch.from_numpy(row.astype(np.float64))[None] for row in rows), 0.2, 0.5)[0].numpy()  # type: ignore[call-arg]
    assert 1 < np.isfinite(expected).sum() < VOCAB
    # Both rows and what is made of them are rounded to float32; (1 + 0.5) + 0.5 of the largest logit bounds it all.
    rounding = ulps(2 * np.abs(rows).max(), 3)
    np.testing.assert_allclose(np.frombuffer(outs[0][0].row, "<f4"), expected, rtol=0, atol=rounding)
    same(runner, target)(np.frombuffer(outs[1][0].row, "<f4"), prompts[1])


@pytest.mark.parametrize("part", [Span(layers=1), Span(skips=(0, ATTENTION | MLP)), Span(layers=2)])
def test_a_part_of_the_target_changes_no_kv(pair: tuple[Runner, Model, Model], part: Span) -> None:
    """A chain drafted by early layers, or with a layer left out, over the target's own K and V: the target's step writes what
    it would have written; and all layers draft what the target says."""
    target, model = pair[0].programs[0], pair[1]
    life = Life(Runner(target, [part]))
    params = SamplingParams(max_tokens=5, temperature=0.8, seed=4, ignore_eos=True)
    life.begin(0, some(17, 8), params)
    known = len(life.tokens[0])
    life.target(Feed(0, 0, known - 1))
    want = (Sample(),)
    chain = [*life.companion(Feed(0, known - 1, 1, wants=want))[0][0].tokens]
    for k in range(3):
        chain += life.companion(Feed(0, known + k, 0, wants=want, nodes=tuple(chain[-1:]), parents=(-1,)))[0][0].tokens
    native = not isinstance(target, EagerProgram)
    if part.layers == 2:
        assert chain == (native_alone if native else run_alone)(model, life.tokens[0], params)[:4]
    (out,) = life.target(Feed(0, known - 1, 1, wants=LOGITS, nodes=tuple(chain), parents=tuple(range(-1, 3))))
    same(life.runner, model)(np.frombuffer(out[0].row, "<f4"), life.tokens[0])
    life.tokens[0] += [*chain, 9]
    (out,) = life.target(Feed(0, known + 4, 1, new=(*chain, 9), wants=LOGITS))
    same(life.runner, model)(np.frombuffer(out[0].row, "<f4"), life.tokens[0])


@pytest.mark.parametrize("tied", [True, False])
def test_a_part_of_the_vocabulary_has_the_logits_of_the_whole(tied: bool) -> None:
    model = native_model(tied_head=tied, vocab_size=300)
    ids = np.array(sorted(random.Random(1).sample(range(300), 77)))
    prompt = random.Random(2).choices(range(300), k=20)
    rows = {}
    for name, head in (("whole", None), ("part", ids)):
        life = Life(Runner(native_program(model, blocks=BLOCKS, head_ids=head)))
        life.begin(0, prompt, SamplingParams())
        feed = Feed(0, 0, 20, wants=(*LOGITS, Top(5)))
        (out,) = life.target(feed)
        rows[name] = np.frombuffer(out[0].row, "<f4"), out[1].ids
    np.testing.assert_array_equal(rows["part"][0][ids], rows["whole"][0][ids])
    assert np.isneginf(np.delete(rows["part"][0], ids)).all()
    assert list(rows["part"][1]) == ids[np.argsort(-rows["whole"][0][ids], kind="stable")][:5].tolist()
