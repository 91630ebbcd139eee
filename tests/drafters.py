"""A drafter of tests: it has seen the answer, and spoils it as a random number pleases."""

import random

from headrace.data.types import Draft, Request, Sequence


class Replaying:
    """Trees around answers that are known: `answers[prompt, seed, child]`, the truth at a random place among its siblings."""

    name = "replaying"

    def __init__(self, answers: dict[tuple[tuple[int, ...], int, int], list[int]], vocab: int, seed: int = 0) -> None:
        self.answers = answers
        self.vocab = vocab
        self.rng = random.Random(seed)

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        rng = self.rng
        answer = self.answers[tuple(request.prompt), request.seed, seq.decode.index]
        drawn = len(seq.tokens) - seq.prompt_len
        draft = Draft([], [])
        tip, depth = -1, 0  # where the truth is looked for
        for node in range(rng.randrange(10)):
            if rng.random() < 0.6 and depth < most and drawn + depth < len(answer):
                draft.tokens.append(answer[drawn + depth])
                draft.parents.append(tip)
                tip, depth = node, depth + 1
            else:
                draft.tokens.append(rng.randrange(self.vocab))
                draft.parents.append(rng.randrange(-1, node) if node else -1)
        return draft if draft.tokens else None
