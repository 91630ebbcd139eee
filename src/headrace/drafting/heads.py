"""Drafts by trained heads: head i predicts the token i + 1 places ahead, all from one hidden row of the target."""

from headrace.data.plan import Answer, Each, Feed, LogitRow, Logits, Sample, Where
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import MarkFilled, RunModel, TargetFeed
from headrace.drafting.draft_model import Chain, append_drawn, set_chain


class TrainedHeads:
    """Fills the reserved chains of all sequences in one step of the heads.

    count: heads. model: their number in plans (StepPlan.model). least: a chain ends when its probability under the heads falls
    below this. Tokens are drawn with the noise of their positions, as the target's will be. Penalties count known tokens only,
    since no head sees the token of the head before it.

    Source: Stern et al., "Blockwise Parallel Decoding", arXiv 1811.03115; Cai et al., "Medusa", arXiv 2401.10774.
    """

    name = "heads"

    def __init__(self, count: int, *, model: int = 1, least: float = 0.3) -> None:
        self.count = count
        self.model = model
        self.least = least

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        """Room for a chain; `propose_tokens` fills it."""
        most = min(most, self.count)
        return Draft([0] * most, list(range(-1, most - 1)))

    def lag(self, seq: Sequence) -> int:
        """Only the last token: heads read the target's hidden row."""
        return 1

    def propose_tokens(self, targets: list[TargetFeed], run: RunModel, mark_filled: MarkFilled) -> None:
        """Run the heads once and draw each chain. An empty chain removes its draft."""
        feeds = [self._feed(target) for target in targets]
        for target in targets:
            target.feed.new = ()
        for target, answers in zip(targets, run(self.model, feeds), strict=True):
            set_chain(target, self._chain(target, answers[0]))

    def _feed(self, target: TargetFeed) -> Feed:
        """The last known token, and a node for each head but the first."""
        draft, seq = target.seq.decode.draft, target.seq
        assert draft is not None
        more = len(draft.tokens) - 1
        # Under the rejection rule or a grammar a token depends on those before it, so the host draws from rows of logits.
        on_host = target.request.params.rejects or seq.decode.constraint is not None
        sample = Sample(seq.decode.index, logprobs=0 if self.least > 0 else None, at=Where.TREE)
        wants = (Logits(Where.TREE) if on_host else sample,)
        start = len(seq.tokens) - 1
        return Feed(seq.wire.slot, start, 1, target.feed.new, wants, nodes=(0,) * more, parents=tuple(range(-1, more - 1)))

    def _chain(self, target: TargetFeed, answer: Answer) -> Chain:
        chain = Chain()
        for one in answer.answers if isinstance(answer, Each) else ():
            if isinstance(one, LogitRow):
                from headrace.drafting.rows import draw_from_rows  # torch

                drawn = draw_from_rows(target, one.row, chain)
            else:
                drawn = append_drawn(one, chain)
            if not drawn or chain.probability < self.least or chain.tokens[-1] in target.request.stop_ids:
                break
        return chain
