"""Drafts by a model: a smaller draft model with its own K/V, or a part of the target.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", arXiv 2211.17192. The chain's tokens are
drawn with the target's sampling parameters and noise, so a draft model with the target's probabilities draws the target's
tokens. All sequences draft together: one step of the model for each token of the longest chain.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from headrace.data.plan import Answer, AnyWant, Drawn, Feed, Propose, Sample
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import MarkFilled, RunModel, TargetFeed

SMALLEST = 1e-30  # of a probability, before its logarithm


@dataclass(slots=True)
class Chain:
    """A growing draft. q: for the rejection rule, the distribution of each token, float32 [vocabulary] as bytes. log_prob:
    natural log of the chain's probability."""

    tokens: list[int] = field(default_factory=list)
    q: list[bytes] = field(default_factory=list)
    log_prob: float = 0.0

    @property
    def probability(self) -> float:
        """The probability of the whole chain under the draft model."""
        return math.exp(self.log_prob)


class DraftModel:
    """Fills reserved chains by steps of a model.

    model: its number in plans (StepPlan.model). group: the KV group that its feeds fill; None: the target's own, which the
    verification writes again. keeps: the chain's K/V stay valid once its tokens are known; a feature layer reads the target's
    rows then, so its K/V are written again. least: a chain ends when its probability falls below this, as later tokens would
    rarely be reached. budget: known tokens that a step may read; a sequence with unread tokens left gets no draft.
    """

    def __init__(
        self,
        name: str = "draft",
        *,
        model: int = 1,
        group: int | None = 1,
        keeps: bool = True,
        least: float = 0.7,
        budget: int = 512,
    ) -> None:
        self.name = name
        self.model = model
        self.group = group
        self.keeps = keeps
        self.least = least
        self.budget = budget

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        """Room for a chain of `most` tokens; `propose_tokens` fills it."""
        return Draft([0] * most, list(range(-1, most - 1)))

    def lag(self, seq: Sequence) -> int:
        """Known tokens that the model has not read."""
        return 1 if self.group is None else len(seq.tokens) - seq.kv.computed[self.group]

    def propose_tokens(self, targets: list[TargetFeed], run: RunModel, mark_filled: MarkFilled) -> None:
        """Read unread tokens, then draw the chains token by token. An empty chain removes its draft."""
        ready = self._catch_up(targets)
        feeds = [feed for _, feed in ready]
        answers = run(self.model, feeds) if feeds else []
        if self.group is not None:
            for (target, _), feed in zip(ready, feeds, strict=True):
                target.seq.kv.computed[self.group] = feed.start + feed.count
                mark_filled(target.seq, self.group, feed.start)
        growing = [(target, given[0]) for (target, feed), given in zip(ready, answers, strict=True) if feed.wants]
        chains: dict[int, Chain] = {id(target): Chain() for target in targets}
        while growing := self._extend(growing, chains):
            answers = run(self.model, [self._next_feed(target, chains[id(target)].tokens) for target, _ in growing])
            if self.group is not None and self.keeps:
                for target, _ in growing:
                    target.seq.kv.computed[self.group] += 1
            growing = [(target, given[0]) for (target, _), given in zip(growing, answers, strict=True)]
        for target in targets:
            set_chain(target, chains[id(target)])

    def _catch_up(self, targets: list[TargetFeed]) -> list[tuple[TargetFeed, Feed]]:
        """Feeds of the known tokens that the model has not read, the shortest first, within the budget."""
        room = self.budget
        feeds = []
        for target in sorted(targets, key=lambda target: len(target.seq.tokens) - self._start(target)):
            start, length = self._start(target), len(target.seq.tokens)
            count = min(length - start, room)
            # A source that comes with this very step is not encoded yet, so no model can read it.
            if count > 0 and target.feed.source is None:
                wants = (self._want(target),) if start + count == length else ()
                allowed = mask_after(target, []) if wants else b""
                feeds.append((target, Feed(target.seq.wire.slot, start, count, target.feed.new, wants, allowed=allowed)))
                target.feed.new = ()
                room -= count
        return feeds

    def _start(self, target: TargetFeed) -> int:
        return target.feed.start if self.group is None else target.seq.kv.computed[self.group]

    def _want(self, target: TargetFeed, drafted: int = 0) -> AnyWant:
        index = target.seq.decode.index
        if target.request.params.rejects:
            return Propose(index, drafted)
        return Sample(index, logprobs=0 if self.least > 0 else None)

    def _next_feed(self, target: TargetFeed, chain: list[int]) -> Feed:
        """The feed of a chain's last token, which asks for the next one."""
        start = len(target.seq.tokens) + len(chain) - 1
        wants = (self._want(target, len(chain)),)
        feed = Feed(target.seq.wire.slot, start, 0, (), wants, nodes=tuple(chain[-1:]), parents=(-1,))
        feed.allowed = mask_after(target, chain)
        return feed

    def _extend(self, growing: list[tuple[TargetFeed, Answer]], chains: dict[int, Chain]) -> list[tuple[TargetFeed, Answer]]:
        """Append each answer's token to its chain; returns the targets whose chains go on."""
        going_on = []
        for target, answer in growing:
            draft, chain = target.seq.decode.draft, chains[id(target)]
            assert draft is not None
            if not append_drawn(answer, chain):
                continue
            more = len(chain.tokens) < len(draft.tokens) and chain.tokens[-1] not in target.request.stop_ids
            if more and chain.probability >= self.least:
                going_on.append((target, answer))
        return going_on


def append_drawn(answer: Answer, chain: Chain) -> bool:
    """Append the model's token to a chain; False if the answer has none."""
    if not isinstance(answer, Drawn) or not answer.tokens:
        return False
    chain.tokens.append(answer.tokens[0])
    chain.log_prob += answer.logprobs[0].logprob if answer.logprobs else 0.0
    if answer.q:
        chain.q.append(answer.q)
        chain.log_prob += math.log(max(float(np.frombuffer(answer.q, dtype="<f4")[answer.tokens[0]]), SMALLEST))
    return True


def mask_after(target: TargetFeed, chain: list[int]) -> bytes:
    """The grammar's mask of the token after a chain; empty without a grammar, or if the grammar allows no token."""
    if target.seq.decode.constraint is None:
        return b""
    ahead = target.seq.decode.constraint.copy()
    for token in chain:
        ahead.push(token)
    return ahead.masks()


def set_chain(target: TargetFeed, grown: Chain) -> None:
    """Make the chain the sequence's draft, as far as its grammar allows. An empty chain removes the draft.

    A chain with q was drawn under the grammar's masks. It must not be cut: q would be another distribution.
    """
    draft, constraint, chain = target.seq.decode.draft, target.seq.decode.constraint, grown.tokens
    assert draft is not None
    if constraint is not None and chain and not grown.q:
        fits = constraint.fitting(chain, list(range(-1, len(chain) - 1)))
        chain = chain[: fits.index(False)] if False in fits else chain
    target.request.metrics.drafted -= len(draft.tokens) - len(chain)
    draft.tokens[:], draft.parents[:] = chain, range(-1, len(chain) - 1)
    draft.q = grown.q or None
    target.feed.nodes, target.feed.parents, target.feed.q = tuple(chain), tuple(draft.parents), tuple(grown.q)
    if not chain:
        target.request.metrics.drafts -= 1
        target.seq.decode.draft = None
