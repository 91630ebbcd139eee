"""Ends outputs and decides which text is final: stop ids, stop strings, length limits.

Text that may become a stop string is held back.
"""

from collections.abc import Iterable
from typing import Self

from headrace.data.plan import TokenLogprob
from headrace.data.types import Delta, Request, Sequence
from headrace.text.tokenizer import IncrementalDetokenizer, Tokenizer


class Stopping:
    """Appends tokens to sequences until something ends them; owned by an engine."""

    def __init__(self, tokenizer: Tokenizer | None, max_model_len: int) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len

    def begin(self, request: Request, seq: Sequence) -> None:
        """Give a request's first sequence its text state (none without a tokenizer)."""
        if self.tokenizer is None:
            return
        params = request.params
        seq.text.words = IncrementalDetokenizer(self.tokenizer, seq.tokens, params.skip_special_tokens)
        if params.stop:
            seq.text.stops = StopMatcher(params.stop, params.include_stop_str_in_output)

    def extend(self, request: Request, seq: Sequence, tokens: list[int], logprobs: tuple[TokenLogprob, ...]) -> Delta:
        """Append `tokens` up to the first that ends the output; returns the delta. Its text is final: no later token can change
        it."""
        text, constraint, shown = seq.text, seq.decode.constraint, ""
        words, stops = text.words, text.stops
        early = seq.prompt_len + request.params.min_tokens  # up to this length nothing ends the output
        for at, token in enumerate(tokens, 1):
            seq.tokens.append(token)
            if constraint is not None:
                constraint.push(token)
            if words is not None:
                piece = words.push(token)
                shown += piece if stops is None or len(seq.tokens) <= early else stops.append(piece)
            self._judge(request, seq, token, early)
            if text.finish_reason is not None:
                tokens = tokens[:at]
                if stops is None or stops.matched is None:
                    shown += self.rest(seq)
                break
        return Delta(request.id, seq.decode.index, tokens, shown, logprobs[: len(tokens)], text.finish_reason, text.stop_reason)

    def rest(self, seq: Sequence) -> str:
        """The text held back so far, when no more tokens come."""
        text = seq.text
        if text.words is None:
            return ""
        held: str = text.words.flush()
        return held if text.stops is None else text.stops.append(held) + text.stops.flush()

    def _judge(self, request: Request, seq: Sequence, token: int, early: int) -> None:
        length, most, text = len(seq.tokens), request.params.max_tokens, seq.text
        if token in request.stop_ids and length > early:
            text.finish_reason = "stop"
            text.stop_reason = token if token in request.params.stop_token_ids else None
        elif text.stops is not None and text.stops.matched is not None:
            text.finish_reason, text.stop_reason = "stop", text.stops.matched
        elif seq.decode.constraint is not None and seq.decode.constraint.done:
            text.finish_reason = "stop"  # no token can follow, so no end token is needed
        elif (most is not None and length - seq.prompt_len >= most) or length >= self.max_model_len:
            text.finish_reason = "length"


def _borders(text: str) -> list[int]:
    """Return borders[k], the length of the longest proper prefix of text[:k] that is also its suffix (Knuth-Morris-Pratt)."""
    borders = [0, 0]
    for char in text[1:]:
        k = borders[-1]
        while k and text[k] != char:
            k = borders[k]
        borders.append(k + (text[k] == char))
    return borders


class StopMatcher:
    """Finds stop strings in the text of one output.

    The match that ends first wins, the longest of those that end together, so the result does not depend on how the text is
    cut into pieces. matched: the stop string, None before a match; after it `append` returns nothing.
    """

    __slots__ = ("_borders", "_held", "_include", "_states", "_stops", "matched")

    def __init__(self, stops: Iterable[str], include_stop: bool = False) -> None:
        self._stops = tuple(sorted(set(stops), key=len, reverse=True))
        if "" in self._stops:
            raise ValueError("a stop string must not be empty")
        self._include = include_stop
        self._borders = [_borders(stop) for stop in self._stops]
        # By stop string, number of its characters that the text ends with.
        self._states = [0] * len(self._stops)
        self._held = ""
        self.matched: str | None = None

    def append(self, text: str) -> str:
        """Return the text that is safe to show: no stop string begins in it. Check `matched` afterwards."""
        if not self._stops or self.matched is not None:
            return text if not self._stops else ""
        end, matched = len(text) + 1, -1
        # Stop strings are sorted by length, so the longest of several that end together wins.
        for number in range(len(self._stops)):
            own_end = self._advance(number, text)
            if own_end < end:
                end, matched = own_end, number
        text = self._held + text
        if matched >= 0:
            self.matched = self._stops[matched]
            stop_at = len(self._held) + end
            self._held = ""
            return text[: stop_at if self._include else stop_at - len(self.matched)]
        held = max(self._states)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return the held-back text, at the end of an output without a match."""
        text, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return text

    def copy(self) -> Self:
        """Copy the state for a fork (a beam, another of n outputs)."""
        twin = object.__new__(type(self))
        for name in self.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._states = list(self._states)
        return twin

    def _advance(self, number: int, text: str) -> int:
        """Feed one stop string's automaton. Returns the end of the match in `text`, or len(text) + 1 if there is none."""
        stop, borders, state = self._stops[number], self._borders[number], self._states[number]
        if state == 0 and stop[0] not in text:
            return len(text) + 1
        for end, char in enumerate(text, 1):
            while state and stop[state] != char:
                state = borders[state]
            state += stop[state] == char
            if state == len(stop):
                self._states[number] = 0
                return end
        self._states[number] = state
        return len(text) + 1
