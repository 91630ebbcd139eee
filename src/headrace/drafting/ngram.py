"""Prompt lookup: what followed the same few tokens before (card F5; Saxena 2023). It pays where text is copied."""

from headrace.types import Draft, Request, Sequence


class Ngrams:
    """Where each n-gram of a sequence was last followed by a token, kept as the sequence grows."""

    def __init__(self, longest: int) -> None:
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]  # by length: n-gram -> what follows
        self._done = 0

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The place after the latest earlier occurrence of the longest known end of `tokens`, and the length of that end;
        (0, 0) where nothing of it came before."""
        for n in range(1, len(self._last)):
            known = self._last[n]
            for end in range(max(self._done, n), len(tokens)):
                known[tuple(tokens[end - n : end])] = end
        self._done = len(tokens)
        for n in range(min(len(self._last) - 1, len(tokens) - 1), 0, -1):
            at = self._last[n].get(tuple(tokens[-n:]))
            if at is not None:
                return at, n
        return 0, 0


class PromptLookup:
    """Proposes what followed the last `longest` tokens (or fewer, down to `shortest`) when they came before."""

    name = "ngram"

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        self.longest = longest
        self.shortest = shortest

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        known = seq.drafting.setdefault(self.name, Ngrams(self.longest))
        at, length = known.find(seq.tokens)
        if length < self.shortest or length == 0:
            return None
        tokens = seq.tokens[at : at + most]
        return Draft(tokens, list(range(-1, len(tokens) - 1)), drafter=self.name, trust=length)
