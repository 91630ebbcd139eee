"""A pipeline stage whose free window blocks hold NaN: `python -m tests.parallel.poisoned_stage FD`, in place of the stage.

The engine's process writes, before each step, which blocks got a holder and which were given up (`announce`). A stage fills the
first with large numbers and the others with NaN, as `tests.e2e.test_windows.poison` does in one process.
"""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from headrace.data.plan import StepPlan
from headrace.engine.engine import Engine
from headrace.parallel.pipeline import stage

FOLDER = "HEADRACE_TEST_POISON"  # environment variable: where a file for each step is written


def announce(engine: Engine, folder: Path) -> None:
    """Write FOLDER/STEP.json before the engine submits a step."""
    pool, executor = engine.blocks.windows, engine.executor
    assert pool is not None, "the model has no window"
    take, retire, submit = pool.take, pool._retire, executor.submit
    changes: dict[str, list[int]] = {"taken": [], "freed": []}

    def taken() -> int:
        changes["taken"].append(block := take())
        if block in changes["freed"]:  # given up and taken again before this step
            changes["freed"].remove(block)
        return block

    def retired(block: int) -> None:
        retire(block)
        if block in pool._free:
            changes["freed"].append(block)

    def submitted(plan: StepPlan) -> Any:
        (folder / f"{plan.step}.json").write_text(json.dumps(changes))
        changes["taken"], changes["freed"] = [], []
        return submit(plan)

    pool.take, pool._retire = taken, retired  # type: ignore[method-assign]
    executor.submit = submitted  # type: ignore[method-assign]


class PoisonedRunner(stage.StageRunner):
    """Fills blocks around the moves and copies of each plan: new blocks before them, freed blocks after them."""

    def execute(self, plan: StepPlan) -> np.ndarray | None:
        if self.program.windows is not None:
            changes = json.loads((Path(os.environ[FOLDER]) / f"{plan.step}.json").read_text())
            rearrange = type(self.program).rearrange

            def filled(plan: StepPlan) -> None:
                self._fill(changes["taken"], 0x42)
                rearrange(self.program, plan)
                self._fill(changes["freed"], 0xFF)

            self.program.rearrange = filled  # type: ignore[method-assign]
        return super().execute(plan)

    def _fill(self, blocks: list[int], byte: int) -> None:
        pool = self.program.windows
        size = pool.bytes // pool.num_blocks
        for block in blocks:
            pool.write_blocks([block], np.full(size, byte, np.uint8))


if __name__ == "__main__":
    stage.StageRunner = PoisonedRunner  # type: ignore[misc]
    stage.main()
