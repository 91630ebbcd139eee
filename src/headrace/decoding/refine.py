"""Block filling: guesses all tokens of a block together, and guesses the least certain ones again, in a few passes.

For models trained to fill in a mask token, with causal known tokens and a block that sees itself. Lossy by design: the output
is not a sample of a model that writes token by token.

Source: Gu et al., "Non-Autoregressive Neural Machine Translation", arXiv 1711.02281; Ghazvininejad et al., "Mask-Predict",
arXiv 1904.09324; Arriola et al., "Block Diffusion", arXiv 2503.09573; Wang et al., "Semi-Autoregressive Neural Machine
Translation", arXiv 1808.08583.
"""

from headrace.data.pairing import REFINE
from headrace.data.params import RefineParams
from headrace.data.plan import AnyWant, Feed, Top, Where
from headrace.data.types import Child, Draft, Request, Sequence
from headrace.decoding.base import Outputs, Strategy
from headrace.ops.refinement import MaskedBlock, empty, guesses, refine


class Refine(Strategy):
    """Each pass feeds the block as a draft whose nodes see each other, and keeps no K/V. The last pass feeds the tokens
    causally and keeps all, so the pool holds the K/V of known tokens.

    mask: the model's mask token. context: the most tokens of a text. Exactness: a pure function of the tokens before the block,
    with the bits of greedy decoding; lossy compared with any other decoding.
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
        # Two tokens: the second is used if the first is the mask.
        return (Top(2, at=Where.NODES),) if last and feed.full else ()

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        children = []
        for seq, answers in outputs:
            block = self._block(seq)
            if not answers:  # the causal pass
                children.append([Child(path=tuple(range(len(block.tokens))))])
                continue
            stays = self.params.remask == "masked"
            refined = refine(block, guesses(answers[0], self.mask), self._passes(block), self.mask, kept_stay=stays)
            children.append([Child(state=refined)])
        return children

    def _block(self, seq: Sequence) -> MaskedBlock:
        """The block behind the known tokens."""
        block: MaskedBlock | None = seq.decode.state
        if block is not None:
            return block
        known = len(seq.tokens)
        end = self.context if self.params.length is None else min(self.context, seq.prompt_len + self.params.length)
        return empty(max(1, min(self.params.block, end - known)), self.mask)

    def _passes(self, block: MaskedBlock) -> int:
        return min(self.params.passes, len(block.tokens))
