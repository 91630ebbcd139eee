"""Window tables in the loop, under random load: the fake model reads the last tokens of a context from the window pool."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.fake_model import EMPTY, VOCAB, Deferred, FakeRunner
from headrace.data.config import EngineConfig
from headrace.data.plan import WINDOWS, StepOutput, StepPlan, pairs_of
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from tests.property.drafters import Guessing
from tests.property.test_engine import EOS, assert_reference, run

SEEDS = range(16)
NODES = 8  # of the drafts here


class WindowRunner(FakeRunner):
    """A fake model with a pool of window layers. The first row of a feed sees `window` tokens, its own included, and reads
    that part of the context from the window table."""

    def __init__(self, num_blocks: int, block_size: int, window: int, blocks: int) -> None:
        super().__init__(num_blocks, block_size)
        self.window = window
        self.windows = [EMPTY] * (blocks * block_size)

    def rearrange(self, plan: StepPlan) -> None:
        size = self.block_size
        for number, pool in enumerate((self.pool, self.windows)):
            for to, token in [(to, pool[source]) for source, to in pairs_of(plan.moves, number)]:
                pool[to] = token
            for source, to in reversed(pairs_of(plan.copies, number)):
                pool[to * size : (to + 1) * size] = pool[source * size : (source + 1) * size]

    def execute(self, plan: StepPlan) -> StepOutput:
        self.starts = {feed.slot: feed.start for feed in plan.feeds}
        return super().execute(plan)

    def _place(self, slot: int, position: int) -> int:
        block, offset = divmod(position, self.block_size)
        held = self.slots[slot].window_table[block]
        assert held >= 0, "a row reads a block that was given up"
        return held * self.block_size + offset

    def _write(self, slot: int, position: int, token: int) -> None:
        super()._write(slot, position, token)
        self.windows[self._place(slot, position)] = token

    def _known(self, slot: int, count: int) -> list[int]:
        tokens = super()._known(slot, count)
        for position in range(max(0, self.starts[slot] - self.window + 1), count):
            tokens[position] = self.windows[self._place(slot, position)]
        return tokens


def windowed(config: EngineConfig, depth: int, speculation: Speculation | None) -> Engine:
    """An engine on a fake model with a window of a few tokens, and a pool that just fits a request with four outputs."""
    limits, cache = config.scheduler, config.cache
    window = random.Random(cache.num_blocks).choice([1, 3, 9, 30])
    blocks = 4 * (-(-(window + NODES) // cache.block_size) + 2) + -(-limits.max_num_batched_tokens // cache.block_size)
    cache = replace(cache, window=window, window_blocks=min(blocks, cache.num_blocks))
    runner = WindowRunner(cache.num_blocks, cache.block_size, window, cache.window_blocks)
    config = EngineConfig(limits, cache)
    return Engine(Deferred(runner, depth), config, vocab_size=VOCAB, eos_ids=frozenset({EOS}), speculation=speculation)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_every_output_equals_the_reference(seed: int, drafts: bool) -> None:
    def speculation() -> Speculation | None:
        return Speculation([Guessing(seed)], max_model_len=256, gamma=6) if drafts else None

    jobs, outputs, engine = run(seed, build=windowed, speculation=speculation)
    assert_reference(jobs, outputs)
    assert engine.blocks.used == 0


def test_blocks_are_given_up_and_prefixes_hit() -> None:
    given_up = hits = copies = preempted = 0
    for seed in SEEDS:

        def watch(engine: Engine) -> None:
            nonlocal given_up, hits, copies
            blocks, retire, match, grow = engine.blocks, engine.blocks._retire, engine.blocks._match_windows, engine.blocks.grow

            def retiring(table: list[int], end: int) -> None:
                nonlocal given_up
                before = table.count(-1)
                retire(table, end)
                given_up += table.count(-1) - before

            def matching(*args):  # type: ignore[no-untyped-def]
                nonlocal hits
                hits += (found := match(*args))
                return found

            def growing(*args):  # type: ignore[no-untyped-def]
                nonlocal copies
                made = grow(*args)
                copies += sum(table == WINDOWS for table, _, _ in made)
                return made

            blocks._retire, blocks._match_windows, blocks.grow = retiring, matching, growing  # type: ignore[method-assign]

        _, _, engine = run(seed, watch, check=False, build=windowed)
        preempted += engine.scheduler.preemptions
    assert min(given_up, hits, copies, preempted) > 5, (given_up, hits, copies, preempted)


def give_up_early(engine: Engine) -> None:
    """Blocks are given up one block too early."""
    retire = engine.blocks._retire
    engine.blocks._retire = lambda table, end: retire(table, min(end + 1, max(len(table) - 1, 0)))  # type: ignore[method-assign]


def hit_without_window(engine: Engine) -> None:
    """A prefix hit needs no window before its end."""
    blocks, match = engine.blocks, engine.blocks._match_windows

    def matching(seq, pool, count):  # type: ignore[no-untyped-def]
        if (found := match(seq, pool, count)) < count:
            seq.kv.tables[WINDOWS] += [0] * (count - found)
            for _ in range(count - found):
                pool.share(0)
        return count

    blocks._match_windows = matching  # type: ignore[method-assign]


def no_copies(engine: Engine) -> None:
    """Blocks of window layers are not copied when one of their holders writes."""
    execute = engine.executor.runner.rearrange  # type: ignore[attr-defined]

    def rearrange(plan: StepPlan) -> None:
        plan.copies = [copy for copy in plan.copies if copy[0] != WINDOWS]
        execute(plan)

    engine.executor.runner.rearrange = rearrange  # type: ignore[attr-defined]


@pytest.mark.parametrize("control", [give_up_early, hit_without_window, no_copies])
def test_controls(control: Callable[[Engine], None]) -> None:
    def broken(seed: int) -> bool:
        try:
            jobs, outputs, _ = run(seed, control, check=False, build=windowed)
            assert_reference(jobs, outputs)
        except (AssertionError, IndexError):
            return True
        return False

    assert any(broken(seed) for seed in SEEDS)
