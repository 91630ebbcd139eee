"""What is asked of prompts: what a chunk brings is filed once, and a strategy that is wrapped does not see it."""

from typing import Any

import pytest

from headrace.data.params import SamplingParams
from headrace.data.plan import Answers, AnyWant, Drawn, Feed, Pool, Pooled, Sample, Score, Scores, TokenLogprob, Where
from headrace.data.types import ALL, Child, Request, Sequence
from headrace.decoding.base import Outputs, Strategy
from headrace.decoding.prompts import Pooling, Scored

SCORES = [TokenLogprob(token, -float(token)) for token in range(9)]


def request_with(strategy: Strategy, prompt: int = 12, **params: Any) -> tuple[Request, Sequence]:
    tokens = list(range(prompt))
    request = Request("r", tokens, SamplingParams(**params), 0, strategy, 0)
    return request, Sequence(0, list(tokens), prompt)


class Seeing(Strategy):
    """Wants a token at the end of the prompt, and remembers what it is shown."""

    def __init__(self) -> None:
        self.observed: list[Answers] = []
        self.selected: list[Answers] = []

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (Sample(),) if last else ()

    def observe(self, request: Request, seq: Sequence, feed: Feed, answers: Answers) -> None:
        self.observed.append(answers)

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        self.selected += [answers for _, answers in outputs]
        return [[Child(token=3)] for _ in outputs]


# -- embeddings ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["first", "last"])
def test_pooling_wants_one_row_of_the_last_chunk(pool: str) -> None:
    strategy = Pooling(pool)
    request, seq = request_with(strategy)
    assert strategy.want(request, seq, Feed(0, 0, 8), False) == ()
    assert strategy.want(request, seq, Feed(0, 8, 4), True) == (Pool(Where(pool)),)
    strategy.observe(request, seq, Feed(0, 0, 8), ())
    assert request.pooled == []
    strategy.observe(request, seq, Feed(0, 8, 4), (Pooled((1.0, 2.0)),))
    assert request.pooled == [1.0, 2.0]


def test_a_mean_resumes_from_its_sum_after_preemption() -> None:
    strategy = Pooling("mean")
    request, seq = request_with(strategy)
    assert strategy.want(request, seq, Feed(0, 0, 8), False) == (Pool(Where.ALL, 0, ()),)
    strategy.observe(request, seq, Feed(0, 0, 8), (Pooled((1.0, 2.0)),))
    strategy.observe(request, seq, Feed(0, 0, 4), (Pooled((1.0, 2.0)),))  # after a preemption: nothing new
    assert strategy.want(request, seq, Feed(0, 4, 8), True) == (Pool(Where.ALL, 8, (1.0, 2.0)),)
    strategy.observe(request, seq, Feed(0, 4, 8), (Pooled((3.0, 4.0)),))
    assert (request.pooled, request.state) == ([3.0, 4.0], 12)


def test_only_a_mean_needs_every_row() -> None:
    assert [Pooling(pool).shares(request_with(Pooling(pool))[0]) for pool in ("first", "last", "mean")] == [ALL, ALL, 0]


# -- the scores of a prompt ----------------------------------------------------------------------------------------------------


def test_scores_are_filed_once_and_end_with_the_prompt() -> None:
    """Also where chunks overlap, and where a feed after a preemption goes on into the output."""
    strategy = Scored(Seeing())
    request, seq = request_with(strategy, 6, prompt_logprobs=0)
    for start, end in ((0, 3), (0, 2), (1, 9), (3, 9)):
        strategy.observe(request, seq, Feed(0, start, end - start), (Scores(tuple(SCORES[start + 1 : end])),))
    assert request.prompt_logprobs == [None, *SCORES[1:6]]


def test_scoring_feeds_the_full_prompt_until_all_scores_arrive() -> None:
    strategy = Scored(Seeing())
    request, seq = request_with(strategy, 6, prompt_logprobs=2)
    assert strategy.shares(request) == 0
    assert strategy.want(request, seq, Feed(0, 0, 3), False) == (Score(2),)
    strategy.observe(request, seq, Feed(0, 0, 3), (Scores(tuple(SCORES[1:4])),))
    assert strategy.want(request, seq, Feed(0, 3, 3), True) == (Score(2), Sample())
    strategy.observe(request, seq, Feed(0, 3, 3), (Scores(tuple(SCORES[4:6])), Drawn((3,))))
    assert request.prompt_logprobs == [None, *SCORES[1:6]]
    assert strategy.shares(request) == ALL
    assert strategy.want(request, seq, Feed(0, 6, 1), True) == (Sample(),)


def test_scores_from_a_token_on_let_the_tokens_before_it_come_from_the_cache() -> None:
    """The row before it scores it, and has to be fed; a feed that ends before that row is asked for nothing."""
    strategy = Scored(Seeing())
    request, seq = request_with(strategy, 8, prompt_logprobs=0, prompt_logprobs_start=5)
    assert strategy.shares(request) == 4
    assert strategy.want(request, seq, Feed(0, 0, 4), False) == ()
    strategy.observe(request, seq, Feed(0, 0, 4), ())
    assert (request.prompt_logprobs, strategy.shares(request)) == ([], 4)
    assert strategy.want(request, seq, Feed(0, 3, 2), False) == (Score(0),)
    strategy.observe(request, seq, Feed(0, 3, 2), (Scores((SCORES[4], SCORES[5])),))
    assert (request.prompt_logprobs, request.shares) == ([None] * 5 + [SCORES[5]], 5)
    strategy.observe(request, seq, Feed(0, 5, 3), (Scores((SCORES[6], SCORES[7])), Drawn((3,))))
    assert (request.prompt_logprobs, request.shares) == ([None] * 5 + SCORES[5:8], ALL)


def test_a_wrapped_strategy_sees_only_the_answers_to_its_wants() -> None:
    """Of chunks, of the feed that ends the prompt, and of those after it."""
    inner = Seeing()
    strategy = Scored(inner)
    request, seq = request_with(strategy, 6, prompt_logprobs=0)
    seen = [(Scores(tuple(SCORES[1:4])),), (Scores(tuple(SCORES[4:6])), Drawn((3,))), (Drawn((4,)), Drawn((5,)))]
    for start, answers in zip((0, 3, 6), seen, strict=True):
        strategy.observe(request, seq, Feed(0, start, 3), answers)
    assert inner.observed == [(), (Drawn((3,)),), (Drawn((4,)), Drawn((5,)))]
    other = Sequence(1, list(seq.tokens), 6)
    assert strategy.select(request, [(seq, seen[1]), (other, seen[2])]) == [[Child(token=3)], [Child(token=3)]]
    assert inner.selected == [(Drawn((3,)),), (Drawn((4,)), Drawn((5,)))]
