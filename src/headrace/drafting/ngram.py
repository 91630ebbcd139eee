"""Prompt lookup: proposes the tokens that followed the same n-gram earlier in the text. It pays where text is copied.

Source: Saxena, "Prompt Lookup Decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding.
"""

from headrace.data.sources import Tokens
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import READ_EACH, READ_TOKENS


class Ngrams:
    """Index of a growing sequence: for each n-gram the index of the token that followed it last."""

    def __init__(self, longest: int) -> None:
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest + 1)]  # by n: n-gram -> index
        self._read = 0  # tokens in the index, those of the last n-grams included
        self._match = (0, 0)

    def read(self, tokens: list[int], most: int) -> int:
        """Add up to `most` tokens that follow those read before; returns how many."""
        begun, self._read = self._read, min(len(tokens), self._read + most)
        for end in range(begun + 1, self._read + 1):
            self._match = self._add(tokens, end)
        return self._read - begun

    def find(self, tokens: list[int]) -> tuple[int, int]:
        """The longest suffix of `tokens` that occurs earlier: the index after its latest occurrence, and its length. (0, 0) if
        there is none, or if some tokens are not read yet."""
        return self._match if self._read == len(tokens) else (0, 0)

    def _add(self, tokens: list[int], end: int) -> tuple[int, int]:
        """Look up the n-grams that end before `end`, the longest first, and let `end` be their latest follower."""
        at = length = 0
        for n in range(min(len(self._after) - 1, end), 0, -1):
            known, ngram = self._after[n], tuple(tokens[end - n : end])
            if not length and (place := known.get(ngram)) is not None:
                at, length = place, n
            known[ngram] = end
        return at, length


class PromptLookup:
    """Proposes the tokens after the latest earlier occurrence of the last n tokens, longest >= n >= shortest."""

    name = "ngram"

    def __init__(self, longest: int = 3, shortest: int = 1) -> None:
        self.longest = longest
        self.shortest = shortest
        self._room = READ_TOKENS

    def begin(self) -> None:
        self._room = READ_TOKENS

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        index = seq.decode.memory.setdefault(self.name, Ngrams(self.longest))
        # An encoder-decoder's output often copies its source text.
        text = request.input_ids + seq.tokens if isinstance(request.source, Tokens) else seq.tokens
        self._room -= index.read(text, max(self._room, READ_EACH))
        at, length = index.find(text)
        if length < self.shortest or length == 0:
            return None
        tokens = text[at : at + most]
        return Draft(tokens, list(range(-1, len(tokens) - 1)), drafter=self.name, confidence=length)
