"""Where plans are carried out: the `Executor` protocol, and `InProcess`, which runs them in the caller's thread."""

import time
from typing import Protocol

from headrace.data.plan import StepOutput, StepPlan


class Ticket(Protocol):
    """A submitted plan."""

    def result(self) -> StepOutput:
        """The step's output, once it is there. Raises what the step raised."""


class Executor(Protocol):
    """Carries out plans in the order they are submitted. depth: plans that may be under way at once."""

    depth: int

    def submit(self, plan: StepPlan) -> Ticket: ...

    def reserve(self, group: str) -> None:
        """Allocate a KV group of hidden rows, before the first row. Raises ValueError if it does not fit."""

    def kv_bytes(self) -> int:
        """Bytes of the paged pools on the device."""

    def close(self) -> None: ...


class PlanRunner(Protocol):
    """Carries out plans one at a time: `runner.runner.Runner`."""

    def execute(self, plan: StepPlan) -> StepOutput: ...

    def reserve(self, group: str) -> None: ...

    def kv_bytes(self) -> int: ...

    def close(self) -> None: ...


class Done:
    """The ticket of a finished step."""

    def __init__(self, output: StepOutput | None, error: Exception | None) -> None:
        self._output = output
        self._error = error

    def result(self) -> StepOutput:
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output


class InProcess:
    """Runs each plan at once in the calling thread (CPU, depth 1). It measures the step's seconds."""

    depth = 1

    def __init__(self, runner: PlanRunner) -> None:
        self.runner = runner

    def submit(self, plan: StepPlan) -> Ticket:
        began = time.perf_counter()
        try:
            output = self.runner.execute(plan)
            output.seconds = time.perf_counter() - began
            return Done(output, None)
        except Exception as error:
            # `Done.result` raises it.
            return Done(None, error)

    def reserve(self, group: str) -> None:
        self.runner.reserve(group)

    def kv_bytes(self) -> int:
        return self.runner.kv_bytes()

    def close(self) -> None:
        self.runner.close()
