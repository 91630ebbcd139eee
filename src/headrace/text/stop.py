"""Stop strings, found in text as it streams: a match may straddle tokens, and what may become one is held back."""

from collections.abc import Iterable
from typing import Self


def _borders(text: str) -> list[int]:
    """borders[k]: length of the longest proper prefix of text[:k] that also ends it (Knuth, Morris, Pratt 1977)."""
    borders = [0, 0]
    for char in text[1:]:
        k = borders[-1]
        while k and text[k] != char:
            k = borders[k]
        borders.append(k + (text[k] == char))
    return borders


class StopMatcher:
    """Watches one output's text for stop strings.

    The match is the one that ends first (the longest of those that end together), so it does not depend on how the text
    was cut into pieces. `matched` is the stop string found; after that nothing more is given out.
    """

    __slots__ = ("_borders", "_held", "_include", "_states", "_stops", "matched")

    def __init__(self, stops: Iterable[str], include_stop: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        if "" in self._stops:
            raise ValueError("a stop string must not be empty")
        self._include = include_stop
        self._borders = [_borders(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._held = ""
        self.matched: str | None = None

    def append(self, text: str) -> str:
        """The text that is safe to give out: no stop string begins in it. Check `matched` afterwards."""
        if not self._stops or self.matched is not None:
            return text if not self._stops else ""
        end, found = len(text) + 1, -1
        for i in range(len(self._stops)):
            at = self._advance(i, text)
            if at < end:  # of two that end together the longer comes first
                end, found = at, i
        text = self._held + text
        if found >= 0:
            self.matched = self._stops[found]
            stop_at = len(self._held) + end
            self._held = ""
            return text[: stop_at if self._include else stop_at - len(self.matched)]
        held = max(self._states)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """What was held back: the output ended and no stop string came of it."""
        text, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return text

    def copy(self) -> Self:
        """The same state, for a fork (a beam, another of n outputs)."""
        twin = object.__new__(type(self))
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._states = list(self._states)
        return twin

    def _advance(self, i: int, text: str) -> int:
        """Feed one stop string's automaton; where in `text` the match ends, or past its end when there is none."""
        stop, borders, state = self._stops[i], self._borders[i], self._states[i]
        if state == 0 and stop[0] not in text:
            return len(text) + 1
        for at, char in enumerate(text, 1):
            while state and stop[state] != char:
                state = borders[state]
            state += stop[state] == char
            if state == len(stop):
                self._states[i] = 0
                return at
        self._states[i] = state
        return len(text) + 1
