"""What becomes of an engine process, as a table: in a state an event leads to a state, an action, and what clients hear.

Nothing here knows processes, sockets or asyncio: `Replica` says what happens and does what comes of it.
"""

import enum
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.server.engines.inflight import RETRY_DOWN, EngineDownError, EngineLostError

log = logging.getLogger("headrace.server")

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before each new attempt to start, the more it ended of late
CALM = 120.0  # seconds that an engine has to be ready for, so that its next end is held to be the first
FAILURES = 8  # steps in a row that fail, after which the process is ended


class State(enum.StrEnum):
    """What the engine is doing. Only READY and DRAINING have a process that answers."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # finishes what it has, takes nothing new
    DEAD = "dead"  # the process ended; it is being started again
    STUCK = "stuck"  # the process gave no sign of life and was ended; it is being started again
    FAILING = "failing"  # its steps failed one after the other and it was ended; it is being started again
    CLOSED = "closed"


class Event(enum.StrEnum):
    """What happens to it."""

    BEGIN = "begin"  # the model is wanted
    LOADED = "loaded"  # the process says that it is ready
    REFUSED = "refused"  # it says that the model cannot be opened
    LATE = "late"  # it has said neither in time
    GONE = "gone"  # it ended, or talks nonsense
    SILENT = "silent"  # it gave no sign of life
    FAILED = "failed"  # so many of its steps failed in a row
    RESUME = "resume"  # the pause before the next attempt is over
    DRAIN = "drain"  # nothing new is to be taken
    CLOSE = "close"  # the model is not wanted any more


class Action(enum.StrEnum):
    """What is done about it."""

    NOTHING = "nothing"
    START = "start"  # start a process, and let it load the model
    RESTART = "restart"  # end the process whatever it does, pause, then RESUME
    KILL = "kill"  # end the process whatever it does, and start no other
    STOP = "stop"  # an orderly end of the process


@dataclass(frozen=True, slots=True)
class Transition:
    """`lost`: what clients hear of requests that are in flight (None: they go on). `says`: what those hear that come while
    the state lasts, a 503, and everybody at /health; `{why}` is what the event came with, `{before}` the detail before it. Why
    a model cannot be loaded again may name files, and goes to the log alone."""

    state: State
    action: Action
    lost: type[EngineDownError] | None
    says: str


S, E, A = State, Event, Action
DOWN = (S.DEAD, S.STUCK, S.FAILING)
ENDS = (E.REFUSED, E.LATE, E.GONE, E.SILENT, E.FAILED)
AGAIN = "{why}; it is being started again"
BYE = "the server is shutting down"
LOST, LATER = EngineLostError, EngineDownError

TABLE: dict[tuple[State, Event], Transition] = {
    (S.CLOSED, E.BEGIN): Transition(S.LOADING, A.START, None, "the model is being loaded"),
    (S.LOADING, E.LOADED): Transition(S.READY, A.NOTHING, None, ""),
    (S.LOADING, E.REFUSED): Transition(S.CLOSED, A.KILL, None, "{why}"),  # nothing will change by trying again
    (S.LOADING, E.LATE): Transition(S.CLOSED, A.KILL, None, "{why}; allow it more time (--load-timeout)"),
    (S.LOADING, E.GONE): Transition(S.DEAD, A.RESTART, None, AGAIN),
    (S.READY, E.GONE): Transition(S.DEAD, A.RESTART, LOST, AGAIN),
    (S.READY, E.SILENT): Transition(S.STUCK, A.RESTART, LOST, AGAIN),
    (S.READY, E.FAILED): Transition(S.FAILING, A.RESTART, LOST, AGAIN),
    **{(state, E.RESUME): Transition(state, A.START, None, "{before}") for state in DOWN},
    **{(state, E.LOADED): Transition(S.READY, A.NOTHING, None, "") for state in DOWN},
    **{
        (state, E.REFUSED): Transition(S.DEAD, A.RESTART, None, "the model cannot be loaded again; the log says why")
        for state in DOWN
    },
    **{(state, E.LATE): Transition(S.DEAD, A.RESTART, None, AGAIN) for state in DOWN},
    **{(state, E.GONE): Transition(S.DEAD, A.RESTART, None, AGAIN) for state in DOWN},
    # Nothing is started any more, and what has ended is not missed.
    **{(state, E.DRAIN): Transition(S.DRAINING, A.NOTHING, None, BYE) for state in State},
    **{(S.DRAINING, event): Transition(S.DRAINING, A.NOTHING, None, BYE) for event in (E.BEGIN, E.LOADED)},
    **{(S.DRAINING, event): Transition(S.DRAINING, A.KILL, LOST, f"{{why}}; {BYE}") for event in ENDS},
    (S.DRAINING, E.REFUSED): Transition(S.DRAINING, A.KILL, LOST, BYE),
    (S.DRAINING, E.RESUME): Transition(S.DRAINING, A.KILL, None, BYE),
    **{(state, E.CLOSE): Transition(S.CLOSED, A.STOP, LATER, "the server has shut down") for state in State},
}


class Supervision:
    """Where one engine stands in the table, and how often it ended.

    The first attempt after an end follows at once, the next ones later and later, until an engine was ready for `CALM` seconds:
    what ends every engine soon after its start does not keep the machine busy with starting it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.state = State.CLOSED
        self.detail = ""  # why it is not ready: one line
        self.pauses = PAUSES
        self.pause = 0.0  # seconds before the next attempt
        self.restarts = 0
        self.ends: dict[Event, int] = dict.fromkeys(ENDS, 0)  # how often what ended it
        self._clock = clock
        self._since: float | None = None  # when it became ready
        self._attempts = 0  # of late

    def refusal(self, kind: type[EngineDownError] = EngineDownError) -> EngineDownError:
        """What clients hear while the state lasts."""
        return kind(self.detail, max(RETRY_DOWN, math.ceil(self.pause) if self.state in DOWN else 0))

    def on(self, event: Event, why: str = "") -> Transition:
        """Take in an event; what is to be done. Raises KeyError for one that cannot happen in this state."""
        row = TABLE[self.state, event]
        now = self._clock()
        if event is Event.LOADED:
            self._since = now
        if event in ENDS:
            self.ends[event] += 1
            if self._since is not None and now - self._since >= CALM:
                self._attempts = 0
            self._since = None
        if row.action is Action.RESTART:
            self.pause = self.pauses[min(self._attempts, len(self.pauses) - 1)]
            self._attempts += 1
        self.restarts += event is Event.RESUME and row.action is Action.START
        detail = row.says.format(why=why, before=self.detail)
        if row.state is not self.state or event in ENDS:
            level = logging.WARNING if row.state in DOWN else logging.INFO
            line = why if event is Event.REFUSED else detail
            log.log(level, "%s%s", row.state.value, f": {line}" if line else "")
        self.state, self.detail = row.state, detail
        return row
