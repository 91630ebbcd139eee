"""An executor with a pipeline of stages: the last stage runs in this process, the others in processes of their own.

`submit` sends the plan to all stages; `result` waits for the rows of the stage before the last and runs the last one. So stages
work on later steps while this process works on an earlier one, without a thread.

Source: Huang et al., "GPipe", arXiv 1811.06965 (micro-batches through stages; inference has the forward half alone).
"""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec

from headrace.data.plan import RankLostError, StepOutput, StepPlan
from headrace.engine.executor import Done, PlanRunner, Ticket
from headrace.parallel.pipeline.cut import Stage
from headrace.parallel.pipeline.link import Closed, RowSlots, StageLoaded, Start, receive, send, without_wants
from headrace.parallel.pipeline.relay import RelayStart
from headrace.parallel.pipeline.stage import Received
from headrace.parallel.processes import ending, start_module

MODULE, RELAY = "headrace.parallel.pipeline.stage", "headrace.parallel.pipeline.relay"
LOADING = 600.0  # seconds until a stage must have loaded its layers
STUCK_AFTER = 120.0  # seconds without an answer after which a stage counts as lost
ENDED, SILENT = "ended (exit code 0)", "does not answer"
PATIENCE = 5.0  # seconds until a process that should end is killed


class StageHost(NamedTuple):
    """Where a stage runs if not here. files: digest of the model's files."""

    address: str
    key_file: str
    files: str


