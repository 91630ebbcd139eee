"""Which models make room for one that waits: a rule on plain data, without processes and clocks.

Idle models are unloaded first, the least recently used before the others. A model with requests keeps its place for one turn,
which grows with the seconds that it took to load. After its turn it finishes its requests, and new ones wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MIN_TURN = 2.0  # seconds that a model keeps its place while it has requests
LOADS_PER_TURN = 4.0  # a turn lasts this many times the load, so loading takes at most a fifth of the time


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory. size: bytes. used: time of its last request. turn_ends: time from which it must make room."""

    name: str
    size: int
    pinned: bool
    busy: bool
    used: float
    turn_ends: float


def turn_seconds(load_seconds: float) -> float:
    """Seconds for which a model with requests keeps its place."""
    return max(MIN_TURN, LOADS_PER_TURN * load_seconds)


def choose_victims(residents: Sequence[Resident], need: int, budget: int, now: float) -> list[Resident] | None:
    """Return the models to unload so that one of `need` bytes fits in `budget`; busy ones finish their requests first.

    None: not enough turns have ended. If all unpinned models together are too small, all of them are returned: the sizes of
    loaded models are measured, and may exceed the plan by which the model was accepted.
    """
    excess = need + sum(one.size for one in residents) - budget
    movable = [one for one in residents if not one.pinned]
    idle = sorted((one for one in movable if not one.busy), key=lambda one: one.used)
    ended = sorted((one for one in movable if one.busy and one.turn_ends <= now), key=lambda one: one.turn_ends)
    victims: list[Resident] = []
    for one in (*idle, *ended):
        if excess <= 0:
            return victims
        victims.append(one)
        excess -= one.size
    return victims if excess <= 0 or len(victims) == len(movable) else None
