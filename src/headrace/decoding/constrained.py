"""Outputs constrained by a grammar: a bit mask over the vocabulary per token, computed by `llguidance`.

`Grammars` compiles a grammar once and remembers it. Each output has a `Constraint`, which consumes the output's tokens and
computes the mask of the next one. A constraint that fails keeps the reason, gives no more masks, and its request ends with an
error.

`llguidance` limits its work while an output is generated, but not while it compiles: `{"multipleOf": 999983}` takes 10 s and
360 MB. So a server compiles first in a confined process, which measures the cost (`Grammars.measure`) and refuses a grammar
above `MOST_SECONDS` or `MOST_BYTES`; the engine then repeats the same work.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import llguidance
import numpy as np

from headrace import host
from headrace.data.structured import ConstraintError, StructuredOutputs
from headrace.decoding.grammar import grammar_of
from headrace.text.tokenizer import Tokenizer

__all__ = ["MOST_BYTES", "MOST_SECONDS", "Constraint", "ConstraintError", "Cost", "Grammars", "limits"]

MOST_SECONDS = 1.0  # CPU time to compile a grammar that a client of a server sent
MOST_BYTES = 32 << 20  # memory of one after compilation
GROWTH = 24 << 20  # bytes that an automaton may gain: 22 MB were measured for the 25,000 states of `limits`
REMEMBERED = 512 << 20  # bytes of compiled grammars kept for later requests, growth included


def limits() -> llguidance.LLParserLimits:
    """Limits while an output is generated: 15 ms and 50,000 parser items per mask, 25,000 states per grammar."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_items_in_row=2000,
        max_lexer_states=25_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


@dataclass(slots=True)
class _Compiled:
    """A compiled grammar. All copies of its matcher share one lexer, and a lexer that exceeds a limit fails for good."""

    matcher: Any
    bytes: int  # upper bound of its memory
    lexer_failed: bool = False


