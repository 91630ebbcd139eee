"""Ranks as threads of one process: programs that share a tiny model, and engines over them."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from headrace import core
from headrace.backends.native import program as native
from headrace.backends.native.program import NativeProgram
from headrace.data.config import CacheConfig, EngineConfig, SchedulerConfig
from headrace.data.plan import RankLostError
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.parallel.ranks.share import Share
from headrace.runner.runner import Runner
from headrace.weights.source import WeightSource
from tests.tiny_native import BLOCK, MAX_LEN, source_of

ROWS = 4096
TIMEOUT = 60.0  # seconds in which a rank must arrive


class Group:
    """A group of threads (`backends.protocol.RankGroup`)."""

    def __init__(self, share: Share, ranks: Any) -> None:
        self.share = share
        self.core = ranks

    def ready(self) -> None:
        pass

    def lost(self, error: Exception) -> RankLostError:
        return RankLostError(str(error))

    def close(self) -> None:
        self.core.end()


@pytest.fixture
def own_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program has a thread pool of its own: ranks of one process wait for each other inside a step."""
    monkeypatch.setattr(native, "thread_pool", lambda threads: core.module().ThreadPool(threads or 1))


Make = Callable[[Model, "Group | None"], NativeProgram]


def maker(source: WeightSource, **options: Any) -> Make:
    """Makes the program of a model, or of a rank's share of it."""
    settings: dict[str, Any] = {"num_blocks": 64, "block_size": BLOCK, "max_positions": MAX_LEN + 64, "threads": 1, **options}
    return lambda model, group: NativeProgram(model, source, group=group, **settings)


@contextmanager
def ranked(model: Model, world: int, **options: Any) -> Iterator[NativeProgram]:
    """The first rank's program of a model; the other ranks follow it in threads until the end of the block."""
    make = maker(options.pop("source", None) or source_of(model), **options)
    if world == 1:
        yield make(describe(model.config), None)
        return
    config = model.config
    region = core.module().Region(world, rows=ROWS, width=config.hidden_size, vocab=config.vocab_size)
    groups = [Group(Share(rank, world, config), core.module().Ranks(region, rank, TIMEOUT)) for rank in range(world)]
    programs = [make(describe(group.share.narrowed()), group) for group in groups]
    lost: list[Exception] = []

    def follow(rank: int) -> None:
        try:
            core.module().follow(groups[rank].core, [programs[rank].core])
        except core.module().RankLost as error:
            lost.append(error)

    followers = [threading.Thread(target=follow, args=(rank,)) for rank in range(1, world)]
    for follower in followers:
        follower.start()
    try:
        yield programs[0]
    finally:
        groups[0].core.end()
        for follower in followers:
            follower.join()
    assert lost == []


def engine_of(
    program: NativeProgram, *, budget: int = 64, speculation: Speculation | None = None, seqs: int = 16, blocks: int = 64
) -> Engine:
    scheduler = SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=MAX_LEN)
    config = EngineConfig(scheduler, CacheConfig(blocks, BLOCK))
    return Engine(InProcess(Runner(program)), config, vocab_size=program.config.vocab_size, speculation=speculation)
