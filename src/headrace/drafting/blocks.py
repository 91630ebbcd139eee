"""Drafts by the target itself, a block at once: it guesses masked tokens, and verifies them like any draft.

For models that are trained both to fill in masks and to write token by token. `decoding.refine` outputs such blocks; here they
are drafts, so the output is that of plain decoding.
"""

from headrace.data.plan import Answer, Feed, Top, Where
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import MarkFilled, RunModel, TargetFeed
from headrace.drafting.draft_model import Chain, set_chain
from headrace.ops.refinement import MaskedBlock, empty, guesses, refine


class Blocks:
    """Fills the reserved chains of all sequences by `passes` steps of the target over the masked block.

    mask: id of the mask token. model: the number of the full target as a draft model (StepPlan.model); verification writes its
    K/V again. least: a chain ends when its probability under the guesses falls below this.
    """

    name = "blocks"

    def __init__(self, mask: int, *, passes: int = 1, model: int = 1, least: float = 0.3) -> None:
        self.mask = mask
        self.passes = passes
        self.model = model
        self.least = least

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        """Room for a chain; `propose_tokens` fills it."""
        return Draft([0] * most, list(range(-1, most - 1)))

    def lag(self, seq: Sequence) -> int:
        """Only the last token: the target has read all others."""
        return 1

    def propose_tokens(self, targets: list[TargetFeed], run: RunModel, mark_filled: MarkFilled) -> None:
        """Refine the blocks pass by pass. An empty chain removes its draft."""
        blocks = [empty(_size(target), self.mask) for target in targets]
        for _ in range(self.passes):
            feeds = [_feed(target, block) for target, block in zip(targets, blocks, strict=True)]
            for target in targets:
                target.feed.new = ()
            answers = run(self.model, feeds)
            blocks = [self._refined(block, answer) for block, (answer,) in zip(blocks, answers, strict=True)]
        for target, block in zip(targets, blocks, strict=True):
            set_chain(target, self._chain(target, block))

    def _refined(self, block: MaskedBlock, answer: Answer) -> MaskedBlock:
        """The block after one more pass; a short block needs fewer passes."""
        passes = min(self.passes, len(block.tokens))
        return block if block.done == passes else refine(block, guesses(answer, self.mask), passes, self.mask)

    def _chain(self, target: TargetFeed, block: MaskedBlock) -> Chain:
        chain = Chain()
        for token, log_prob in zip(block.tokens, block.sure, strict=True):
            chain.log_prob += log_prob
            if chain.probability < self.least:
                break
            chain.tokens.append(token)
            if token in target.request.stop_ids:
                break
        return chain


def _size(target: TargetFeed) -> int:
    draft = target.seq.decode.draft
    assert draft is not None
    return len(draft.tokens)


def _feed(target: TargetFeed, block: MaskedBlock) -> Feed:
    """The last known token, and the block as nodes that see each other."""
    size, start = len(block.tokens), len(target.seq.tokens) - 1
    wants = (Top(2, at=Where.NODES),)
    chain = tuple(range(-1, size - 1))
    return Feed(target.seq.wire.slot, start, 1, target.feed.new, wants, nodes=block.tokens, parents=chain, full=True)
