"""Drafts by trained heads: each says what comes so many tokens later, all from one hidden row of the target."""

from headrace.data.plan import Answer, Each, Feed, LogitRow, Logits, Sample, Where
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import Fed, Filled, Run
from headrace.drafting.draft_model import Chain, append_drawn, settle


class TrainedHeads:
    """Fills chains that the scheduler has found room for, all sequences' in one step of the heads.

    There are `count` heads, and `model` runs them (StepPlan.model). The chain ends where it is less likely than `least` as a
    whole under the heads' own distributions. Tokens are drawn with the noise of their places, as the target's will be; what
    the sampling makes of a text (penalties) ends for heads with what is known, as none sees what the one before it said.
    """

    name = "heads"

    def __init__(self, count: int, *, model: int = 1, least: float = 0.3) -> None:
        self.count = count
        self.model = model
        self.least = least

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        """Room for a chain; `fill` says of which tokens."""
        most = min(most, self.count)
        return Draft([0] * most, list(range(-1, most - 1)))

    def lag(self, seq: Sequence) -> int:
        """Nothing but the last token: heads read the row that the target has left."""
        return 1

    def fill(self, works: list[Fed], run: Run, filled: Filled) -> None:
        """Replace the tokens of these works' drafts; an empty draft is taken off."""
        feeds = [self._feed(work) for work in works]
        for work in works:
            work.feed.new = ()
        for work, out in zip(works, run(self.model, feeds), strict=True):
            settle(work, self._chain(work, out[0]))

    def _feed(self, work: Fed) -> Feed:
        """The last known token, and a node for each head but the first."""
        draft, seq = work.seq.decode.draft, work.seq
        assert draft is not None
        more = len(draft.tokens) - 1
        here = work.request.params.rejects or seq.decode.constraint is not None  # what may come next hangs on the head before
        drawn = Sample(seq.decode.index, logprobs=0 if self.least > 0 else None, at=Where.TREE)
        wants = (Logits(Where.TREE) if here else drawn,)
        start = len(seq.tokens) - 1
        return Feed(seq.wire.slot, start, 1, work.feed.new, wants, nodes=(0,) * more, parents=tuple(range(-1, more - 1)))

    def _chain(self, work: Fed, answer: Answer) -> Chain:
        chain = Chain()
        for one in answer.answers if isinstance(answer, Each) else ():
            going = self._draw(work, one.row, chain) if isinstance(one, LogitRow) else append_drawn(one, chain)
            if not going or chain.likely < self.least or chain.tokens[-1] in work.request.stop_ids:
                break
        return chain

    def _draw(self, work: Fed, row: bytes, chain: Chain) -> bool:
        from headrace.drafting.rows import draw_from_rows  # torch

        return draw_from_rows(work, row, chain)