class StageProcess:
    """A running process of a stage and the socket to it. module: to run; a relay for a stage on another host."""

    def __init__(self, stage: Stage, descriptors: list[int], module: str = MODULE) -> None:
        self.stage = stage
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = start_module(module, [theirs.fileno()], [theirs.fileno(), *descriptors])

    def send(self, message: Start | RelayStart | StepPlan) -> None:
        """Send a message. Raises RankLostError."""
        try:
            send(self._sock, message)
        except OSError:
            raise RankLostError(f"{self.stage} {self.ending()}") from None

    def wait_until_loaded(self, stuck_after: float) -> StageLoaded:
        """Wait for the stage's layers. stuck_after: seconds after which a later message counts as lost.

        Raises ValueError with the stage's error.
        """
        self._sock.settimeout(LOADING)
        try:
            loaded = receive(self._sock, StageLoaded)
        except (Closed, OSError):
            raise ValueError(f"{self.stage} {self.ending()} while it was loading") from None
        self._sock.settimeout(stuck_after)
        if loaded.error:
            raise ValueError(f"{self.stage} cannot be loaded: {loaded.error}")
        return loaded

    def ending(self) -> str:
        """How the process ended, as the end of a sentence."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        return SILENT if code is None else f"ended ({ending(code)})"

    def close(self, patience: float = PATIENCE) -> None:
        """Close the socket, on which the process ends. After `patience` seconds kill it and the ranks that it leads."""
        self._sock.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class StageTicket:
    """A submitted plan; `result` runs its last stage."""

    def __init__(self, executor: "PipelineExecutor", plan: StepPlan) -> None:
        self._executor = executor
        self._plan = plan

    def result(self) -> StepOutput:
        return self._executor.finish(self._plan)


class PipelineExecutor:
    """Carries out plans on the stages of a pipeline. Tickets are answered in the order of submission.

    runner: of the last stage, whose input rows are `received`. template: what the other stages load. width: the hidden size.
    hosts: of the other stages; empty if they run here. Raises ValueError.
    """

    def __init__(
        self,
        runner: PlanRunner,
        received: Received,
        stages: tuple[Stage, ...],
        template: Start,
        width: int,
        hosts: Sequence[StageHost] = (),
    ) -> None:
        self._hosts = hosts
        self.runner = runner
        self.depth = len(stages)
        self._received = received
        self._stages: list[StageProcess] = []
        self.loaded: list[StageLoaded] = []  # by stages in other processes
        self._ended = 0.0  # time at which the last step ended
        # By step, begin and end on each stage, in seconds of the monotonic clock; None: not recorded.
        self.trace: list[list[tuple[float, float]]] | None = None
        self._lost: RankLostError | None = None
        try:
            self._start(stages[:-1], template, width)
        except (RankLostError, OSError) as error:
            self.close()
            raise ValueError(f"the stages cannot be started: {error}") from None
        except BaseException:
            self.close()
            raise

    def _start(self, stages: tuple[Stage, ...], template: Start, width: int) -> None:
        """Start the processes, connect each with the next one, and load them."""
        with ExitStack() as closing:
            source, rows_in = -1, -1
            for stage in stages:
                ours, theirs = (closing.enter_context(end) for end in socket.socketpair())
                rows_out = RowSlots.create(template.depth, template.slot, width)
                closing.callback(os.close, rows_out)
                descriptors = [fd for fd in (source, rows_in, theirs.fileno(), rows_out) if fd >= 0]
                self._stages.append(StageProcess(stage, descriptors, RELAY if self._hosts else MODULE))
                layers = {"number": stage.number, "first": stage.layers.start, "last": stage.layers.stop}
                ends = {"source": source, "rows_in": rows_in, "out": theirs.fileno(), "rows_out": rows_out}
                start = msgspec.structs.replace(template, **layers, **ends)
                host = self._hosts[stage.number] if self._hosts else None
                self._stages[-1].send(start if host is None else RelayStart(*host, width, start))
                source, rows_in = ours.fileno(), rows_out
            slots = RowSlots(rows_in, template.depth, template.slot, width)
            self._received.connect(socket.socket(fileno=os.dup(source)), slots, STUCK_AFTER)
        self.loaded = [process.wait_until_loaded(STUCK_AFTER) for process in self._stages]

    def submit(self, plan: StepPlan) -> Ticket:
        if self._lost is not None:
            raise self._lost
        if plan.model:
            return Done(None, ValueError("a pipeline runs the target alone"))
        sent = without_wants(plan)
        try:
            for stage in self._stages:
                stage.send(sent)
        except RankLostError as error:
            raise self._lose(error) from None
        return StageTicket(self, plan)

    def finish(self, plan: StepPlan) -> StepOutput:
        """Run the last stage. Raises RankLostError, and what the step raised."""
        began = max(self._ended, time.monotonic())
        self._received.step = plan.step
        try:
            output = self.runner.execute(plan)
        except RankLostError as error:
            raise self._lose(error) from None
        except (Closed, OSError) as error:
            raise self._lose(RankLostError(self._reason(error))) from None
        self._ended = time.monotonic()
        output.seconds = self._ended - began
        if self.trace is not None and plan.feeds:
            earlier = self._received.times
            self.trace.append([*earlier, (max(began, earlier[-1][1]), self._ended)])
        return output

    def _lose(self, error: RankLostError) -> RankLostError:
        """End the other stages after a part of the model was lost. Returns the error to raise, now and for later steps."""
        self._lost = error
        self._end_stages(patience=0.0)
        return error

    def _reason(self, error: Exception) -> str:
        """Which stage is lost, for one line."""
        if isinstance(error, TimeoutError):
            return f"no rows for {STUCK_AFTER:.0f} s: a stage of the pipeline hangs"
        # The stages next to a lost one may still run, or end by themselves with exit code 0.
        endings = [(process.ending(), process.stage) for process in self._stages]
        ending, stage = next((one for one in endings if one[0] not in (ENDED, SILENT)), endings[-1])
        return f"{stage} {ending}"

    def reserve(self, group: str) -> None:
        self.runner.reserve(group)

    def kv_bytes(self) -> int:
        return self.runner.kv_bytes() + sum(loaded.kv_bytes for loaded in self.loaded)

    def close(self) -> None:
        self._end_stages()
        self.runner.close()

    def _end_stages(self, patience: float = PATIENCE) -> None:
        while self._stages:
            self._stages.pop().close(patience)
