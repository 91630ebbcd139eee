"""Jacobi and lookahead decoding: the target drafts for itself, in the same step that verifies.

Jacobi (Santilli et al. 2023): guess n tokens, and let every step's own answers be the next guess. Lookahead (Fu et al. 2024):
keep several such trajectories, collect the n-grams they pass through, and verify those that begin with the last token. Under
sampling the answers are drawn with each position's own noise, so a trajectory converges to what sampling would have said.
"""

import random
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import takewhile

from headrace.data.plan import MAX_NODES, Answer, Drawn
from headrace.data.types import Draft, Request, Sequence

LENGTH = 5  # of lookahead's n-grams


class Jacobi:
    """Proposes the last step's answers for the next `width` tokens; at first, tokens of the prompt."""

    name = "jacobi"

    def __init__(self, width: int = 8) -> None:
        self.width = width

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        guess = seq.decode.memory.get(self.name, [])
        width = min(self.width, most)
        guess = [*guess[:width], *_noise(request, seq, width - len(guess))]
        return Draft(guess, list(range(-1, width - 1)), drafter=self.name, observed=True)

    def observe(self, request: Request, seq: Sequence, draft: Draft, path: tuple[int, ...], nodes: tuple[Answer, ...]) -> None:
        """What was answered behind the accepted nodes is the next guess; the first of it is already a token."""
        behind = takewhile(lambda token: token is not None, map(_token, nodes[len(path) :]))  # after a node nothing may come
        seq.decode.memory[self.name] = list(behind)


@dataclass(slots=True)
class Window:
    """The trajectories of one sequence: `levels[i][j]` is i steps along the one that began j + 1 tokens ahead."""

    levels: list[list[int]]
    pool: OrderedDict[int, OrderedDict[tuple[int, ...], None]] = field(default_factory=OrderedDict)  # by first token
    read: int = 0  # tokens whose n-grams are in the pool, where the prompt's and the output's are taken too


class Lookahead:
    """A window of `width` trajectories of `length` - 1 tokens, and up to `guesses` collected n-grams to verify, as one tree.

    A node of the window descends from the first level up to its column and then along its own trajectory; guesses descend
    from the last known token. A draft's memo has a column at the node whose answer extends that trajectory. `from_prompt`
    takes n-grams from the text itself too (the authors' POOL_FROM_PROMPT), which is prompt lookup by another name.
    """

    name = "lookahead"
    trees = True

    def __init__(self, width: int = 7, length: int = LENGTH, guesses: int = 7, *, from_prompt: bool = False) -> None:
        nodes = (width + guesses) * (length - 1)
        if length < 2 or nodes > MAX_NODES:
            raise ValueError(f"lookahead needs length >= 2 and (width + guesses) * (length - 1) <= {MAX_NODES}, not {nodes}")
        self.width, self.length, self.guesses = width, length, guesses
        self.from_prompt = from_prompt
        self.most_firsts = 4096  # first tokens the pool of a sequence remembers

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
        draft.confidence = 2 if draft.tokens else 1  # without a guess little can be accepted, which says nothing of guesses
        root = -1
        for column in range(min(self.width, most - len(window.levels) + 1)):
            root = node = _append(draft, window.levels[0][column], root)
            for level in window.levels[1:]:
                node = _append(draft, level[column], node)
            draft.memo[node] = column
        return draft if draft.tokens else None

    def observe(self, request: Request, seq: Sequence, draft: Draft, path: tuple[int, ...], nodes: tuple[Answer, ...]) -> None:
        """Collect what each trajectory has passed through, and move the window past the tokens that came out."""
        window: Window = seq.decode.memory[self.name]
        for column, token in zip(draft.memo, map(_token, nodes), strict=False):  # a tree may have been cut short
            if column is None or token is None:  # a trajectory that was not fed, or after which nothing may come, stays
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
        if len(window.pool) > self.most_firsts:
            window.pool.popitem(last=False)

    def _read(self, window: Window, tokens: list[int]) -> None:
        for start in range(window.read, len(tokens) - self.length + 1):
            self._collect(window, tuple(tokens[start : start + self.length]))
        window.read = max(window.read, len(tokens) - self.length + 1)


def _token(answer: Answer) -> int | None:
    """What was drawn after a node; None: nothing may come there."""
    return answer.tokens[0] if isinstance(answer, Drawn) else None


def _append(draft: Draft, token: int, parent: int) -> int:
    draft.tokens.append(token)
    draft.parents.append(parent)
    draft.memo.append(None)
    return len(draft.tokens) - 1


def _graft(draft: Draft, tokens: tuple[int, ...], children: dict[tuple[int, int], int]) -> None:
    """Add a chain below the root, sharing what is there."""
    node = -1
    for token in tokens:
        if (node, token) not in children:
            children[node, token] = _append(draft, token, node)
        node = children[node, token]


def _noise(request: Request, seq: Sequence, count: int, salt: int = 0) -> list[int]:
    """Tokens of the text at random, always the same ones for the same text: where a trajectory begins matters little."""
    return random.Random(hash((request.seed, len(seq.tokens), salt))).choices(seq.tokens, k=max(count, 0))
