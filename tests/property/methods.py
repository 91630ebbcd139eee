"""Requests of every kind for the random loads: grammars, processors, strategies of one's own, beside plain ones."""

import random
from collections.abc import Sequence as Many
from typing import Self

import torch

from benchmarks.fake_model import EOS, NONE, VOCAB, allowed, draw, logits_of
from headrace.data.params import RefineParams
from headrace.data.plan import AnyWant, Feed, Ranked, Top
from headrace.data.structured import StructuredOutputs
from headrace.data.types import Child, Request, Sequence
from headrace.decoding.base import Outputs, Strategy
from headrace.decoding.processors import History
from headrace.engine.engine import Engine
from tests.property.test_engine import Job

NOTHING = bytes(-(-VOCAB // 32) * 4)  # the mask of a row after which nothing may come


def may_follow(last: int | None, token: int) -> bool:
    """The grammar: no token follows one that is a quarter of the way to it."""
    return last is None or (token - last) % 4 != 1


def mask_after(last: int | None) -> bytes:
    bits = sum(1 << token for token in range(VOCAB) if may_follow(last, token))
    return bits.to_bytes(len(NOTHING), "little")


class Following:
    """A constraint that remembers the last token, as `decoding.constrained.Constraint` is asked."""

    error = ""
    done = False
    whole = True

    def __init__(self, last: int | None = None) -> None:
        self.last = last

    def copy(self) -> Self:
        return type(self)(self.last)

    def push(self, token: int) -> None:
        self.error = "" if may_follow(self.last, token) else f"token {token} does not fit"
        self.last = token

    def masks(self, tokens: Many[int] = (), parents: Many[int] = ()) -> bytes:
        fits = self.fitting(tokens, parents)
        after = [mask_after(token) if fit else NOTHING for token, fit in zip(tokens, fits, strict=True)]
        return mask_after(self.last) + b"".join(after)

    def fitting(self, tokens: Many[int], parents: Many[int]) -> list[bool]:
        fits: list[bool] = []
        for token, parent in zip(tokens, parents, strict=True):
            before = self.last if parent < 0 else tokens[parent]
            fits.append((parent < 0 or fits[parent]) and may_follow(before, token))
        return fits


class Grammars:
    """What an engine asks for constraints."""

    def constraint(self, spec: StructuredOutputs) -> Following:
        return Following()


class Barring:
    """A processor that rules tokens out by their place in the output."""

    scope = "path"

    def apply(self, logits: torch.Tensor, history: History, paths: Many[Many[int]]) -> torch.Tensor:
        for row, path in zip(logits, paths, strict=True):
            row[(len(history.output) + len(path)) % 5 :: 5] = float("-inf")
        return logits


class SecondBest(Strategy):
    """A strategy on an existing want: the second likeliest token."""

    streams = True

    def width(self, request: Request) -> int:
        return 1

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (Top(2),) if last else ()

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return [[Child(token=answer.ids[1])] for _, (answer,) in outputs if isinstance(answer, Ranked)]

    def done(self, request: Request) -> bool:
        return False

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        return []


class AnyJob(Job):
    """Plain, held to a grammar, with a processor, or by a strategy of its own."""

    def __init__(self, rng: random.Random, number: int, prefixes: list[list[int]]) -> None:
        super().__init__(rng, number, prefixes)
        self.kind = ("grammar", "processor", "strategy", "plain")[number % 4]
        if self.kind == "grammar":
            self.params = self.params.replace(structured_outputs=StructuredOutputs(regex="any"))
        elif self.kind == "processor":
            self.params = self.params.replace(temperature=0.0)
        elif self.kind == "strategy":
            self.params = self.params.replace(n=1, temperature=1.0, prompt_logprobs=None)

    def add(self, engine: Engine) -> Request:
        engine.grammars = Grammars()  # type: ignore[assignment]
        processors = (Barring(),) if self.kind == "processor" else ()
        strategy = SecondBest() if self.kind == "strategy" else None
        return engine.add(self.prompt, self.params, request_id=self.id, processors=processors, strategy=strategy)

    def choose(self, tokens: list[int], seed: int, child: int) -> int:
        if self.kind == "plain":
            return draw(tokens, seed, child)
        if self.kind == "grammar":
            last = tokens[-1] if len(tokens) > len(self.prompt) else None
            token = allowed(draw(tokens, seed, child), mask_after(last))
            assert token != NONE
            return token
        logits = logits_of(tokens)
        ranked = sorted(range(VOCAB), key=lambda token: -logits[token])
        if self.kind == "strategy":
            return ranked[1]
        return next(token for token in ranked if token % 5 != (len(tokens) - len(self.prompt)) % 5)


class BlockJob(Job):
    """Plain, or filled in block by block."""

    mask = 1
    blocks = RefineParams(block=3, passes=2)
    nodes = blocks.block

    def __init__(self, rng: random.Random, number: int, prefixes: list[list[int]]) -> None:
        super().__init__(rng, number, prefixes)
        self.filled = number % 2 == 0
        if self.filled:
            self.params = self.params.replace(n=1, prompt_logprobs=None, refine=self.blocks)

    def add(self, engine: Engine) -> Request:
        engine.limits.mask_id = self.mask
        return super().add(engine)

    def expected(self) -> list[list[int]]:
        if not self.filled:
            return super().expected()
        answer: list[int] = []
        while len(answer) < (self.params.max_tokens or 0):
            answer += self._block(self.prompt + answer)
        answer = answer[: self.params.max_tokens]
        ends = not self.params.ignore_eos and EOS in answer
        return [answer[: answer.index(EOS) + 1] if ends else answer]

    def _block(self, known: list[int]) -> list[int]:
        """Guessed, the least sure but a half of it again, and guessed once more: one of three after two passes."""
        first = [self._guess([*known, *[self.mask] * 3, VOCAB + at]) for at in range(3)]
        least = min(range(3), key=lambda at: (first[at][1], -at))
        block = [self.mask if at == least else token for at, (token, _) in enumerate(first)]
        again = self._guess([*known, *block, VOCAB + least])
        return [again[0] if at == least else token for at, token in enumerate(block)]

    def _guess(self, context: list[int]) -> tuple[int, float]:
        logits = logits_of(context)
        best = max((token for token in range(VOCAB) if token != self.mask), key=lambda token: logits[token])
        return best, logits[best]
