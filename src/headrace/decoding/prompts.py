"""Strategies for prompts alone: log-probabilities of their tokens, embeddings, classes."""

import math

from headrace.data.plan import (
    Align,
    Aligned,
    Answers,
    AnyWant,
    Classified,
    Classify,
    Feed,
    Pool,
    Pooled,
    Score,
    Scores,
    Threshold,
    TokenLogprob,
    Where,
)
from headrace.data.types import ALL, Child, Draft, Request, Sequence
from headrace.decoding.base import Outputs, Strategy

POOLS = ("first", "last", "mean")
LISTED = 10  # likeliest tokens, among which the end of a text is looked for


class Scoring(Strategy):
    """Ends a request when its prompt has been fed; used with `prompt_logprobs`."""

    generates = False
    honours = frozenset({"prompt_logprobs"})


class Pooling(Strategy):
    """Stores the prompt's pooled hidden row in `request.pooled`: the first, the last, or the sum for the mean.

    The sum is float64 in the order of positions, so it does not depend on how the prompt is cut into chunks.
    """

    generates = False

    def __init__(self, pool: str) -> None:
        self.pool = pool

    def shares(self, request: Request) -> int:
        return 0 if self.pool == "mean" else ALL

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        """A mean sums every row once; each chunk, also after a preemption, continues the sum."""
        if self.pool == "mean":
            return (Pool(Where.ALL, request.state or 0, tuple(request.pooled)),)
        return (Pool(Where(self.pool)),) if last else ()

    def observe(self, request: Request, seq: Sequence, feed: Feed, answers: Answers) -> None:
        for answer in answers:
            if isinstance(answer, Pooled):
                request.pooled[:] = answer.row
                request.state = max(request.state or 0, feed.start + feed.count)


class Classifying(Strategy):
    """Stores in `request.classified` the logits of each exit that the prompt passed, up to the first whose confidence passes
    the threshold. An empty criterion uses the full model."""

    generates = False

    def __init__(self, criterion: str = "", threshold: Threshold = 0.0) -> None:
        self.wanted = Classify(criterion, threshold)

    def shares(self, request: Request) -> int:
        return 0

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (self.wanted,)

    def observe(self, request: Request, seq: Sequence, feed: Feed, answers: Answers) -> None:
        for answer in answers:
            if isinstance(answer, Classified):
                request.classified[:] = answer.logits


class Aligning(Strategy):
    """Stores in `request.pooled` the position of the source at which each token of the prompt begins, from row `want.first` on,
    and then their log-probabilities without those of `end`, the token that ends a text."""

    generates = False
    uncut = True

    def __init__(self, want: Align, end: int) -> None:
        self.wanted, self.end = want, end

    def shares(self, request: Request) -> int:
        return 0

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (self.wanted, Score(LISTED))

    def observe(self, request: Request, seq: Sequence, feed: Feed, answers: Answers) -> None:
        aligned, scores = answers
        if isinstance(aligned, Aligned) and isinstance(scores, Scores):
            entries = scores.scores[self.wanted.first :][: len(aligned.starts) - 1]
            request.pooled[:] = [*map(float, aligned.starts), *(self._logprob(entry) for entry in entries)]

    def _logprob(self, entry: TokenLogprob) -> float:
        """Log-probability of a token if the text does not end before it."""
        listed = dict(zip(entry.top_ids, entry.top_logprobs, strict=True))
        ends = math.exp(listed.get(self.end, -math.inf))
        return entry.logprob - (math.log1p(-ends) if ends < 1 else 0.0)


class Scored(Strategy):
    """Another strategy, with log-probabilities of prompt tokens from `params.prompt_logprobs_start` on in
    `request.prompt_logprobs`."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.streams, self.speculates, self.drops_failed = inner.streams, inner.speculates, inner.drops_failed
        self.generates, self.honours = inner.generates, inner.honours

    def width(self, request: Request) -> int:
        return self.inner.width(request)

    def nodes(self, request: Request) -> int:
        return self.inner.nodes(request)

    def shares(self, request: Request) -> int:
        """Every row that scores a token still has to be fed."""
        known = ALL if _complete(request) else max(len(request.prompt_logprobs), _start(request)) - 1
        return min(known, self.inner.shares(request))

    def draft(self, request: Request, seq: Sequence) -> Draft | None:
        return self.inner.draft(request, seq)

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        wants = self.inner.want(request, seq, feed, last)
        scores = not _complete(request) and feed.start + feed.count >= _start(request)
        return (Score(request.params.prompt_logprobs or 0), *wants) if scores else wants

    def observe(self, request: Request, seq: Sequence, feed: Feed, answers: Answers) -> None:
        """Row p scores token p + 1; tokens before the first requested one have no score."""
        scored = request.prompt_logprobs
        if answers and isinstance(answers[0], Scores):
            scored += [None] * (_start(request) - len(scored))
            for at, score in enumerate(answers[0].scores, feed.start + 1):
                if at == len(scored) and at < len(request.prompt):
                    scored.append(score)
            request.shares = self.shares(request)
        self.inner.observe(request, seq, feed, _rest(answers))

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return self.inner.select(request, [(seq, _rest(answers)) for seq, answers in outputs])

    def done(self, request: Request) -> bool:
        return self.inner.done(request)

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        return self.inner.results(request)


def _start(request: Request) -> int:
    """The first token with a score; the prompt's first token never has one."""
    return max(request.params.prompt_logprobs_start, 1)


def _complete(request: Request) -> bool:
    return len(request.prompt_logprobs) >= len(request.prompt)


def _rest(answers: Answers) -> Answers:
    """The answers of the inner strategy."""
    return answers[1:] if answers and isinstance(answers[0], Scores) else answers
