"""An engine process whose steps fail while there is a file `fail` in the folder FAULTS, and that loads no model while there is
one called `hold`. Started in place of `headrace.server.engines.engine_process`."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from headrace.data.plan import StepOutput, StepPlan
from headrace.llm import LLM
from headrace.server.engines import engine_process
from headrace.server.engines.messages import Load

FAULTS = "HEADRACE_TEST_FAULTS"
load = engine_process.load


def failing(message: Load, channel: engine_process.Channel) -> LLM | None:
    folder = Path(os.environ[FAULTS])
    while (folder / "hold").exists():
        time.sleep(0.01)
    llm = load(message, channel)
    assert llm is not None
    runner: Any = llm.engine.executor.runner  # type: ignore[attr-defined]
    execute = runner.execute

    def fail(plan: StepPlan) -> StepOutput:
        if (folder / "fail").exists():
            raise RuntimeError("the device is gone")
        output: StepOutput = execute(plan)
        return output

    runner.execute = fail
    return llm


if __name__ == "__main__":
    engine_process.load = failing
    sys.exit(engine_process.main(*map(int, sys.argv[1:])))
