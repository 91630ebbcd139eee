"""Window blocks that hold NaN in the processes of ranks and stages: `python -m tests.parallel.poisoned_process FD...` runs a
stage (one descriptor) or a follower (two), in place of its own module.

The last two blocks of each process's window pool belong to no sequence: one is full of large numbers, one of NaN. The engine
copies them with its plans, which all processes carry out (`poison_plans`).
"""

import os
import sys
from typing import Any

import numpy as np

from headrace.data.plan import WINDOWS, StepPlan
from headrace.data.types import Sequence
from headrace.engine.engine import Engine
from headrace.parallel.pipeline import stage
from headrace.parallel.ranks import follower, lead

MODULE = "tests.parallel.poisoned_process"
NAN_IN = "HEADRACE_TEST_NAN_IN"  # environment variable: the process that has NaN, "RANK FIRST_LAYER"; all, if missing
LARGE, NAN = 0x42, 0xFF  # bytes: 48 in bfloat16 and float32; NaN in each format, or in its scales


def fill_sources(program: Any, rank: int, first_layer: int) -> None:
    """Fill the last two blocks of a process's window pool."""
    pool = program.windows
    if pool is not None:
        here = os.environ.get(NAN_IN, f"{rank} {first_layer}") == f"{rank} {first_layer}"
        for block, byte in ((pool.num_blocks - 2, LARGE), (pool.num_blocks - 1, NAN if here else LARGE)):
            pool.write_blocks([block], np.full(pool.bytes // pool.num_blocks, byte, np.uint8))


def poison_plans(engine: Engine, seen: bool = False) -> list[int]:
    """Copy large numbers into blocks that get a holder, and NaN into freed blocks, a step after they were given up.

    seen: also copy NaN into blocks that sequences hold and their next rows read. Returns the freed blocks of each step so far.
    """
    pool, executor = engine.blocks.windows, engine.executor
    assert pool is not None, "the model has no window"
    take, retire, submit = pool.take, pool._retire, executor.submit
    large, nan = pool.num_blocks - 2, pool.num_blocks - 1
    for block in (large, nan):
        pool._free.remove(block)
    pool.num_blocks -= 2
    taken: list[int] = []
    freed: list[int] = []  # since the last plan
    rested: list[int] = []  # before it
    copied: list[int] = []

    def taking() -> int:
        taken.append(block := take())
        for blocks in (freed, rested):
            if block in blocks:
                blocks.remove(block)
        return block

    def retiring(block: int) -> None:
        retire(block)
        if block in pool._free:
            freed.append(block)

    def submitted(plan: StepPlan) -> Any:
        written = {to for table, _, to in plan.copies if table == WINDOWS}
        plan.copies += [(WINDOWS, large, block) for block in taken if block not in written]
        plan.copies += [(WINDOWS, nan, block) for block in rested]
        copied.append(len(rested))
        if seen:
            plan.copies += [(WINDOWS, nan, block) for seq in engine.scheduler.held for block in seen_blocks(engine, seq)]
        rested[:], freed[:], taken[:] = freed, [], []
        return submit(plan)

    pool.take, pool._retire = taking, retiring  # type: ignore[method-assign]
    executor.submit = submitted  # type: ignore[method-assign]
    return copied


def seen_blocks(engine: Engine, seq: Sequence) -> list[int]:
    """The window block of a token that is computed and eight tokens before the next row."""
    table, index = seq.kv.tables[WINDOWS], (seq.kv.computed[0] - 8) // engine.blocks.block_size
    return [table[index]] if 0 <= index < len(table) and table[index] >= 0 else []


def load_target(*given: Any, **named: Any) -> Any:
    """Load a process's share of a model, and fill its sources."""
    program, group, layers = load(*given, **named), given[3], named["layers"]
    fill_sources(program, 0 if group is None else group.share.rank, 0 if layers is None else layers.start)
    return program


if __name__ == "__main__":
    load = stage.load_target
    stage.load_target = follower.load_target = load_target
    lead.MODULE = MODULE  # the followers of a stage
    descriptors = list(map(int, sys.argv[1:]))
    sys.exit(stage.main() if len(descriptors) == 1 else follower.main(*descriptors))
