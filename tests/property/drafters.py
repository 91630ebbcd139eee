"""Drafters of tests: they know what the fake model will say, and spoil it as a random number pleases."""

import random

from benchmarks.fake_model import VOCAB, draw
from headrace.data.types import Draft, Request, Sequence


class Guessing:
    """Random trees in which each true continuation is found with some probability, at a random place among its siblings."""

    name = "guessing"

    def __init__(self, seed: int, truth: float = 0.7, nodes: int = 12) -> None:
        self.rng = random.Random(seed)
        self.truth = truth
        self.nodes = nodes

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        rng = self.rng
        draft = Draft([], [])
        context = list(seq.tokens)
        tip, depth = -1, 0  # where the true continuation is looked for
        for _ in range(rng.randrange(self.nodes)):
            node = len(draft.tokens)
            if tip is not None and rng.random() < self.truth / 2 and depth < most:
                context.append(draw(context, request.seed, seq.decode.index))
                draft.tokens.append(context[-1])
                draft.parents.append(tip)
                tip, depth = node, depth + 1
            else:
                draft.tokens.append(rng.randrange(VOCAB))
                draft.parents.append(rng.randrange(-1, node))
        return draft if draft.tokens else None


class Chain:
    """The true continuation, wrong from a random place on."""

    name = "chain"

    def __init__(self, seed: int, truth: float = 0.8) -> None:
        self.rng = random.Random(seed)
        self.truth = truth

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        context = list(seq.tokens)
        while len(context) - len(seq.tokens) < most:
            right = self.rng.random() < self.truth
            context.append(draw(context, request.seed, seq.decode.index) if right else self.rng.randrange(VOCAB))
        tokens = context[len(seq.tokens) :]
        return Draft(tokens, list(range(-1, len(tokens) - 1)))