class Constraint:
    """One output's position in its grammar."""

    __slots__ = ("_compiled", "_matcher", "_words", "done", "error")

    def __init__(self, matcher: Any, words: int, compiled: _Compiled | None = None) -> None:
        self._matcher = matcher
        self._words = words
        self._compiled = compiled
        self.error = ""  # why no token can follow although the output is incomplete
        self.done = False  # the output is complete, and no token can follow

    def copy(self) -> Self:
        """The same position, for a fork."""
        twin = type(self)(self._matcher.deep_copy(), self._words, self._compiled)
        twin.error, twin.done = self.error, self.done
        return twin

    def push(self, token: int) -> None:
        """Advance by a token of the output."""
        if self.error or self.done:
            return
        if not self._matcher.consume_token(token):
            self.error = self._failure(self._matcher) or f"token {token} does not fit the constraint"
        elif self._matcher.is_stopped():
            self.done = self._matcher.is_accepting()
            self.error = "" if self.done else self._failure(self._matcher) or "the constraint leaves nothing that may come"

    def masks(self, tokens: Sequence[int] = (), parents: Sequence[int] = ()) -> bytes:
        """One bit per token id (little-endian words of 32), set for allowed tokens: a row for the next token and one for the
        token after each node of a draft tree. A row is zero if its node does not fit or the matcher fails after it; such a node
        may never be reached. Empty after a failure."""
        rows = np.zeros((1 + len(tokens), self._words), dtype=np.uint32)
        for row, matcher in enumerate([self._matcher, *self._nodes(tokens, parents)]):
            if matcher is None or self.error:
                continue
            matcher.unsafe_compute_mask_ptr(rows[row].ctypes.data, rows[row].nbytes)
            if matcher.is_error():
                rows[row] = 0
                reason = self._failure(matcher)
                self.error = "" if row else reason or "the constraint has failed"
        return b"" if self.error else rows.tobytes()

    def fitting(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Which nodes of a draft tree fit the grammar, with all their ancestors."""
        return [matcher is not None for matcher in self._nodes(tokens, parents)]

    @property
    def whole(self) -> bool:
        """Whether the output could end here."""
        return not self.error and bool(self._matcher.is_accepting())

    def _failure(self, matcher: Any) -> str:
        """Why a matcher failed. If its lexer failed, no later output may start from this compiled grammar."""
        reason = _why(matcher)
        if self._compiled is not None and reason.startswith("lexer error"):
            self._compiled.lexer_failed = True
        return reason

    def _nodes(self, tokens: Sequence[int], parents: Sequence[int]) -> list[Any]:
        """The matcher after each node; None if the node does not fit."""
        matchers: list[Any] = []
        for token, parent in zip(tokens, parents, strict=True):
            before = self._matcher if parent < 0 else matchers[parent]
            after = None if before is None or self.error else before.deep_copy()
            matchers.append(after if after is not None and after.consume_token(token) else None)
        return matchers


def _why(matcher: Any) -> str:
    """The matcher's error message, in one line."""
    return " ".join(str(matcher.get_error()).replace("<non-verbose/>", "").split())[:300]


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU seconds and bytes of memory that compiling a grammar took."""

    seconds: float
    bytes: int

    def check(self) -> None:
        """Raises ConstraintError if a server must not compile this grammar."""
        if self.seconds > MOST_SECONDS:
            raise ConstraintError(
                f"the constraint takes {self.seconds:.1f} s to compile, at most {MOST_SECONDS:g} s is allowed; make it smaller"
            )
        if self.bytes > MOST_BYTES:
            took, most = self.bytes / 2**20, MOST_BYTES >> 20
            raise ConstraintError(
                f"the constraint takes {took:.0f} MiB when compiled, at most {most} MiB is allowed; make it smaller"
            )


class Grammars:
    """Compiled grammars of one vocabulary, the most recently used ones up to `REMEMBERED` bytes. All methods are thread-safe.
    `vocab_size` is the number of logits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = sorted(eos_ids)
        self._words = -(-vocab_size // 32)
        self._vocabulary: Any = None
        self._ready: OrderedDict[StructuredOutputs, _Compiled] = OrderedDict()
        self._lock = threading.Lock()
        self._building = threading.Lock()

    def find(self, spec: StructuredOutputs) -> Constraint | None:
        """The start of an output if its grammar is remembered."""
        with self._lock:
            known = self._ready.get(spec)
            if known is None or known.lexer_failed:
                return None
            self._ready.move_to_end(spec)
            return Constraint(known.matcher.deep_copy(), self._words, known)

    def constraint(self, spec: StructuredOutputs, grammar: str = "", size: int | None = None) -> Constraint:
        """The start of an output. Compiles its grammar unless it is remembered. Raises ConstraintError.

        `grammar` and `size` (bytes): results of `grammar_of` and `measure` in a confined process; if missing, they are computed
        here.
        """
        if (found := self.find(spec)) is not None:
            return found
        before = host.heap_memory()
        matcher = self._compile(grammar or grammar_of(spec))
        made = _Compiled(matcher, GROWTH + (max(0, host.heap_memory() - before) if size is None else size))
        with self._lock:
            self._ready[spec] = made
            self._ready.move_to_end(spec)
            while len(self._ready) > 1 and sum(one.bytes for one in self._ready.values()) > REMEMBERED:
                self._ready.popitem(last=False)
        return Constraint(matcher.deep_copy(), self._words, made)

    def measure(self, grammar: str) -> Cost:
        """Compile a grammar, drop it, and return what that took. Raises ConstraintError. Other threads must be idle: their
        memory counts too."""
        self.prepare()
        memory, seconds = host.heap_memory(), time.process_time()
        matcher = self._compile(grammar)
        cost = Cost(time.process_time() - seconds, max(0, host.heap_memory() - memory))
        del matcher
        return cost

    def prepare(self) -> None:
        """Build the trie of the vocabulary, once. Raises ConstraintError if the model has no end token."""
        with self._building:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._eos_ids)

    def _compile(self, grammar: str) -> Any:
        self.prepare()
        matcher = llguidance.LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise ConstraintError(f"the constraint cannot be compiled: {_why(matcher)}")
        first = Constraint(matcher.deep_copy(), self._words)
        mask = first.masks()
        if first.error:
            raise ConstraintError(f"the constraint cannot be compiled: {first.error}")
        if matcher.is_stopped() or not any(mask):
            raise ConstraintError("the constraint allows no output but an empty one; extend it")
        return matcher


class _Spelling:
    """A tokenizer with the attributes that llguidance reads."""

    def __init__(self, tokenizer: Tokenizer, size: int, eos_ids: list[int]) -> None:
        self._tokenizer = tokenizer
        special, known = tokenizer.special_ids | set(eos_ids), min(tokenizer.vocab_size, size)
        self.tokens = [tokenizer.token_text(i).encode() if i in special else tokenizer.token_bytes(i) for i in range(known)]
        # Ids that the tokenizer lacks fit no grammar.
        self.tokens += [b""] * (size - known)
        self.special_token_ids = sorted(i for i in special if i < known)
        self.eos_token_id = eos_ids[0]
        self.bos_token_id = tokenizer.bos_id

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, eos_ids: list[int]) -> Any:
    """The trie of the tokens' bytes. Raises ConstraintError if the model has no end token."""
    if not eos_ids:
        raise ConstraintError("this model has no end token, so its output cannot be constrained")
    spelling = _Spelling(tokenizer, vocab_size, eos_ids)
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(spelling), n_vocab=vocab_size, eos_token=eos_ids)
