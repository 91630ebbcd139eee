"""Contrastive search: the likeliest tokens as sibling nodes, and the one that repeats least of what is there wins.

Su et al. 2022, "A Contrastive Framework for Neural Text Generation": of the top_k candidates the one with the largest
(1 - a) * p(v) - a * max cos(h_v, h_j), where h_v is the candidate's final hidden state and j runs over all tokens before,
the prompt's included. Deterministic; lossy by design: a trade of likelihood for less repetition.
"""

import math
from dataclasses import dataclass

from headrace.data.param_checks import SEARCH
from headrace.data.plan import FeedOutput, Want
from headrace.data.types import Child, Draft, Request, Sequence


@dataclass(frozen=True, slots=True)
class Candidates:
    """The likeliest tokens after a sequence's last one, with their probabilities under the whole vocabulary."""

    tokens: list[int]
    probs: list[float]


class ContrastiveSearch:
    """Each step feeds the candidates as a draft that must be verified; the best becomes known, without a token after it."""

    streams = True
    speculates = False
    drops_failed = False
    honours = SEARCH

    def width(self, request: Request) -> int:
        return 1

    def nodes(self, request: Request) -> int:
        return request.params.top_k

    def draft(self, request: Request, seq: Sequence) -> Draft | None:
        """The candidates; None where the prompt is still to be read."""
        if seq.decode.state is None:
            return None
        return Draft(list(seq.decode.state.tokens), [-1] * len(seq.decode.state.tokens), required=True)

    def want(self, request: Request, seq: Sequence) -> Want:
        live = bool(request.params.min_tokens and request.stop_ids)  # enough is left where min_tokens rules the ends out
        if seq.decode.draft is None:
            return Want(kind="top", k=request.params.top_k, live=live)
        return Want(kind="top", rows="nodes", k=request.params.top_k, live=live, closest=True)

    def select(self, request: Request, outputs: list[tuple[Sequence, FeedOutput]]) -> list[list[Child]]:
        return [[self._child(request, seq, out)] for seq, out in outputs]

    def done(self, request: Request) -> bool:
        return False

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        return []

    def _child(self, request: Request, seq: Sequence, out: FeedOutput) -> Child:
        length = len(seq.tokens) - seq.prompt_len
        if seq.decode.draft is None:
            return Child(state=_candidates(request, out, length))
        alpha = request.params.penalty_alpha
        scores = [(1 - alpha) * p - alpha * near for p, near in zip(seq.decode.state.probs, out.closest, strict=True)]
        best = scores.index(max(scores))
        return Child(path=(best,), state=_candidates(request, out.nodes[best], length + 1))


def _candidates(request: Request, out: FeedOutput, length: int) -> Candidates:
    """The best tokens for an output of `length` tokens, without those that would end it before its minimum."""
    barred = request.stop_ids if length < request.params.min_tokens else frozenset()
    best = [(t, p) for t, p in zip(out.top_ids, out.top_logprobs, strict=True) if t not in barred][: request.params.top_k]
    return Candidates([token for token, _ in best], [math.exp(logprob) for _, logprob in best])
