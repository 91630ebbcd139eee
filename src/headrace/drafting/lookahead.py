"""Jacobi and lookahead decoding: the target drafts for itself, in the same step that verifies.

Jacobi: guess n tokens; the answers of each step are the next guess. Lookahead: keep several such trajectories, collect the
n-grams they pass through, and verify those that begin with the last token. Under sampling each position has its own noise, so a
trajectory converges to the tokens that plain sampling draws.

Source: Santilli et al., "Accelerating Transformer Inference for Translation via Parallel Decoding", arXiv 2305.10427; Fu et
al., "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", arXiv 2402.02057.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile

from headrace.data.plan import MAX_NODES, Answer, Drawn
from headrace.data.types import Draft, Request, Sequence

LENGTH = 5  # tokens of a lookahead n-gram


class Jacobi:
    """Proposes the last step's answers for the next `width` tokens; in the first step random tokens of the text."""

    name = "jacobi"

    def __init__(self, width: int = 8) -> None:
        self.width = width

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        guess = seq.decode.memory.get(self.name, [])
        width = min(self.width, most)
        guess = [*guess[:width], *_noise(request, seq, width - len(guess))]
        return Draft(guess, list(range(-1, width - 1)), drafter=self.name, observed=True)

    def observe(self, request: Request, seq: Sequence, draft: Draft, path: tuple[int, ...], nodes: tuple[Answer, ...]) -> None:
        """The answers behind the accepted nodes are the next guess."""
        behind = takewhile(lambda token: token is not None, map(_token, nodes[len(path) :]))
        seq.decode.memory[self.name] = list(behind)


@dataclass(slots=True)
class Window:
    """The trajectories of one sequence. levels[i][j]: token i of the trajectory that began j + 1 tokens ahead. pool: collected
    n-grams, by their first token."""

    levels: list[list[int]]
    pool: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=OrderedDict)
    read: int = 0  # tokens of the text whose n-grams are in the pool (`from_prompt`)


class Lookahead:
    """Drafts one tree: a window of `width` trajectories of `length` - 1 tokens, and up to `guesses` collected n-grams to
    verify.

    The ancestors of a window node are the first level up to its column, and then its own trajectory. Guesses descend from the
    last known token. A draft's memo has the column at the node whose answer extends that trajectory. from_prompt: collect the
    n-grams of the text too (the authors' POOL_FROM_PROMPT), like prompt lookup.
    """

    name = "lookahead"
    trees = True

    def __init__(self, width: int = 7, length: int = LENGTH, guesses: int = 7, *, from_prompt: bool = False) -> None:
        nodes = (width + guesses) * (length - 1)
        if length < 2 or nodes > MAX_NODES:
            raise ValueError(f"lookahead needs length >= 2 and (width + guesses) * (length - 1) <= {MAX_NODES}, not {nodes}")
        self.width, self.length, self.guesses = width, length, guesses
        self.from_prompt = from_prompt
        self.max_pool = 4096  # first tokens in the pool of a sequence

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        if self.width == 0 or self.guesses == 0:
            return None
        window = self._window(request, seq)
        if self.from_prompt:
            self._read(window, seq.tokens)
        draft = Draft([], [], drafter=self.name, observed=True, memo=[])
        children: dict[tuple[int, int], int] = {}
        for guess in reversed(window.pool.get(seq.tokens[-1], {})):  # the latest first
            _graft(draft, guess[:most], children)
        # Drafts with and without guesses have acceptance averages of their own.
        draft.confidence = 2 if draft.tokens else 1
        root = -1
        for column in range(min(self.width, most - len(window.levels) + 1)):
            root = node = _append(draft, window.levels[0][column], root)
            for level in window.levels[1:]:
                node = _append(draft, level[column], node)
            draft.memo[node] = column
        return draft if draft.tokens else None

    def observe(self, request: Request, seq: Sequence, draft: Draft, path: tuple[int, ...], nodes: tuple[Answer, ...]) -> None:
        """Collect the n-gram of each trajectory, and move the window past the accepted tokens."""
        window: Window = seq.decode.memory[self.name]
        # A tree that was cut has fewer nodes than memo entries.
        for column, token in zip(draft.memo, map(_token, nodes), strict=False):
            # A trajectory that was not fed, or whose answer has no token, does not move.
            if column is None or token is None:
                continue
            passed = (*(level[column] for level in window.levels), token)
            self._collect(window, passed)
            for level, passing in zip(window.levels, passed[1:], strict=True):
                level[column] = passing
        shift = len(path)
        fresh = _noise(request, seq, min(shift, self.width))
        window.levels = [[*level[shift:], *fresh][: self.width] for level in window.levels]

    def _window(self, request: Request, seq: Sequence) -> Window:
        if self.name not in seq.decode.memory:
            levels = [_noise(request, seq, self.width, level) for level in range(self.length - 1)]
            seq.decode.memory[self.name] = Window(levels)
        window: Window = seq.decode.memory[self.name]
        return window

    def _collect(self, window: Window, ngram: tuple[int, ...]) -> None:
        known = window.pool.setdefault(ngram[0], OrderedDict())
        window.pool.move_to_end(ngram[0])
        known[ngram[1:]] = None
        known.move_to_end(ngram[1:])
        if len(known) > self.guesses:
            known.popitem(last=False)
        if len(window.pool) > self.max_pool:
            window.pool.popitem(last=False)

    def _read(self, window: Window, tokens: list[int]) -> None:
        for start in range(window.read, len(tokens) - self.length + 1):
            self._collect(window, tuple(tokens[start : start + self.length]))
        window.read = max(window.read, len(tokens) - self.length + 1)


def _token(answer: Answer) -> int | None:
    """The token drawn after a node; None if the grammar allows none."""
    return answer.tokens[0] if isinstance(answer, Drawn) else None


def _append(draft: Draft, token: int, parent: int) -> int:
    draft.tokens.append(token)
    draft.parents.append(parent)
    draft.memo.append(None)
    return len(draft.tokens) - 1


def _graft(draft: Draft, tokens: tuple[int, ...], children: dict[tuple[int, int], int]) -> None:
    """Add a chain below the root; equal beginnings share nodes."""
    node = -1
    for token in tokens:
        if (node, token) not in children:
            children[node, token] = _append(draft, token, node)
        node = children[node, token]


def _noise(request: Request, seq: Sequence, count: int, salt: int = 0) -> list[int]:
    """Random tokens of the text, the same ones for the same text and seed: the start of a trajectory matters little."""
    return random.Random(hash((request.seed, len(seq.tokens), salt))).choices(seq.tokens, k=max(count, 0))
