"""Suffix decoding: proposes the tokens after the longest suffix of a text that occurs earlier in it or in finished outputs.

Texts are stored in suffix automata, which grow online in linear time (Blumer et al., "The Smallest Automaton Recognizing the
Subwords of a Text", 1985). A longer match gives a longer draft, as in Oliaro et al., "SuffixDecoding", arXiv 2411.04975.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import READ_EACH, READ_TOKENS

SEPARATOR = -1  # between texts; not a token id
TENANTS = 16
MEMORY = 200_000  # tokens of finished outputs, of all tenants together
TOKEN_BYTES = 768  # most bytes of an automaton per token of its text; the memory plan counts them


class SuffixAutomaton:
    """All substrings of a growing text. A state is a set of substrings with the same end positions.

    ends[s]: index of the token after one occurrence of the substrings of state s, which `repeated` replaces by the latest.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self.ends = [0]
        self._last = 0

    def push(self, token: int) -> None:
        """Append a token, by the usual online construction."""
        self.text.append(token)
        new = self._state({}, self._length[self._last] + 1, -1)
        at = self._last
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        self._link[new] = 0 if at < 0 else self._split(at, token)
        self._last = new

    def _split(self, at: int, token: int) -> int:
        """The state that `token` leads to from `at`, split if it also holds longer substrings."""
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
        """The longest suffix of the text that occurs earlier: the index after that occurrence, and its length; (0, 0): none.

        The `seen` longest such suffixes also end here, so the end of the text becomes their latest occurrence.
        """
        state = self._link[self._last]
        match = (self.ends[state], self._length[state]) if state > 0 else (0, 0)
        while state > 0 and seen:
            self.ends[state] = len(self.text)
            state, seen = self._link[state], seen - 1
        return match

    def advance(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Extend a match with another text by that text's next token.

        state, length: of the longest suffix of the other text that occurs in this one. Returns those with the token appended;
        (0, 0) if no suffix occurs.
        """
        # The state may have been split since the last call.
        while state > 0 and length <= self._length[self._link[state]]:
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
    """The longest suffix of a growing text that occurs in another text's automaton."""

    past: SuffixAutomaton
    state: int = 0
    length: int = 0

    def follow(self, token: int) -> None:
        self.state, self.length = self.past.advance(self.state, self.length, token)


class SequenceIndex:
    """Automaton of one sequence's tokens, and the matches of their suffix in the tenant's finished outputs."""

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.pasts: list[Follower] = []

    def match_against(self, pasts: list[SuffixAutomaton]) -> None:
        """Match against these automata. The match against a new one begins with the sequence's last READ_EACH tokens."""
        if [one.past for one in self.pasts] != pasts:
            known = {id(one.past): one for one in self.pasts}
            self.pasts = [known.get(id(past)) or self._begin(past) for past in pasts]

    def _begin(self, past: SuffixAutomaton) -> Follower:
        new = Follower(past)
        for token in self.own.text[-READ_EACH:]:
            new.follow(token)
        return new

    def read(self, tokens: list[int], most: int) -> int:
        """Add up to `most` tokens that follow those read before; returns how many."""
        at = len(self.own.text)
        more = tokens[at : at + most]
        for token in more:
            self.own.push(token)
            for past in self.pasts:
                past.follow(token)
        return len(more)

    def find(self) -> tuple[list[int], int, int]:
        """The longest match: the text it lies in, the index after it there, and its length (0: no match)."""
        place, length = self.own.repeated()
        text = self.own.text
        for one in self.pasts:
            if one.length > length:
                text, place, length = one.past.text, one.past.ends[one.state], one.length
        return text, place, length


class SuffixTree:
    """Proposes the tokens after the longest match of a sequence's suffix: `factor` tokens for each token of the match.

    It remembers finished outputs with their prompts, up to `memory` tokens. A tenant has up to two automata; when the younger
    one is full, the older one is dropped. If all tenants together exceed `memory`, the tenant idle longest is dropped. Drafts
    for one tenant never depend on another tenant's texts, not even by speed. A long text is read over several steps.
    """

    name = "suffix"

    def __init__(self, factor: float = 2.0, shortest: int = 2, memory: int = MEMORY) -> None:
        self.factor = factor
        self.shortest = shortest
        self.memory = memory
        self._pasts: OrderedDict[bytes, list[SuffixAutomaton]] = OrderedDict()  # by tenant; the younger automaton first
        self._ended: deque[tuple[bytes, deque[int]]] = deque()  # finished outputs, not read yet
        self._unread = 0  # tokens of `_ended`
        self._room = READ_TOKENS  # tokens that this step may still read

    def begin(self) -> None:
        self._room = READ_TOKENS
        self._read_ended()

    def pasts(self, tenant: bytes) -> list[SuffixAutomaton]:
        """The automata of a tenant's finished outputs."""
        pasts = self._pasts.setdefault(tenant, [SuffixAutomaton()])
        self._pasts.move_to_end(tenant)
        if len(self._pasts) > TENANTS:
            self._pasts.popitem(last=False)
        return pasts

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        index = seq.decode.memory.get(self.name)
        if index is None:
            index = seq.decode.memory[self.name] = SequenceIndex()
        index.match_against(self.pasts(request.tenant))
        self._room -= index.read(seq.tokens, max(self._room, READ_EACH))
        if len(index.own.text) < len(seq.tokens):
            return None
        text, place, length = index.find()
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
        """Remember a finished output, or its end if it does not fit an automaton."""
        self._ended.append((request.tenant, deque([*seq.tokens[1 - self.memory // 2 :], SEPARATOR])))
        self._unread += len(self._ended[-1][1])
        while len(self._ended) > 1 and self._unread > self.memory:
            self._unread -= len(self._ended.popleft()[1])
        self._read_ended()

    @property
    def remembered(self) -> int:
        """Tokens in the automata of all tenants."""
        return sum(len(one.text) for pasts in self._pasts.values() for one in pasts)

    def _read_ended(self) -> None:
        """Add finished outputs to the automata, within this step's room."""
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
    """Class 1 to 4 of a match by its length: 1, 2 to 3, 4 to 7, or more tokens. Acceptance is averaged for each class."""
    return min(length.bit_length(), 4)
