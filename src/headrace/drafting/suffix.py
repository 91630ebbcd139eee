"""Suffix decoding: the longest end of a text that came before, in itself or in earlier outputs, and what followed (card F11).

Texts are held in suffix automata (Blumer et al. 1985): online, and linear in their length. After SuffixDecoding (Oliaro et
al. 2024): the longer the match, the further it is trusted.
"""

from collections import OrderedDict

from headrace.types import Draft, Request, Sequence

SEPARATOR = -1  # between texts; no token
TENANTS = 16


class SuffixAutomaton:
    """All substrings of a growing text. A state is a set of substrings that end at the same places.

    `ends[s]` is a place after the latest known end of state s; `follow` gives what came after it.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self.ends = [0]
        self._last = 0

    def push(self, token: int) -> None:
        """Append a token. (The usual construction; a clone keeps the links of what it splits.)"""
        self.text.append(token)
        new = self._state({}, self._length[self._last] + 1, -1)
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        self._link[new] = 0 if at < 0 else self._split(at, token)
        self._last = new

    def _split(self, at: int, token: int) -> int:
        """The state that `token` leads to from `at` and that holds no longer substrings than that."""
        target = self._next[at][token]
        if self._length[target] == self._length[at] + 1:
            return target
        clone = self._state(dict(self._next[target]), self._length[at] + 1, self._link[target])
        self.ends[clone] = self.ends[target]
        while at >= 0 and self._next[at].get(token) == target:
            self._next[at][token] = clone
            at = self._link[at]
        self._link[target] = clone
        return clone

    def _state(self, after: dict[int, int], length: int, link: int) -> int:
        self._next.append(after)
        self._length.append(length)
        self._link.append(link)
        self.ends.append(len(self.text))
        return len(self._link) - 1

    def repeated(self, seen: int = 8) -> tuple[int, int]:
        """The place after an earlier occurrence of the longest end of the text that has one, and its length; (0, 0): none.

        What is found now ends here too, so next time this place is the latest one (for the `seen` longest such ends).
        """
        state = self._link[self._last]
        found = (self.ends[state], self._length[state]) if state > 0 else (0, 0)
        while state > 0 and seen:
            self.ends[state] = len(self.text)
            state, seen = self._link[state], seen - 1
        return found

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """From the longest end of another text that occurs here (its state and length) to that with one more token."""
        while state > 0 and length <= self._length[self._link[state]]:  # the state was split since
            state = self._link[state]
        while state > 0 and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        if token in self._next[state]:
            return self._next[state][token], length + 1
        return 0, 0

    @property
    def states(self) -> int:
        return len(self._link)


class Reading:
    """Where one sequence stands: its own automaton, and its longest end that earlier outputs contain."""

    def __init__(self, past: SuffixAutomaton) -> None:
        self.own = SuffixAutomaton()
        self.past = past
        self.state, self.length = 0, 0

    def read(self, tokens: list[int]) -> None:
        for token in tokens[len(self.own.text) :]:
            self.own.push(token)
            self.state, self.length = self.past.advance(self.state, self.length, token)


class SuffixTree:
    """Proposes what followed the longest known end of a sequence, as many tokens as `factor` times the match is long.

    Outputs that have ended are remembered, prompts included, up to `memory` tokens for each tenant; beyond that the older half
    is forgotten. Tenants do not see each other's, not even by what is fast.
    """

    name = "suffix"

    def __init__(self, factor: float = 2.0, shortest: int = 2, memory: int = 200_000) -> None:
        self.factor = factor
        self.shortest = shortest
        self.memory = memory
        self._past: OrderedDict[bytes, SuffixAutomaton] = OrderedDict()

    def past(self, salt: bytes) -> SuffixAutomaton:
        """What a tenant's outputs were."""
        found = self._past.setdefault(salt, SuffixAutomaton())
        self._past.move_to_end(salt)
        if len(self._past) > TENANTS:
            self._past.popitem(last=False)
        return found

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        past, reading = self.past(request.tenant), seq.drafting.get(self.name)
        if reading is None or reading.past is not past:
            reading = seq.drafting[self.name] = Reading(past)
        reading.read(seq.tokens)
        place, length = reading.own.repeated()
        text = reading.own.text
        if reading.length > length:
            place, length, text = past.ends[reading.state], reading.length, past.text
        if length < self.shortest:
            return None
        tokens = text[place : place + min(most, int(length * self.factor))]
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        return Draft(tokens, list(range(-1, len(tokens) - 1)), drafter=self.name, trust=_trust(length)) if tokens else None

    def remember(self, request: Request, seq: Sequence) -> None:
        """Keep an output that has ended."""
        past, half = self.past(request.tenant), self.memory // 2
        if len(past.text) + len(seq.tokens) >= self.memory:
            kept = past.text[-half:]
            past = self._past[request.tenant] = SuffixAutomaton()
            for token in kept:
                past.push(token)
        for token in [*seq.tokens[1 - half :], SEPARATOR]:
            past.push(token)


def _trust(length: int) -> int:
    """Matches of 1, 2 or 3, up to 7, and more tokens are counted apart."""
    return min(length.bit_length(), 4)
