"""Prompt lookup: what followed the same few tokens before (Saxena 2023). It pays where text is copied."""

from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import READ, SHORT


class Ngrams:
    """Where each n-gram of a sequence was last followed by a token, kept as the sequence grows."""

    def __init__(self, longest: int) -> None:
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]  # by length: n-gram -> what follows
        self._read = 0  # tokens that are in it; the last n-grams too, whose followers are still to come
        self._found = (0, 0)

    def read(self, tokens: list[int], most: int) -> int:
        """Go on with `tokens` for at most so many of them; returns how many these were."""
        begun, self._read = self._read, min(len(tokens), self._read + most)
        for end in range(begun + 1, self._read + 1):
            self._found = self._pass(tokens, end)
        return self._read - begun

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The place after the latest earlier occurrence of the longest known end of `tokens`, and the length of that end;
        (0, 0) where nothing of it came before, or not all of it was read."""
        return self._found if self._read == len(tokens) else (0, 0)

    def _pass(self, tokens: list[int], end: int) -> tuple[int, int]:
        """Look up the n-grams before `end`, the longest first, and write down that `end` follows them now."""
        at = length = 0
        for n in range(min(len(self._after) - 1, end), 0, -1):
            known, ngram = self._after[n], tuple(tokens[end - n : end])
            if not length and (place := known.get(ngram)) is not None:
                at, length = place, n
            known[ngram] = end
        return at, length


class PromptLookup:
    """Proposes what followed the last `longest` tokens (or fewer, down to `shortest`) when they came before."""

    name = "ngram"

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        self.longest = longest
        self.shortest = shortest
        self._room = READ

    def begin(self) -> None:
        self._room = READ

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        known = seq.decode.memory.setdefault(self.name, Ngrams(self.longest))
        text = request.prompt + seq.tokens if seq.kv.source else seq.tokens  # what is written is often copied from a source
        self._room -= known.read(text, max(self._room, SHORT))
        at, length = known.find(text)
        if length < self.shortest or length == 0:
            return None
        tokens = text[at : at + most]
        return Draft(tokens, list(range(-1, len(tokens) - 1)), drafter=self.name, confidence=length)
