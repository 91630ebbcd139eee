"""Drafts by a model: a smaller companion with K and V of its own, or a part of the target (Leviathan et al. 2022; card F1).

The chain's tokens are drawn with the target's own parameters and noise, so that a draft that thinks like the target also
draws like it. All sequences draft together: one step of the model for each token of the longest chain.
"""

import math

from headrace.drafting.base import Fed, Filled, Run
from headrace.types import Draft, Feed, FeedOutput, Request, Sequence, Want


class DraftModel:
    """Fills chains that the scheduler has found room for.

    `model` is who runs the feeds (StepPlan.model), `group` the KV group that these fill; None where it is the target's own,
    which the verification writes again. A chain ends where it is less likely than `least` as a whole under the draft's own
    distribution: what follows would rarely be reached. `budget` bounds the known tokens fed in a step to catch up; a sequence
    that is not caught up then goes without a draft.
    """

    def __init__(self, name: str = "draft", *, model: int = 1, group: int | None = 1, least: float = 0.7, budget: int = 512):
        self.name = name
        self.model = model
        self.group = group
        self.least = least
        self.budget = budget

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        """Room for a chain; `fill` says of which tokens, once its blocks are there."""
        return Draft([0] * most, list(range(-1, most - 1)))

    def behind(self, works: list[Fed]) -> int:
        return sum(len(work.seq.tokens) - self._start(work) for work in works)

    def fill(self, works: list[Fed], run: Run, filled: Filled) -> None:
        """Replace the tokens of these works' drafts; an empty draft is taken off."""
        ready = self._catch_up(works)
        feeds = [feed for _, feed in ready]
        outs = run(self.model, feeds) if feeds else []
        if self.group is not None:
            for (work, _), feed in zip(ready, feeds, strict=True):
                work.seq.computed[self.group] = feed.start + feed.count
                filled(work.seq, self.group, feed.start)
        going = [(work, out) for (work, feed), out in zip(ready, outs, strict=True) if feed.wants]
        chains: dict[int, list[int]] = {id(work): [] for work in works}
        reach: dict[int, float] = {}
        while going := self._extend(going, chains, reach):
            outs = run(self.model, [_next(work, chains[id(work)], self._want(work.seq)) for work, _ in going])
            if self.group is not None:
                for work, _ in going:
                    work.seq.computed[self.group] += 1
            going = [(work, out) for (work, _), out in zip(going, outs, strict=True)]
        for work in works:
            _settle(work, chains[id(work)])

    def _catch_up(self, works: list[Fed]) -> list[tuple[Fed, Feed]]:
        """Feeds of the known tokens that the model has not seen, as far as the budget goes."""
        room = self.budget
        feeds = []
        for work in sorted(works, key=lambda work: len(work.seq.tokens) - self._start(work)):
            start, length = self._start(work), len(work.seq.tokens)
            count = min(length - start, room)
            if count > 0:
                wants = (self._want(work.seq),) if start + count == length else ()
                feeds.append((work, Feed(work.seq.slot, start, count, work.feed.new, wants)))
                work.feed.new = []
                room -= count
        return feeds

    def _start(self, work: Fed) -> int:
        return work.feed.start if self.group is None else work.seq.computed[self.group]

    def _want(self, seq: Sequence) -> Want:
        return Want(child=seq.index, logprobs=0 if self.least > 0 else None)

    def _extend(
        self, going: list[tuple[Fed, FeedOutput]], chains: dict[int, list[int]], reach: dict[int, float]
    ) -> list[tuple[Fed, FeedOutput]]:
        """Append what was drawn; returns those whose chains go on. `reach`: ln of the probability of the chain so far."""
        on = []
        for work, out in going:
            draft, chain = work.seq.draft, chains[id(work)]
            assert draft is not None
            if out.error or not out.tokens:
                continue
            chain.append(out.tokens[0])
            at = id(work)
            reach[at] = reach.get(at, 0.0) + (out.logprobs[0].logprob if out.logprobs else 0.0)
            more = len(chain) < len(draft.tokens) and chain[-1] not in work.request.stop_ids
            if more and math.exp(reach[at]) >= self.least:
                on.append((work, out))
        return on


def _next(work: Fed, chain: list[int], want: Want) -> Feed:
    """The feed of a chain's last token."""
    return Feed(work.seq.slot, len(work.seq.tokens) + len(chain) - 1, 0, [], (want,), nodes=chain[-1:], parents=[-1])


def _settle(work: Fed, chain: list[int]) -> None:
    """The draft is this chain, as far as the sequence's grammar allows."""
    draft, constraint = work.seq.draft, work.seq.constraint
    assert draft is not None
    if constraint is not None and chain:
        fits = constraint.fitting(chain, list(range(-1, len(chain) - 1)))
        chain = chain[: fits.index(False)] if False in fits else chain
    work.request.metrics.drafted -= len(draft.tokens) - len(chain)
    draft.tokens[:], draft.parents[:] = chain, range(-1, len(chain) - 1)
    work.feed.nodes, work.feed.parents = draft.tokens, draft.parents
    if not chain:
        work.seq.draft = None
