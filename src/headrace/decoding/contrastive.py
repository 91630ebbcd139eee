"""Contrastive search: the likeliest tokens are verified as sibling nodes, and the one that repeats least of the text wins.

Of the top_k candidates it takes the one with the largest (1 - a) * p(v) - a * max cos(h_v, h_j). h_v is the candidate's final
hidden state; j runs over all tokens before, the prompt's included. Deterministic; lossy by design: it trades likelihood for
less repetition.

Source: Su et al., "A Contrastive Framework for Neural Text Generation", arXiv 2202.06417.
"""

import math
from dataclasses import dataclass

from headrace.data.pairing import SEARCH
from headrace.data.plan import Answer, AnyWant, Each, Failed, Feed, Ranked, Top, Where
from headrace.data.types import Child, Draft, Request, Sequence
from headrace.decoding.base import Outputs, Strategy


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens after a sequence's last one, and their probabilities over the whole vocabulary."""

    tokens: list[int]
    probs: list[float]


class ContrastiveSearch(Strategy):
    """Each step feeds the candidates as a required draft; the best becomes known, without a token after it."""

    honours = SEARCH

    def nodes(self, request: Request) -> int:
        return request.params.top_k

    def draft(self, request: Request, seq: Sequence) -> Draft | None:
        """The candidates; None while the prompt is being read."""
        candidates: Candidates | None = seq.decode.state
        if candidates is None:
            return None
        return Draft(list(candidates.tokens), [-1] * len(candidates.tokens), required=True)

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        if not last:
            return ()
        # `live`: enough candidates remain without the end tokens.
        k, live = request.params.top_k, bool(request.params.min_tokens and request.stop_ids)
        return (Top(k, live) if seq.decode.draft is None else Top(k, live, closest=True, at=Where.NODES),)

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return [[self._child(request, seq, answer)] for seq, (answer,) in outputs]

    def _child(self, request: Request, seq: Sequence, answer: Answer) -> Child:
        length = len(seq.tokens) - seq.prompt_len
        if isinstance(answer, Ranked):
            return Child(state=_candidates(request, answer, length))
        assert isinstance(answer, Each)
        alpha, probs = request.params.penalty_alpha, seq.decode.state.probs
        ranked = [
            (at, p, one) for at, (p, one) in enumerate(zip(probs, answer.answers, strict=True)) if isinstance(one, Ranked)
        ]
        if not ranked:
            raise ValueError(next(one.error for one in answer.answers if isinstance(one, Failed)))
        best, _, found = max(ranked, key=lambda each: (1 - alpha) * each[1] - alpha * each[2].closest)
        return Child(path=(best,), state=_candidates(request, found, length + 1))


def _candidates(request: Request, ranked: Ranked, length: int) -> Candidates:
    """The best tokens for an output of `length` tokens, without end tokens before `min_tokens`."""
    barred = request.stop_ids if length < request.params.min_tokens else frozenset()
    best = [(t, p) for t, p in zip(ranked.ids, ranked.logprobs, strict=True) if t not in barred][: request.params.top_k]
    return Candidates([token for token, _ in best], [math.exp(logprob) for _, logprob in best])
