"""Drafts by a model: a smaller companion with K and V of its own, or a part of the target (Leviathan et al. 2022).

The chain's tokens are drawn with the target's own parameters and noise, so that a draft that thinks like the target also
draws like it. All sequences draft together: one step of the model for each token of the longest chain.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from headrace.data.plan import Answer, AnyWant, Drawn, Feed, Propose, Sample
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import Fed, Filled, Run


@dataclass(slots=True)
class Chain:
    """A draft as it grows. `q`: what each token was drawn from, for the rejection rule; `log_prob`: of all of it."""

    tokens: list[int] = field(default_factory=list)
    q: list[bytes] = field(default_factory=list)
    log_prob: float = 0.0

    @property
    def likely(self) -> float:
        """The probability of the chain as a whole."""
        return math.exp(self.log_prob)


class DraftModel:
    """Fills chains that the scheduler has found room for.

    `model` is who runs the feeds (StepPlan.model), `group` the KV group that these fill; None where it is the target's own,
    which the verification writes again. Without `keeps` what a chain has put there is put there again once its tokens are
    known: a feature layer then reads the target's rows in place of its own. A chain ends where it is less likely than `least`
    as a whole under the draft's own distribution: what follows would rarely be reached. `budget` bounds the known tokens fed
    in a step to catch up; a sequence that is not caught up then goes without a draft.
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
        """Room for a chain; `fill` says of which tokens, once its blocks are there."""
        return Draft([0] * most, list(range(-1, most - 1)))

    def lag(self, seq: Sequence) -> int:
        return 1 if self.group is None else len(seq.tokens) - seq.kv.computed[self.group]

    def fill(self, works: list[Fed], run: Run, filled: Filled) -> None:
        """Replace the tokens of these works' drafts; an empty draft is taken off."""
        ready = self._catch_up(works)
        feeds = [feed for _, feed in ready]
        outs = run(self.model, feeds) if feeds else []
        if self.group is not None:
            for (work, _), feed in zip(ready, feeds, strict=True):
                work.seq.kv.computed[self.group] = feed.start + feed.count
                filled(work.seq, self.group, feed.start)
        going = [(work, answers[0]) for (work, feed), answers in zip(ready, outs, strict=True) if feed.wants]
        chains: dict[int, Chain] = {id(work): Chain() for work in works}
        while going := self._extend(going, chains):
            outs = run(
                self.model,
                [_next(work, chains[id(work)].tokens, self._want(work, len(chains[id(work)].tokens))) for work, _ in going],
            )
            if self.group is not None and self.keeps:
                for work, _ in going:
                    work.seq.kv.computed[self.group] += 1
            going = [(work, answers[0]) for (work, _), answers in zip(going, outs, strict=True)]
        for work in works:
            settle(work, chains[id(work)])

    def _catch_up(self, works: list[Fed]) -> list[tuple[Fed, Feed]]:
        """Feeds of the known tokens that the model has not seen, as far as the budget goes."""
        room = self.budget
        feeds = []
        for work in sorted(works, key=lambda work: len(work.seq.tokens) - self._start(work)):
            start, length = self._start(work), len(work.seq.tokens)
            count = min(length - start, room)
            if count > 0 and not work.feed.source:  # a source that comes with the step itself has not been encoded yet
                wants = (self._want(work),) if start + count == length else ()
                allowed = mask_behind(work, []) if wants else b""
                feeds.append((work, Feed(work.seq.wire.slot, start, count, work.feed.new, wants, allowed=allowed)))
                work.feed.new = ()
                room -= count
        return feeds

    def _start(self, work: Fed) -> int:
        return work.feed.start if self.group is None else work.seq.kv.computed[self.group]

    def _want(self, work: Fed, chain: int = 0) -> AnyWant:
        index = work.seq.decode.index
        return Propose(index, chain) if work.request.params.rejects else Sample(index, logprobs=0 if self.least > 0 else None)

    def _extend(self, going: list[tuple[Fed, Answer]], chains: dict[int, Chain]) -> list[tuple[Fed, Answer]]:
        """Append what was drawn; returns those whose chains go on."""
        on = []
        for work, answer in going:
            draft, chain = work.seq.decode.draft, chains[id(work)]
            assert draft is not None
            if not append_drawn(answer, chain):
                continue
            more = len(chain.tokens) < len(draft.tokens) and chain.tokens[-1] not in work.request.stop_ids
            if more and chain.likely >= self.least:
                on.append((work, answer))
        return on


def append_drawn(answer: Answer, chain: Chain) -> bool:
    """The model's token, drawn where its logits are; False: there is none."""
    if not isinstance(answer, Drawn) or not answer.tokens:
        return False
    chain.tokens.append(answer.tokens[0])
    chain.log_prob += answer.logprobs[0].logprob if answer.logprobs else 0.0
    if answer.q:  # what it was drawn from, held to the grammar as p is
        chain.q.append(answer.q)
        chain.log_prob += math.log(max(float(np.frombuffer(answer.q, dtype="<f4")[answer.tokens[0]]), 1e-30))
    return True


def mask_behind(work: Fed, chain: list[int]) -> bytes:
    """What may follow a chain where the output is held to a grammar; empty where it is not, or where nothing may."""
    if work.seq.decode.constraint is None:
        return b""
    ahead = work.seq.decode.constraint.copy()
    for token in chain:
        ahead.push(token)
    return ahead.masks()


def _next(work: Fed, chain: list[int], want: AnyWant) -> Feed:
    """The feed of a chain's last token."""
    feed = Feed(
        work.seq.wire.slot, len(work.seq.tokens) + len(chain) - 1, 0, (), (want,), nodes=tuple(chain[-1:]), parents=(-1,)
    )
    feed.allowed = mask_behind(work, chain)
    return feed


def settle(work: Fed, grown: Chain) -> None:
    """The draft is this chain, as far as the sequence's grammar allows."""
    draft, constraint, chain = work.seq.decode.draft, work.seq.decode.constraint, grown.tokens
    assert draft is not None
    if constraint is not None and chain and not grown.q:
        fits = constraint.fitting(chain, list(range(-1, len(chain) - 1)))
        chain = chain[: fits.index(False)] if False in fits else chain
    work.request.metrics.drafted -= len(draft.tokens) - len(chain)
    draft.tokens[:], draft.parents[:] = chain, range(-1, len(chain) - 1)
    draft.q = grown.q or None
    work.feed.nodes, work.feed.parents, work.feed.q = tuple(chain), tuple(draft.parents), tuple(grown.q)
    if not chain:
        work.request.metrics.drafts -= 1
        work.seq.decode.draft = None
