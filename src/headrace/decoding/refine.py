"""Filling in blocks: all tokens of a block are guessed together, and the least sure ones again, in a few passes.

Non-autoregressive decoding (Gu et al. 2018), Mask-Predict (Ghazvininejad et al. 2019) and block diffusion (Arriola et al.
2025), which is the same block by block (semi-autoregressive: Wang et al. 2018). For models that were trained to fill in a mask
token, with known tokens seen causally and the block open. Lossy by design: what comes out is no draw of a model that writes
token by token.
"""

from headrace.data.pairing import REFINE
from headrace.data.plan import AnyWant, Feed, Top, Where
from headrace.data.refine import RefineParams
from headrace.data.types import Child, Draft, Request, Sequence
from headrace.decoding.base import Outputs, Strategy
from headrace.ops.refinement import Block, empty, guesses, refine


class Refine(Strategy):
    """Each pass feeds the block as a draft of which every node sees every other, and keeps nothing. A last one feeds the tokens
    causally and keeps them all, so that the pool holds what known tokens would have. Exactness: a pure function of the tokens
    before the block, bitwise as greedy decoding is; lossy against any other way of decoding.

    `mask`: the model's mask token; `context`: tokens that a text may have.
    """

    honours = REFINE

    def __init__(self, params: RefineParams, mask: int | None, context: int) -> None:
        self.params = params
        self.mask = -1 if mask is None else mask  # a model without one is refused at admission
        self.context = context

    def nodes(self, request: Request) -> int:
        return self.params.block

    def draft(self, request: Request, seq: Sequence) -> Draft | None:
        block = self._block(seq)
        chain = list(range(-1, len(block.tokens) - 1))
        return Draft(list(block.tokens), chain, required=True, full=block.done < self._passes(block))

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (Top(2, at=Where.NODES),) if last and feed.full else ()  # the second where the first is the mask

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        children = []
        for seq, answers in outputs:
            block = self._block(seq)
            if not answers:  # the causal pass
                children.append([Child(path=tuple(range(len(block.tokens))))])
                continue
            stays = self.params.remask == "masked"
            made = refine(block, guesses(answers[0], self.mask), self._passes(block), self.mask, kept_stay=stays)
            children.append([Child(state=made)])
        return children

    def _block(self, seq: Sequence) -> Block:
        """The block that follows the known tokens."""
        block: Block | None = seq.decode.state
        if block is not None:
            return block
        known = len(seq.tokens)
        end = self.context if self.params.length is None else min(self.context, seq.prompt_len + self.params.length)
        return empty(max(1, min(self.params.block, end - known)), self.mask)

    def _passes(self, block: Block) -> int:
        return min(self.params.passes, len(block.tokens))
