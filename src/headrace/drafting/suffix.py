"""Suffix decoding: the longest end of a text that came before, in itself or in earlier outputs, and what followed.

Texts are held in suffix automata (Blumer et al. 1985): online, and linear in their length. After SuffixDecoding (Oliaro et
al. 2024): the longer the match, the further it is trusted.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import READ, SHORT

SEPARATOR = -1  # between texts; no token
TENANTS = 16
MEMORY = 200_000  # tokens of ended outputs that are remembered, of all tenants together
TOKEN_BYTES = 768  # of an automaton for each token of its text, at most; the memory plan counts them


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


@dataclass(slots=True)
class Follower:
    """The longest end of a text that a tenant's automaton contains, as the text goes on."""

    past: SuffixAutomaton
    state: int = 0
    length: int = 0

    def follow(self, token: int) -> None:
        self.state, self.length = self.past.advance(self.state, self.length, token)


class Reading:
    """Where one sequence stands: its own automaton, and its longest ends that earlier outputs contain."""

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.pasts: list[Follower] = []

    def meet(self, pasts: list[SuffixAutomaton]) -> None:
        """These hold what earlier outputs were; one that is new is met with the last tokens that were read."""
        if [one.past for one in self.pasts] != pasts:
            known = {id(one.past): one for one in self.pasts}
            self.pasts = [known.get(id(past)) or self._begin(past) for past in pasts]

    def _begin(self, past: SuffixAutomaton) -> Follower:
        new = Follower(past)
        for token in self.own.text[-SHORT:]:
            new.follow(token)
        return new

    def read(self, tokens: list[int], most: int) -> int:
        """Go on with `tokens` for at most so many of them; returns how many these were."""
        at = len(self.own.text)
        more = tokens[at : at + most]
        for token in more:
            self.own.push(token)
            for past in self.pasts:
                past.follow(token)
        return len(more)

    def find(self) -> tuple[list[int], int, int]:
        """The text that has the longest known end of this one, the place after it there, and its length; 0: there is none."""
        place, length = self.own.repeated()
        text = self.own.text
        for one in self.pasts:
            if one.length > length:
                text, place, length = one.past.text, one.past.ends[one.state], one.length
        return text, place, length


class SuffixTree:
    """Proposes what followed the longest known end of a sequence, as many tokens as `factor` times the match is long.

    Ended outputs are remembered, prompts included, up to `memory` tokens. A tenant has two automata: when the younger one is
    full, the older one is dropped. If all tenants together have more, the one that was idle longest is dropped. A tenant never
    sees the tokens of another, not even through speed. A text that is too long to read in one step is read in several.
    """

    name = "suffix"

    def __init__(self, factor: float = 2.0, shortest: int = 2, memory: int = MEMORY) -> None:
        self.factor = factor
        self.shortest = shortest
        self.memory = memory
        self._pasts: OrderedDict[bytes, list[SuffixAutomaton]] = OrderedDict()  # by tenant, the younger first
        self._ended: deque[tuple[bytes, deque[int]]] = deque()  # outputs that are still to be read
        self._unread = 0  # tokens of these
        self._room = READ

    def begin(self) -> None:
        self._room = READ
        self._read_ended()

    def pasts(self, tenant: bytes) -> list[SuffixAutomaton]:
        """What a tenant's outputs were."""
        found = self._pasts.setdefault(tenant, [SuffixAutomaton()])
        self._pasts.move_to_end(tenant)
        if len(self._pasts) > TENANTS:
            self._pasts.popitem(last=False)
        return found

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        reading = seq.decode.memory.get(self.name)
        if reading is None:
            reading = seq.decode.memory[self.name] = Reading()
        reading.meet(self.pasts(request.tenant))
        self._room -= reading.read(seq.tokens, max(self._room, SHORT))
        if len(reading.own.text) < len(seq.tokens):
            return None
        text, place, length = reading.find()
        if length < self.shortest:
            return None
        tokens = text[place : place + min(most, int(length * self.factor))]
        if SEPARATOR in tokens:
            tokens = tokens[: tokens.index(SEPARATOR)]
        return (
            Draft(tokens, list(range(-1, len(tokens) - 1)), drafter=self.name, confidence=_confidence(length))
            if tokens
            else None
        )

    def remember(self, request: Request, seq: Sequence) -> None:
        """Keep an ended output, or its end if it is longer than an automaton."""
        self._ended.append((request.tenant, deque([*seq.tokens[1 - self.memory // 2 :], SEPARATOR])))
        self._unread += len(self._ended[-1][1])
        while len(self._ended) > 1 and self._unread > self.memory:  # they end faster than they are read
            self._unread -= len(self._ended.popleft()[1])
        self._read_ended()

    @property
    def remembered(self) -> int:
        """Tokens in the automata of all tenants."""
        return sum(len(one.text) for pasts in self._pasts.values() for one in pasts)

    def _read_ended(self) -> None:
        """Put outputs that have ended where they are found, as far as there is room in this step."""
        while self._ended and self._room > 0:
            tenant, tokens = self._ended[0]
            pasts = self.pasts(tenant)
            if len(pasts[0].text) + len(tokens) > self.memory // 2:
                pasts[:] = [SuffixAutomaton(), pasts[0]]
            for _ in range(min(len(tokens), self._room)):
                pasts[0].push(tokens.popleft())
                self._room -= 1
                self._unread -= 1
            if not tokens:
                self._ended.popleft()
                while len(self._pasts) > 1 and self.remembered > self.memory:
                    self._pasts.popitem(last=False)


def _confidence(length: int) -> int:
    """Matches of 1, 2 or 3, up to 7, and more tokens are counted apart."""
    return min(length.bit_length(), 4)
