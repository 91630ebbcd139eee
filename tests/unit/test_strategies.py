"""What strategies ask of a step and make of its answers, with no model behind them."""

import math
from typing import Any

import pytest

from headrace.decoding.base import Strategy
from headrace.decoding.beam import BeamSearch
from headrace.decoding.best_of import BestOf
from headrace.decoding.contrastive import ContrastiveSearch
from headrace.decoding.sampling import Sampling
from headrace.params import BeamSearchParams, SamplingParams
from headrace.types import Child, Draft, FeedOutput, Request, Sequence, TokenLogprob, Want


def asked(strategy: Strategy, tokens: list[int], known: int = 2, **params: Any) -> tuple[Request, Sequence]:
    """A request with one sequence, whose first `known` tokens are the prompt."""
    given = params.pop("params", None) or SamplingParams(**params)
    request = Request("r", tokens[:known], given, 0, strategy, 0, stop_ids=frozenset({9}))
    request.seqs = [Sequence(0, 0, list(tokens), known)]
    return request, request.seqs[0]


# -- sampling ------------------------------------------------------------------------------------------------------------------


def test_mirostats_state_goes_on_from_token_to_token() -> None:
    strategy = Sampling()
    request, seq = asked(strategy, [1, 2, 3], mirostat_tau=3.0)
    assert strategy.want(request, seq) == Want(child=0)
    ((child,),) = strategy.select(request, [(seq, FeedOutput((5,), mus=(2.5,)))])
    assert child == Child(token=5, index=0, state=2.5)
    seq.state = child.state
    assert strategy.want(request, seq) == Want(child=0, mu=2.5)


def test_a_prompt_has_as_many_children_as_outputs_and_each_goes_on_with_one() -> None:
    strategy = Sampling()
    request, seq = asked(strategy, [1, 2], n=3, logprobs=0)
    assert strategy.width(request) == 3
    assert strategy.want(request, seq) == Want(n=3, logprobs=0)
    said = tuple(TokenLogprob(token, -1.0) for token in (5, 6, 7))
    (children,) = strategy.select(request, [(seq, FeedOutput((5, 6, 7), logprobs=said))])
    assert children == [Child(token=5 + i, index=i, logprobs=(said[i],)) for i in range(3)]
    seq.tokens, seq.index = [1, 2, 6], 1
    assert strategy.want(request, seq) == Want(child=1, logprobs=0)


def test_a_draft_is_verified_as_the_request_says_and_its_path_is_taken() -> None:
    strategy = Sampling()
    for rule, temperature, kind in (("noise", 1.0, "verify"), ("block", 1.0, "reject"), ("block", 0.0, "verify")):
        request, seq = asked(strategy, [1, 2, 3], verification=rule, temperature=temperature, logprobs=1)
        seq.draft, seq.index = Draft([5, 6], [-1, 0]), 2
        assert strategy.want(request, seq) == Want("nodes", kind, child=2, logprobs=1)
        said = (TokenLogprob(5, -1.0), TokenLogprob(7, -2.0))
        ((child,),) = strategy.select(request, [(seq, FeedOutput((5, 7), (0,), said))])
        assert child == Child((0,), 7, index=2, logprobs=said)


# -- best of several -----------------------------------------------------------------------------------------------------------


def test_the_likeliest_on_average_come_first_and_equals_as_they_were_drawn() -> None:
    strategy = BestOf()
    request, seq = asked(strategy, [1, 2], best_of=4, n=3)
    assert (strategy.width(request), strategy.want(request, seq)) == (4, Want(n=4, logprobs=0))
    first = [TokenLogprob(5, logprob) for logprob in (-1.0, -2.0, -0.5, -2.0)]
    strategy.select(request, [(seq, FeedOutput((5, 5, 5, 5), logprobs=tuple(first)))])
    born = [Sequence(i, i, [1, 2, 5], 2) for i in range(4)]
    second = [TokenLogprob(6, logprob) for logprob in (-1.0, -1.0, -3.5, -1.0)]
    strategy.select(request, [(seq, FeedOutput((6,), logprobs=(each,))) for seq, each in zip(born[:2], second, strict=False)])
    for seq in born[:2]:
        seq.tokens.append(6)
    request.finished = [born[i] for i in (3, 1, 0, 2)]
    assert [(seq.index, seq.score, mean) for seq, mean in strategy.results(request)] == [
        (2, -0.5, -0.5),
        (0, -2.0, -1.0),
        (1, -3.0, -1.5),
    ]
    assert not any(seq.logprobs for seq in born), "nobody asked for them"


