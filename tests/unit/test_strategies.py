"""What strategies ask of a step and make of its answers, with no model behind them."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.data.plan import (
    Answers,
    AnyWant,
    Drawn,
    Each,
    Failed,
    Feed,
    LogitRow,
    Ranked,
    Reject,
    Sample,
    TokenLogprob,
    Top,
    Verify,
    Where,
)
from headrace.data.types import Child, Decode, Draft, Request, Sequence
from headrace.decoding.base import Strategy
from headrace.decoding.beam import BeamSearch
from headrace.decoding.contrastive import ContrastiveSearch
from headrace.decoding.sampling import BestOf, Sampling

BEAMS = BeamSearchParams(beam_width=2)


def request_with(strategy: Strategy, tokens: list[int], known: int = 2, **params: Any) -> tuple[Request, Sequence]:
    """A request with one sequence, whose first `known` tokens are the prompt."""
    given = params.pop("params", None) or SamplingParams(**params)
    request = Request("r", tokens[:known], given, 0, strategy, 0, stop_ids=frozenset({9}))
    request.seqs = [Sequence(0, list(tokens), known)]
    return request, request.seqs[0]


def wants(request: Request, seq: Sequence, last: bool = True) -> tuple[AnyWant, ...]:
    """Of the feed that reaches the last known token, or of a chunk before it."""
    made: tuple[AnyWant, ...] = request.strategy.want(request, seq, Feed(0, 0, len(seq.tokens)), last)
    return made


def selected(request: Request, seq: Sequence, *answers: Any) -> list[Child]:
    """The children of the one sequence."""
    given: Answers = answers
    (children,) = request.strategy.select(request, [(seq, given)])
    return list(children)


@pytest.mark.parametrize("strategy", [Sampling(), BestOf(), ContrastiveSearch(), BeamSearch(BEAMS)])
def test_a_chunk_before_the_last_known_token_wants_nothing(strategy: Strategy) -> None:
    request, seq = request_with(strategy, [1, 2], best_of=2, top_k=2)
    assert wants(request, seq, last=False) == ()
    assert len(wants(request, seq)) == 1


# -- sampling ------------------------------------------------------------------------------------------------------------------


def test_the_mirostat_state_is_carried_between_tokens() -> None:
    request, seq = request_with(Sampling(), [1, 2, 3], mirostat_tau=3.0)
    assert wants(request, seq) == (Sample(0),)
    (child,) = selected(request, seq, Drawn((5,), mus=(2.5,)))
    assert child == Child(token=5, index=0, state=2.5)
    seq.decode.state = child.state
    assert wants(request, seq) == (Sample(0, mu=2.5),)


def test_a_prompt_has_one_child_per_output() -> None:
    request, seq = request_with(Sampling(), [1, 2], n=3, logprobs=0)
    assert request.strategy.width(request) == 3
    assert wants(request, seq) == (Sample(n=3, logprobs=0),)
    said = tuple(TokenLogprob(token, -1.0) for token in (5, 6, 7))
    children = selected(request, seq, Drawn((5, 6, 7), logprobs=said))
    assert children == [Child(token=5 + i, index=i, logprobs=(said[i],)) for i in range(3)]
    seq.tokens, seq.decode.index = [1, 2, 6], 1
    assert wants(request, seq) == (Sample(1, logprobs=0),)


def test_a_draft_is_verified_by_the_rule_of_its_request() -> None:
    for rule, temperature, want in (
        ("noise", 1.0, Verify(2, logprobs=1)),
        ("block", 1.0, Reject(2, logprobs=1)),
        ("block", 0.0, Verify(2, logprobs=1)),
    ):
        request, seq = request_with(Sampling(), [1, 2, 3], verification=rule, temperature=temperature, logprobs=1)
        seq.decode.draft, seq.decode.index = Draft([5, 6], [-1, 0]), 2
        assert wants(request, seq) == (want,)
        said = (TokenLogprob(5, -1.0), TokenLogprob(7, -2.0))
        assert selected(request, seq, Drawn((5, 7), (0,), said)) == [Child((0,), 7, index=2, logprobs=said)]


class Unchanged:
    scope = "pointwise"

    def apply(self, logits: torch.Tensor, history: Any, paths: Any) -> torch.Tensor:
        return logits


def test_a_failed_node_ends_the_walk() -> None:
    """The others' rows are their own; a walk that comes to it ends before it."""
    strategy = Sampling()
    request, seq = request_with(strategy, [1, 2, 3], temperature=0.0)
    request.processors = (Unchanged(),)
    seq.decode.draft = Draft([5, 6], [-1, -1])

    def row(best: int) -> LogitRow:
        return LogitRow(np.eye(10, dtype="<f4")[best].tobytes())

    for first, path, token in ((6, (1,), 7), (5, (), 5)):
        (child,) = selected(request, seq, Each((row(first), Failed("broken logits"), row(7))))
        assert (child.path, child.token) == (path, token)


# -- best of several -----------------------------------------------------------------------------------------------------------


