"""Supervision of an engine process as a table of transitions: state and event to state, action, and messages for clients.

This module knows no processes, sockets or asyncio: `Replica` reports events and runs the actions.
"""

import enum
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.server.engines.inflight import RETRY_DOWN, EngineDownError, EngineLostError

log = logging.getLogger("headrace.server")

PAUSES = (0.0, 1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before each restart
CALM = 120.0  # seconds of readiness after which the pauses start again
FAILURES = 8  # consecutive failed steps after which the process is ended


class State(enum.StrEnum):
    """State of the engine. Only READY and DRAINING have a process that answers."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # finishes open requests, accepts no new ones
    DEAD = "dead"  # the process ended; it is being started again
    STUCK = "stuck"  # the process gave no sign of life and was ended; it is being started again
    FAILING = "failing"  # its steps failed one after the other and it was ended; it is being started again
    CLOSED = "closed"


class Event(enum.StrEnum):
    """Event of the engine process or its owner."""

    BEGIN = "begin"  # the owner wants the model
    LOADED = "loaded"  # the process is ready
    REFUSED = "refused"  # the process cannot open the model
    LATE = "late"  # the process was neither in time
    GONE = "gone"  # the process ended, or sent an invalid message
    SILENT = "silent"  # the process gave no sign of life
    FAILED = "failed"  # FAILURES of its steps failed
    CUT = "cut"  # an engine on another host cannot be reached, or its operator stops it
    RENEW = "renew"  # the operator wants a new process
    RESUME = "resume"  # the pause before a restart is over
    DRAIN = "drain"  # the server accepts no new requests
    CLOSE = "close"  # the owner does not want the model any more


class Action(enum.StrEnum):
    """Action of `Replica` after an event."""

    NOTHING = "nothing"
    START = "start"  # start a process that loads the model
    RESTART = "restart"  # kill the process, pause, then RESUME
    KILL = "kill"  # kill the process, and start no other
    STOP = "stop"  # end the process in order


@dataclass(frozen=True, slots=True)
class Transition:
    """Result of an event.

    `lost`: error of the requests in flight that are not replayed (None: they go on). `detail`: message at /health, and of the
    503 for requests in the new state; `{why}` is the reason of the event, `{before}` the detail before it. The reason why a
    model cannot be loaded again may name files, and is only logged.
    """

    state: State
    action: Action
    lost: type[EngineDownError] | None
    detail: str


S, E, A = State, Event, Action
DOWN = (S.DEAD, S.STUCK, S.FAILING)
ENDS = (E.REFUSED, E.LATE, E.GONE, E.SILENT, E.FAILED, E.CUT)
AGAIN = "{why}; it is being started again"
CONNECT = "{why}; trying to connect"
BYE = "the server is shutting down"
LOST, LATER = EngineLostError, EngineDownError

TABLE: dict[tuple[State, Event], Transition] = {
    (S.CLOSED, E.BEGIN): Transition(S.LOADING, A.START, None, "the model is being loaded"),
    (S.LOADING, E.LOADED): Transition(S.READY, A.NOTHING, None, ""),
    (S.LOADING, E.REFUSED): Transition(S.CLOSED, A.KILL, None, "{why}"),  # another attempt would fail too
    (S.LOADING, E.LATE): Transition(S.CLOSED, A.KILL, None, "{why}; allow it more time (--load-timeout)"),
    (S.LOADING, E.GONE): Transition(S.DEAD, A.RESTART, None, AGAIN),
    (S.READY, E.GONE): Transition(S.DEAD, A.RESTART, LOST, AGAIN),
    (S.READY, E.SILENT): Transition(S.STUCK, A.RESTART, LOST, AGAIN),
    (S.READY, E.FAILED): Transition(S.FAILING, A.RESTART, LOST, AGAIN),
    **{(state, E.CUT): Transition(S.DEAD, A.RESTART, None, CONNECT) for state in (S.LOADING, *DOWN)},
    (S.READY, E.CUT): Transition(S.DEAD, A.RESTART, LATER, CONNECT),
    (S.READY, E.RENEW): Transition(S.DEAD, A.RESTART, LATER, "the operator restarts it"),
    **{(state, E.RESUME): Transition(state, A.START, None, "{before}") for state in DOWN},
    **{(state, E.LOADED): Transition(S.READY, A.NOTHING, None, "") for state in DOWN},
    **{
        (state, E.REFUSED): Transition(S.DEAD, A.RESTART, None, "the model cannot be loaded again; the log says why")
        for state in DOWN
    },
    **{(state, E.LATE): Transition(S.DEAD, A.RESTART, None, AGAIN) for state in DOWN},
    **{(state, E.GONE): Transition(S.DEAD, A.RESTART, None, AGAIN) for state in DOWN},
    # A draining server starts no process, so requests that wait for one fail.
    **{(state, E.DRAIN): Transition(S.DRAINING, A.NOTHING, LOST if state in DOWN else None, BYE) for state in State},
    **{(S.DRAINING, event): Transition(S.DRAINING, A.NOTHING, None, BYE) for event in (E.BEGIN, E.LOADED)},
    **{(S.DRAINING, event): Transition(S.DRAINING, A.KILL, LOST, f"{{why}}; {BYE}") for event in ENDS},
    **{(S.DRAINING, event): Transition(S.DRAINING, A.KILL, LOST, BYE) for event in (E.REFUSED, E.RENEW)},
    (S.DRAINING, E.RESUME): Transition(S.DRAINING, A.KILL, None, BYE),
    **{(state, E.CLOSE): Transition(S.CLOSED, A.STOP, LATER, "the server has shut down") for state in State},
}


class Supervision:
    """State of one engine in the table, and the counts of its ends.

    The first restart follows at once and the next ones after growing pauses, until an engine was ready for `CALM` seconds. So
    an engine that always ends soon after its start does not keep the machine busy.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, name: str = "") -> None:
        self.name = name  # of the replica, for the log; empty for a single engine
        self.state = State.CLOSED
        self.detail = ""  # why the engine is not ready: one line
        self.pauses: Sequence[float] = PAUSES
        self.pause = 0.0  # seconds before the next restart
        self.restarts = 0
        self.failed_starts = 0  # processes in a row that ended before they were ready
        self.ends: dict[Event, int] = dict.fromkeys(ENDS, 0)  # by cause
        self._clock = clock
        self._since: float | None = None  # when the engine became ready
        self._attempts = 0  # restarts since the engine was ready for CALM seconds

    def refusal(self, kind: type[EngineDownError] = EngineDownError) -> EngineDownError:
        """Return the error of requests in this state."""
        return kind(self.detail, max(RETRY_DOWN, math.ceil(self.pause) if self.state in DOWN else 0))

    def on(self, event: Event, why: str = "") -> Transition:
        """Apply an event and return its transition. Raises KeyError if the event cannot happen in this state."""
        transition = TABLE[self.state, event]
        now = self._clock()
        if event is Event.LOADED:
            self._since = now
            self.failed_starts = 0
        if event in ENDS:
            self.ends[event] += 1
            self.failed_starts += self._since is None
            if self._since is not None and now - self._since >= CALM:
                self._attempts = 0
            self._since = None
        if event is Event.RENEW:
            self.pause, self._since = 0.0, None
        elif transition.action is Action.RESTART:
            self.pause = self.pauses[min(self._attempts, len(self.pauses) - 1)]
            self._attempts += 1
        self.restarts += event is Event.RESUME and transition.action is Action.START
        detail = transition.detail.format(why=why, before=self.detail)
        repeated = event is Event.CUT and (transition.state, detail) == (self.state, self.detail)
        if not repeated and (transition.state is not self.state or event in ENDS):
            level = logging.WARNING if transition.state in DOWN else logging.INFO
            line = why if event is Event.REFUSED else detail
            who = f"replica {self.name}: " if self.name else ""
            log.log(level, "%s%s%s", who, transition.state.value, f": {line}" if line else "")
        self.state, self.detail = transition.state, detail
        return transition
