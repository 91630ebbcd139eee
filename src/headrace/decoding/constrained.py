"""Outputs held to a grammar: what may come next is a bit mask over the vocabulary, computed by `llguidance`.

A grammar is compiled once, under limits of size and work, by whichever thread asks for it; each output then has a
`Constraint`, which is told every token and says what may follow. Nothing is let through in doubt: a constraint that fails
says why, gives no more masks, and its request ends with an error.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Self

import llguidance
import numpy as np

from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.grammar import grammar_of
from headrace.text.tokenizer import Tokenizer

__all__ = ["Constraint", "ConstraintError", "Grammars", "limits"]

REMEMBERED = 64  # compiled grammars


def limits() -> llguidance.LLParserLimits:
    """What one grammar may cost: about 20 ms of work to begin with, 15 ms and 50,000 parser items a mask, 50 MB of states."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2000,
        max_lexer_states=25_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Constraint:
    """Where one output stands in its grammar."""

    __slots__ = ("_matcher", "_words", "done", "error")

    def __init__(self, matcher: Any, words: int) -> None:
        self._matcher = matcher
        self._words = words
        self.error = ""  # why nothing may come any more, though the output is not whole
        self.done = False  # the output is whole, and nothing can follow

    def copy(self) -> Self:
        """The same place, for a fork."""
        twin = type(self)(self._matcher.deep_copy(), self._words)
        twin.error, twin.done = self.error, self.done
        return twin

    def push(self, token: int) -> None:
        """The output has grown by a token."""
        if self.error or self.done:
            return
        if not self._matcher.consume_token(token):
            self.error = _why(self._matcher) or f"token {token} does not fit the constraint"
        elif self._matcher.is_stopped():
            self.done = self._matcher.is_accepting()
            self.error = "" if self.done else _why(self._matcher) or "the constraint leaves nothing that may come"

    def masks(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> bytes:
        """One bit per token id (little-endian words of 32), set where it may come: a row for the next token, and one for
        what follows each node of a draft tree, zeros where the node itself does not fit or the matcher fails behind it, which
        may never be reached. Empty after a failure."""
        rows = np.zeros((1 + len(tokens), self._words), dtype=np.uint32)
        for row, matcher in enumerate([self._matcher, *self._nodes(tokens, parents)]):
            if matcher is None or self.error:
                continue
            matcher.unsafe_compute_mask_ptr(rows[row].ctypes.data, rows[row].nbytes)
            if matcher.is_error():
                rows[row] = 0
                self.error = "" if row else _why(matcher) or "the constraint has failed"
        return b"" if self.error else rows.tobytes()

    def fitting(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a draft tree may come, with all those above them."""
        return [matcher is not None for matcher in self._nodes(tokens, parents)]

    @property
    def whole(self) -> bool:
        """Whether the output could end here."""
        return not self.error and bool(self._matcher.is_accepting())

    def _nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Any]:
        """The matcher after each node, None where the node does not fit."""
        matchers: list[Any] = []
        for token, parent in zip(tokens, parents, strict=True):
            before = self._matcher if parent < 0 else matchers[parent]
            after = None if before is None or self.error else before.deep_copy()
            matchers.append(after if after is not None and after.consume_token(token) else None)
        return matchers


def _why(matcher: Any) -> str:
    """The matcher's own words, in one line."""
    return " ".join(str(matcher.get_error()).split())[:300]


class Grammars:
    """Compiled grammars of one vocabulary. Any thread may ask; `vocab_size` is that of the logits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._words = -(-vocab_size // 32)
        self._vocabulary: Any = None
        self._ready: OrderedDict[StructuredOutputs, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._building = threading.Lock()

    def constraint(self, spec: StructuredOutputs, grammar: str = "") -> Constraint:
        """The beginning of an output held to `spec`. Compiles it unless that was done lately. Raises ConstraintError.

        `grammar`: what `grammar_of` made of it elsewhere; without it that is done here, in Python.
        """
        with self._lock:
            matcher = self._ready.get(spec)
            if matcher is not None:
                self._ready.move_to_end(spec)
                return Constraint(matcher.deep_copy(), self._words)
        matcher = self._compile(grammar or grammar_of(spec))
        with self._lock:
            self._ready[spec] = matcher
            while len(self._ready) > REMEMBERED:
                self._ready.popitem(last=False)
            return Constraint(matcher.deep_copy(), self._words)

    def _compile(self, grammar: str) -> Any:
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise ConstraintError(f"the constraint cannot be compiled: {_why(matcher)}")
        first = Constraint(matcher.deep_copy(), self._words).masks()
        if matcher.is_stopped() or not any(first):
            raise ConstraintError("the constraint allows no output, or none but an empty one; let it say more")
        return matcher


class _Spelling:
    """What llguidance asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        special = tokenizer.special_ids | set(eos_ids)
        self.tokens = [tokenizer.token_text(i).encode() if i in special else tokenizer.token_bytes(i) for i in range(size)]
        self.special_token_ids = sorted(i for i in special if i < size)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: list[int]) -> Any:
    """The tokens' bytes as a trie. Raises ConstraintError where an output could never end."""
    if not eos_ids:
        raise ConstraintError("this model has no end token, so an output cannot be held to a constraint")
    spelling = _Spelling(tokenizer, min(tokenizer.vocab_size, vocab_size), eos_ids)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(spelling), n_vocab=vocab_size, eos_token=eos_ids)