def test_the_likeliest_on_average_come_first_and_equals_as_they_were_drawn() -> None:
    strategy = BestOf()
    request, seq = request_with(strategy, [1, 2], best_of=5, n=4)
    assert (strategy.width(request), wants(request, seq)) == (5, (Sample(n=5, logprobs=0),))
    first = [TokenLogprob(5, logprob) for logprob in (-1.0, -2.0, -0.5, -2.0, -1.0)]
    strategy.select(request, [(seq, (Drawn((5,) * 5, logprobs=tuple(first)),))])
    born = [Sequence(i, [1, 2, 5], 2, decode=Decode(i)) for i in range(5)]
    second = Drawn((6,), logprobs=(TokenLogprob(6, -1.0),))
    strategy.select(request, [(seq, (second,)) for seq in born[:2]])
    for seq in born[:2]:
        seq.tokens.append(6)
    request.finished = [born[i] for i in (3, 4, 1, 0, 2)]
    assert [(seq.decode.index, seq.decode.score, mean) for seq, mean in strategy.results(request)] == [
        (2, -0.5, -0.5),
        (0, -2.0, -1.0),
        (4, -1.0, -1.0),
        (1, -3.0, -1.5),
    ]
    assert not any(seq.text.logprobs for seq in born), "nobody asked for them"


# -- contrastive search --------------------------------------------------------------------------------------------------------


def test_the_candidate_that_repeats_least_for_its_likelihood_is_taken() -> None:
    strategy = ContrastiveSearch()
    request, seq = request_with(strategy, [1, 2], penalty_alpha=0.4, top_k=2)
    assert strategy.draft(request, seq) is None
    assert wants(request, seq) == (Top(2),)
    (child,) = selected(request, seq, Ranked((5, 6), (math.log(0.6), math.log(0.3))))
    assert (child.path, child.token) == ((), None)
    seq.decode.state = child.state
    seq.decode.draft = strategy.draft(request, seq)
    assert seq.decode.draft == Draft([5, 6], [-1, -1], required=True)
    assert wants(request, seq) == (Top(2, closest=True, at=Where.NODES),)
    for closest, best in (((0.9, 0.1), 1), ((0.5, 0.1), 0), ((0.2, 0.9), 0)):  # 0.6 * (0.6 - 0.3) against 0.4 * what is closer
        nodes = tuple(Ranked((token, 9), (-1.0, -2.0), near) for token, near in zip((7, 8), closest, strict=True))
        (child,) = selected(request, seq, Each(nodes))
        assert (child.path, child.token, child.state.tokens) == ((best,), None, [7 + best, 9])


def test_stop_tokens_are_not_candidates_before_min_tokens() -> None:
    request, seq = request_with(ContrastiveSearch(), [1, 2], penalty_alpha=0.4, top_k=2, min_tokens=2)
    assert wants(request, seq) == (Top(2, live=True),)
    out = Ranked((9, 5, 6), (-0.1, -1.0, -2.0))
    (child,) = selected(request, seq, out)
    assert child.state.tokens == [5, 6]
    seq.decode.state, seq.decode.draft = child.state, Draft([5, 6], [-1, -1], required=True)
    assert wants(request, seq) == (Top(2, live=True, closest=True, at=Where.NODES),)
    for known, candidates in (([1, 2], [5, 6]), ([1, 2, 5], [9, 5])):
        seq.tokens = known
        (child,) = selected(request, seq, Each((out, out)))
        assert child.state.tokens == candidates


def test_a_candidate_that_failed_is_not_taken() -> None:
    """However little it would repeat. Where all have failed, so has the request."""
    strategy = ContrastiveSearch()
    request, seq = request_with(strategy, [1, 2], penalty_alpha=0.4, top_k=2)
    (child,) = selected(request, seq, Ranked((5, 6), (math.log(0.6), math.log(0.3))))
    seq.decode.state = child.state
    seq.decode.draft = strategy.draft(request, seq)
    good, failed = Ranked((7, 9), (-1.0, -2.0), 0.9), Failed("broken logits")
    for nodes, best in (((failed, good), 1), ((good, failed), 0)):
        (child,) = selected(request, seq, Each(nodes))
        assert (child.path, child.state.tokens) == ((best,), [7, 9])
    with pytest.raises(ValueError, match="broken logits"):
        selected(request, seq, Each((failed, failed)))


# -- answers that are not whole ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["tokens", "closest", "beams"])
def test_an_answer_that_lacks_a_part_fails_the_request(what: str) -> None:
    """Nothing is decided by what came."""
    short: Ranked | Each = Ranked((5, 6), (-1.0,))
    strategy = BeamSearch(BEAMS) if what == "beams" else ContrastiveSearch()
    params = {"params": BEAMS.sampling()} if what == "beams" else {"penalty_alpha": 0.4, "top_k": 2}
    request, seq = request_with(strategy, [1, 2], **params)
    if what == "closest":
        (child,) = selected(request, seq, Ranked((5, 6), (-1.0, -2.0)))
        seq.decode.state = child.state
        seq.decode.draft = strategy.draft(request, seq)
        short = Each((Ranked((7, 8), (-1.0, -2.0), closest=0.5),))
    with pytest.raises(ValueError, match="shorter"):
        selected(request, seq, short)


@pytest.mark.parametrize("n", [1, 3])
def test_of_outputs_that_are_drawn_together_each_has_its_state(n: int) -> None:
    """A state too few is a fault, and no output goes on from another's."""
    request, seq = request_with(Sampling(), [1, 2], n=3, mirostat_tau=3.0)
    drawn = Drawn((5, 6, 7), mus=(1.0, 2.0, 3.0)[:n])
    if n < 3:
        with pytest.raises(ValueError, match="shorter"):
            selected(request, seq, drawn)
    else:
        assert [(child.index, child.state) for child in selected(request, seq, drawn)] == [(0, 1.0), (1, 2.0), (2, 3.0)]
