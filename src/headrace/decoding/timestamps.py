"""Whisper's rules for timestamps and suppressed tokens, as masks over the vocabulary.

The rule that compares the probabilities of all timestamps and of the best text token needs logits: it is a stage of the sampler
(`headrace.ops.penalties.compare_mass`).

Source: `ApplyTimestampRules`, `SuppressBlank` and `SuppressTokens` of openai-whisper.
"""

from collections.abc import Sequence
from typing import Self

import numpy as np

from headrace.data.params import TimestampParams


class TimestampRules:
    """One output's position in the rules: a constraint, as those of `headrace.decoding.constrained`. It never fails."""

    __slots__ = ("_allowed", "_before", "_last", "_params", "_time")
    error = ""
    done = False

    def __init__(self, params: TimestampParams, vocab_size: int) -> None:
        self._params = params
        # Rows are whole words of 32 bits.
        self._allowed = np.zeros(-(-vocab_size // 32) * 32, bool)
        self._allowed[:vocab_size] = True
        self._allowed[list(params.suppressed)] = False
        # -1: no token. An output of fewer than two tokens counts as one whose last but one token is a timestamp.
        self._last, self._before, self._time = -1, params.first, -1

    def copy(self) -> Self:
        """The same position, for a fork."""
        twin = object.__new__(type(self))
        twin._params, twin._allowed = self._params, self._allowed
        twin._last, twin._before, twin._time = self._last, self._before, self._time
        return twin

    def push(self, token: int) -> None:
        """Advance by a token of the output."""
        self._before = self._params.first if self._last < 0 else self._last
        self._last = token
        self._time = token if token >= self._params.first else self._time

    def masks(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> bytes:
        """One bit per token id (little-endian words of 32), set for allowed tokens: a row for the next token and one for the
        token after each node of a draft tree."""
        rows = [self._mask(), *(after._mask() for after in self._nodes(tokens, parents))]
        return np.packbits(np.concatenate(rows), bitorder="little").tobytes()

    def fitting(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a draft tree fit the rules, with all their ancestors."""
        before, fits = [self, *self._nodes(tokens, parents)], list[bool]()
        for token, parent in zip(tokens, parents, strict=True):
            fits.append(bool(before[parent + 1]._mask()[token]) and (parent < 0 or fits[parent]))
        return fits

    def _nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Self]:
        """The position after each node."""
        after: list[Self] = []
        for token, parent in zip(tokens, parents, strict=True):
            after.append((self if parent < 0 else after[parent]).copy())
            after[-1].push(token)
        return after

    def _mask(self) -> np.ndarray:
        """Allowed next tokens, [vocabulary, a multiple of 32] bool."""
        params, row = self._params, self._allowed.copy()
        first, empty = params.first, self._last < 0
        after_time, after_pair = self._last >= first, self._before >= first
        opens = after_time and not after_pair
        if after_time and after_pair:
            row[first:] = False
        elif after_time:
            row[: params.end] = False
        if self._time >= first:
            # A segment may begin where the one before ended, and it ends later than it begins.
            row[first : self._time + (not opens)] = False
        if empty:
            row[list(params.blank)] = False
            row[:first] = False
            if params.latest is not None:
                row[first + params.latest + 1 :] = False
        return row
