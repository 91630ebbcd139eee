"""The process of a pipeline stage: it runs its layers on the rows of the stage before, and passes the rows on.

The engine's process starts `python -m headrace.parallel.pipeline.stage FD` with one end of a socket pair. The process ends when
the socket closes.
"""

import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.backends.native.offer import load_target
from headrace.backends.native.program import NativeProgram
from headrace.backends.protocol import RankGroup
from headrace.data.plan import Feed, RankLostError, StepPlan
from headrace.models.configs import read_config
from headrace.parallel.pipeline.link import Closed, Ready, RowSlots, StageLoaded, Start, receive, send
from headrace.parallel.ranks.follower import LoadShare
from headrace.parallel.ranks.lead import Lead
from headrace.runner.runner import Slots
from headrace.runner.span import WHOLE
from headrace.weights.schemes.folder import open_weights


class Received:
    """Input rows of a stage: the hidden rows of the stage before. Implements InputRows.

    step: number of the step that runs now. times: begin and end of this step on the stages before.
    """

    chains = False

    def __init__(self) -> None:
        self.step = -1
        self.times: list[tuple[float, float]] = []
        self._socket: socket.socket | None = None
        self._slots: RowSlots | None = None

    def connect(self, sock: socket.socket, slots: RowSlots, stuck_after: float | None = None) -> None:
        """Read from a stage. stuck_after: seconds until `rows` raises TimeoutError."""
        self._socket, self._slots = sock, slots
        sock.settimeout(stuck_after)

    def rows(self, *_: object) -> np.ndarray:
        """The rows [n, hidden] of the current step, as soon as the stage before has ended it.

        Raises StageError with its error, RankLostError if it has lost a rank, Closed if it is gone, OSError.
        """
        assert self._socket is not None
        assert self._slots is not None
        ready = receive(self._socket, Ready)
        while ready.step < self.step:  # of a step that failed here before it came to its rows
            ready = receive(self._socket, Ready)
        if ready.error:
            raise (RankLostError if ready.lost else StageError)(ready.error)
        self.times = ready.times
        return self._slots.of(ready.step, ready.rows)

    def at_exit(self, exit: int, hidden: Any) -> Any:
        raise NotImplementedError("a pipeline has no exits")

    def confidence(self, exit: int, row: np.ndarray) -> float:
        raise NotImplementedError("a pipeline has no exits")

    def store_tips(self, feeds: Sequence[Feed], hidden: Any) -> None:
        raise NotImplementedError("a stage of a pipeline runs no chains")


class StageError(RuntimeError):
    """A step failed in a stage before; its requests are retried."""


class StageRunner:
    """Carries out plans on the layers of a stage. source: rows of the stage before; None for the first stage."""

    def __init__(self, program: NativeProgram, source: Received | None) -> None:
        self.program = program
        self.source = source
        self.slots = Slots(program.live)
        self.began = 0.0  # when the last step began to compute

    @property
    def times(self) -> list[tuple[float, float]]:
        """Begin and end of the last step on the stages before."""
        return [] if self.source is None else self.source.times

    def execute(self, plan: StepPlan) -> np.ndarray | None:
        """Hidden rows [n, hidden] after the stage's layers; None for a plan without feeds. Slots and tables are as after the
        plan also if it raises."""
        self.slots.apply(plan)
        self.program.rearrange(plan)
        if not plan.feeds:
            return None
        rows = None
        if self.source is not None:
            self.source.step = plan.step
            rows = self.source.rows()
        self.began = time.monotonic()
        step = self.program.step()
        for feed in plan.feeds:
            step.feed(feed, self.slots[feed.slot])
        return self.program.run(step, WHOLE, rows, keep=True)


def load(start: Start) -> tuple[NativeProgram, Received | None]:
    """The stage's program, and its source. Raises ValueError, WeightError."""
    weights = open_weights(Path(start.model))
    config, source = read_config(weights, start.settings.rope), None
    group: RankGroup | None = None
    if start.source >= 0:
        source = Received()
        rows = RowSlots(start.rows_in, start.depth, start.slot, config.hidden_size)
        source.connect(socket.socket(fileno=start.source), rows)
    if start.tp > 1:
        layers, patience = (start.first, start.last), start.patience
        message = LoadShare(model=start.model, world=start.tp, settings=start.settings, patience=patience, layers=layers)
        group = Lead(message, config, start.slot, start.number, start.depth)
    program = load_target(config, weights, start.settings, group, inputs=source, layers=range(start.first, start.last))
    program.weights.pack()
    if group is not None:
        group.ready()
    return program, source


def serve(control: socket.socket) -> None:
    """Load a stage and carry out plans until the socket closes."""
    start = receive(control, Start)
    out = socket.socket(fileno=start.out)
    try:
        program, source = load(start)
    except Exception as error:
        send(control, StageLoaded(error=str(error)))
        return
    rows_out = RowSlots(start.rows_out, start.depth, start.slot, program.config.hidden_size)
    runner = StageRunner(program, source)
    send(control, StageLoaded(program.kv_bytes(), program.weights.bytes))
    while True:
        plan = receive(control, StepPlan)
        done = Ready(plan.step)
        try:
            hidden = runner.execute(plan)
            if hidden is not None:
                rows_out.of(plan.step, len(hidden))[:] = hidden
                done.rows, done.times = len(hidden), [*runner.times, (runner.began, time.monotonic())]
        except (Closed, OSError):
            return
        except Exception as error:
            # The engine's process raises it. If no rank is lost, the plan's requests are retried.
            done.error, done.lost = str(error), isinstance(error, RankLostError)
        if plan.feeds:
            send(out, done)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as control:
        try:
            serve(control)
        except (Closed, BrokenPipeError, ConnectionResetError):
            return


if __name__ == "__main__":
    main()
