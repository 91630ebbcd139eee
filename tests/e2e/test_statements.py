"""Statements of the seed documents about batching, made precise (docs/en/understand/seeds.md)."""

import torch

from benchmarks.fake_model import VOCAB, Deferred, FakeRunner, reference
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.plan import StepPlan
from headrace.engine.engine import Engine
from headrace.kv.pool import KVPool
from headrace.ops.context import FeedRows, build
from tests.tiny import tiny_config, tiny_model


def make_engine(
    policy: str = "continuous", seqs: int = 4, budget: int = 32, blocks: int = 64, block_size: int = 4
) -> tuple[Engine, list[StepPlan]]:
    """An engine over the fake model, and the plans it submits."""
    scheduler = SchedulerConfig(seqs, budget, 256, policy)
    executor = Deferred(FakeRunner(blocks, block_size), 1)
    engine = Engine(executor, EngineConfig(scheduler, CacheConfig(blocks, block_size)), vocab_size=VOCAB)
    plans: list[StepPlan] = []
    submit = executor.submit

    def keeping(plan: StepPlan) -> object:
        plans.append(plan)
        return submit(plan)

    executor.submit = keeping  # type: ignore[method-assign, assignment]
    return engine, plans


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)


def deliveries(engine: Engine) -> dict[str, int]:
    """Run to the end: the step at which each request was delivered whole."""
    done = {}
    step = 0
    while engine.busy:
        for delta in engine.step():
            if delta.finished:
                done[delta.request_id] = step
        step += 1
    return done


def test_w4_a_finished_sequence_is_returned_at_once() -> None:
    engine, _ = make_engine()
    engine.add([1, 2], params(1), request_id="a")
    engine.add([3, 4], params(100), request_id="b")
    done = deliveries(engine)
    assert done["a"] == 0
    assert done["b"] == 99


def test_w4_static_batching_holds_it_back() -> None:
    engine, _ = make_engine("static")
    engine.add([1, 2], params(1), request_id="a")
    engine.add([3, 4], params(100), request_id="b")
    done = deliveries(engine)
    assert done["a"] == done["b"] == 99


def test_c1_static_wastes_the_steps_of_the_longest() -> None:
    """Card C1: lengths 10, 1, 1, 1 in batches of two: 11 steps static, 10 continuous."""
    steps = {}
    for policy in ("static", "continuous"):
        engine, plans = make_engine(policy, seqs=2)
        for length in (10, 1, 1, 1):
            engine.add([length, 7], params(length))
        deliveries(engine)
        steps[policy] = len(plans)
    assert steps == {"static": 11, "continuous": 10}


def test_s0_slots_are_at_different_tokens_of_their_answers() -> None:
    """Continuous batching as S0 pictures it: position 0 at its 10th token, position 1 at its first, position 3 at its last."""
    engine, _ = make_engine()
    drawn: dict[str, int] = {}
    engine.add([1], params(20), request_id="slot 0")
    engine.add([2], params(15), request_id="slot 2")
    for step in range(10):
        if step == 5:
            engine.add([3], params(5), request_id="slot 3")
        if step == 9:
            engine.add([4], params(8), request_id="slot 1")
        deltas = engine.step()
        for delta in deltas:
            drawn[delta.request_id] = drawn.get(delta.request_id, 0) + len(delta.token_ids)
    assert drawn == {"slot 0": 10, "slot 1": 1, "slot 2": 10, "slot 3": 5}
    assert {delta.request_id: delta.finished for delta in deltas}["slot 3"]
    assert not {delta.request_id: delta.finished for delta in deltas}["slot 0"]


def test_w56_a_shared_prefix_is_stored_once() -> None:
    engine, _ = make_engine(seqs=8, budget=256)
    prefix = list(range(40))
    for tail in range(4):
        engine.add([*prefix, 50 + tail], params(4))
    for _ in range(3):
        engine.step()
    # 40 tokens are ten shared blocks; each request has one block of its own.
    assert engine.blocks.used == 10 + 4
    engine.check()


def test_w56_parallel_outputs_share_their_prompt() -> None:
    engine, _ = make_engine(seqs=8, budget=256)
    engine.add(list(range(42)), SamplingParams(n=4, max_tokens=6, seed=0, ignore_eos=True))
    engine.step()
    assert engine.blocks.used == 11  # the prompt, whole and once
    engine.step()
    assert engine.blocks.used == 10 + 4  # the half-full last block is copied on the first write


def test_w57_one_step_mixes_prefill_chunks_and_decodes() -> None:
    engine, plans = make_engine(budget=16)
    first = engine.add([1, 2, 3], params(30))
    engine.step()
    second = engine.add(list(range(40)), params(5))
    while engine.busy:
        engine.step()
    mixed = [[feed.count for feed in plan.feeds] for plan in plans if len(plan.feeds) == 2]
    assert mixed[:3] == [[1, 15], [1, 15], [1, 10]]
    for request in (first, second):
        most = request.params.max_tokens or 0
        assert request.finished[0].output == reference(request.prompt, 0, 0, most, frozenset())


def test_a_long_prompt_does_not_stop_the_decodes() -> None:
    """Card C3: every step of a running decode goes on while a long prompt comes in chunk by chunk."""
    engine, plans = make_engine(budget=16)
    runner = engine.add([1, 2, 3], params(40), request_id="decode")
    engine.step()
    engine.add(list(range(60)) * 3, params(2))
    for _ in range(12):
        engine.step()
    assert len(runner.seqs[0].output) == 13
    assert all(plan.num_tokens <= 16 for plan in plans)


def test_priorities_then_arrival() -> None:
    engine, _ = make_engine(seqs=1)
    engine.add([1], params(3), request_id="first")
    engine.step()
    engine.add([2], params(3).replace(priority=5), request_id="later")
    engine.add([3], params(3), request_id="second")
    engine.add([4], params(3).replace(priority=-1), request_id="urgent")
    done = deliveries(engine)
    assert sorted(done, key=lambda name: done[name]) == ["first", "urgent", "second", "later"]


def read_positions(table: list[int], context: int) -> set[int]:
    """Flat pool positions whose V decides the attention of the token after `context` others: each is disturbed in turn."""
    config = tiny_config(num_layers=1)
    model = tiny_model(config)

    def output(disturbed: int | None) -> torch.Tensor:
        pool = KVPool(config, 8, 4, torch.float64)
        model(build(pool, [FeedRows(list(range(context)), table)]))
        if disturbed is not None:
            pool.kv(0)[1].flatten(0, 1)[disturbed] += 1.0
        return model(build(pool, [FeedRows([50], table, start=context)]))

    plain = output(None)
    return {at for at in range(32) if not torch.equal(output(at), plain)}


def test_w5_paging_saves_memory_not_reads() -> None:
    """Attention reads the K/V of every token, paged or not; what paging bounds is the waste: B - 1 slots a sequence."""
    for table in ([0, 1, 2], [6, 1, 4]):
        in_context = {table[at // 4] * 4 + at % 4 for at in range(10)}
        assert read_positions(table, 10) == in_context
    engine, _ = make_engine(seqs=4, budget=64)
    for prompt in (1, 7, 18, 30):
        engine.add(list(range(prompt)), params(12))
    while engine.busy:
        engine.step()
        for request in engine.scheduler.running:
            for seq in request.seqs:
                held = len(seq.kv.tables[0]) * engine.blocks.block_size
                assert held - min(seq.kv.computed) <= engine.blocks.block_size - 1