# -- contrastive search --------------------------------------------------------------------------------------------------------


def test_the_candidate_that_repeats_least_for_its_likelihood_is_taken() -> None:
    strategy = ContrastiveSearch()
    request, seq = asked(strategy, [1, 2], penalty_alpha=0.4, top_k=2)
    assert strategy.draft(request, seq) is None
    assert strategy.want(request, seq) == Want(kind="top", k=2)
    ((child,),) = strategy.select(request, [(seq, FeedOutput(top_ids=(5, 6), top_logprobs=(math.log(0.6), math.log(0.3))))])
    assert (child.path, child.token) == ((), None)
    seq.state = child.state
    seq.draft = strategy.draft(request, seq)
    assert seq.draft == Draft([5, 6], [-1, -1], required=True)
    assert strategy.want(request, seq) == Want(kind="top", rows="nodes", k=2, closest=True)
    nodes = tuple(FeedOutput(top_ids=(token, 9), top_logprobs=(-1.0, -2.0)) for token in (7, 8))
    for closest, best in (((0.9, 0.1), 1), ((0.5, 0.1), 0), ((0.2, 0.9), 0)):  # 0.6 * (0.6 - 0.3) against 0.4 * what is closer
        ((child,),) = strategy.select(request, [(seq, FeedOutput(closest=closest, nodes=nodes))])
        assert (child.path, child.token, child.state.tokens) == ((best,), None, [7 + best, 9])


def test_ends_are_no_candidates_before_there_may_be_one() -> None:
    strategy = ContrastiveSearch()
    request, seq = asked(strategy, [1, 2], penalty_alpha=0.4, top_k=2, min_tokens=2)
    assert strategy.want(request, seq) == Want(kind="top", k=2, live=True)
    out = FeedOutput(top_ids=(9, 5, 6), top_logprobs=(-0.1, -1.0, -2.0))
    ((child,),) = strategy.select(request, [(seq, out)])
    assert child.state.tokens == [5, 6]
    seq.state, seq.draft = child.state, Draft([5, 6], [-1, -1], required=True)
    for known, candidates in (([1, 2], [5, 6]), ([1, 2, 5], [9, 5])):
        seq.tokens = known
        ((child,),) = strategy.select(request, [(seq, FeedOutput(closest=(0.0, 0.0), nodes=(out, out)))])
        assert child.state.tokens == candidates


# -- answers that are not whole ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["tokens", "closest", "beams"])
def test_an_answer_that_lacks_a_part_fails_the_request(what: str) -> None:
    """Nothing is decided by what came."""
    short = FeedOutput(top_ids=(5, 6), top_logprobs=(-1.0,))
    strategy: Strategy = BeamSearch(BeamSearchParams(beam_width=2)) if what == "beams" else ContrastiveSearch()  # type: ignore[assignment]
    params = {"params": BeamSearchParams(beam_width=2).sampling()} if what == "beams" else {"penalty_alpha": 0.4, "top_k": 2}
    request, seq = asked(strategy, [1, 2], **params)
    if what == "closest":
        ((child,),) = strategy.select(request, [(seq, FeedOutput(top_ids=(5, 6), top_logprobs=(-1.0, -2.0)))])
        seq.state = child.state
        seq.draft = strategy.draft(request, seq)  # type: ignore[attr-defined]
        short = FeedOutput(closest=(0.5,), nodes=(FeedOutput(), FeedOutput()))
    with pytest.raises(ValueError, match="shorter"):
        strategy.select(request, [(seq, short)])
