"""Drafts by the model itself, of a block at once: it guesses masked tokens, and then verifies them as it does any draft.

For models that fill in masks and also write token by token. `decoding.refine` fills blocks in alike; here the guesses are a
draft, so the output is what decoding without them gives.
"""

from headrace.data.plan import Answer, Feed, Top, Where
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import Fed, Filled, Run
from headrace.drafting.draft_model import Chain, settle
from headrace.ops.refinement import Block, empty, guesses, refine


class Blocks:
    """Fills chains that the scheduler has found room for, all sequences' together: `passes` steps of the target over the open
    block. `model` is the whole target as a companion (StepPlan.model): the verification writes K and V again.

    A chain ends where it is less likely than `least` as a whole under the guesses' own probabilities.
    """

    name = "blocks"

    def __init__(self, mask: int, *, passes: int = 1, model: int = 1, least: float = 0.3) -> None:
        self.mask = mask
        self.passes = passes
        self.model = model
        self.least = least

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        """Room for a chain; `fill` says of which tokens."""
        return Draft([0] * most, list(range(-1, most - 1)))

    def lag(self, seq: Sequence) -> int:
        """Nothing but the last token: the target has read all others."""
        return 1

    def fill(self, works: list[Fed], run: Run, filled: Filled) -> None:
        """Replace the tokens of these works' drafts; an empty draft is taken off."""
        blocks = [empty(_size(work), self.mask) for work in works]
        for _ in range(self.passes):
            feeds = [_feed(work, block) for work, block in zip(works, blocks, strict=True)]
            for work in works:
                work.feed.new = ()
            outs = run(self.model, feeds)
            blocks = [self._after(block, answer) for block, (answer,) in zip(blocks, outs, strict=True)]
        for work, block in zip(works, blocks, strict=True):
            settle(work, self._chain(work, block))

    def _after(self, block: Block, answer: Answer) -> Block:
        """The block after one more pass, if it still has one."""
        passes = min(self.passes, len(block.tokens))
        return block if block.done == passes else refine(block, guesses(answer, self.mask), passes, self.mask)

    def _chain(self, work: Fed, block: Block) -> Chain:
        chain = Chain()
        for token, sure in zip(block.tokens, block.sure, strict=True):
            chain.log_prob += sure
            if chain.likely < self.least:
                break
            chain.tokens.append(token)
            if token in work.request.stop_ids:
                break
        return chain


def _size(work: Fed) -> int:
    draft = work.seq.decode.draft
    assert draft is not None
    return len(draft.tokens)


def _feed(work: Fed, block: Block) -> Feed:
    """The last known token, and the block behind it, open."""
    size, start = len(block.tokens), len(work.seq.tokens) - 1
    wants = (Top(2, at=Where.NODES),)
    chain = tuple(range(-1, size - 1))
    return Feed(work.seq.wire.slot, start, 1, work.feed.new, wants, nodes=block.tokens, parents=chain, full=True)
