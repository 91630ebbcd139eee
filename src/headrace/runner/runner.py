"""The eager torch runner: plan in, compact output out, on any device torch knows. The reference for every other back end."""

from dataclasses import dataclass
from functools import cached_property

import torch

from headrace.data.plan import Pooled, StepOutput, StepPlan
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.context import Context, FeedRows, build
from headrace.ops.contrast import contrast
from headrace.runner.answers import Wanted, answer, permitted_rows, rows_wanted
from headrace.runner.hidden import Features, HiddenStates
from headrace.runner.parts import Part, run_layer, sublayers
from headrace.runner.pooling import add_rows, pools
from headrace.runner.record import Segment, record
from headrace.runner.slots import Slots


@dataclass(slots=True)
class Rows:
    """The rows of logits that a plan's feeds want, before anything is answered. `first`: where each slot's begin."""

    logits: torch.Tensor
    first: dict[int, int]


class TorchRunner:
    """Runs plans on a torch model and its paged pool. One plan at a time; no state but slots and pool outlives a step."""

    def __init__(self, model: Model, pool: KVPool, threads: int | None = None, slots: Slots | None = None) -> None:
        self.model = model
        self.pool = pool
        self.slots = Slots() if slots is None else slots
        weight = next(model.parameters())
        sizes = pool.num_blocks, pool.block_size, model.config.hidden_size
        self.hidden = HiddenStates(*sizes, weight.dtype, weight.device)
        self.features = Features(*sizes, weight.dtype, weight.device)
        self.threads = threads

    def execute(self, plan: StepPlan) -> StepOutput:
        self.prepare(plan)
        self.rearrange(plan)
        return self.run(plan) if plan.feeds else StepOutput(plan.step)

    def prepare(self, plan: StepPlan) -> None:
        """Bring the slots up to date."""
        self.slots.apply(plan)

    @torch.inference_mode()
    def rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies in this model's pool."""
        self.pool.move([(source, to) for _, source, to in plan.moves])
        self.pool.copy_blocks([(source, to) for _, source, to in plan.copies])
        self.hidden.rearrange(plan)
        self.features.rearrange(plan)

    @torch.inference_mode()
    def rows(self, plan: StepPlan) -> Rows:
        """Feed, and keep the rows of logits that are wanted."""
        _, logits, wanted = self._forward(plan, self.slots, Part())
        return Rows(logits, {feed.slot: first for feed, first in zip(plan.feeds, wanted.first, strict=True)})

    @torch.inference_mode()
    def run(
        self, plan: StepPlan, slots: Slots | None = None, amateur: Rows | None = None, part: Part | None = None
    ) -> StepOutput:
        """Feed, and answer the wants: with these slots in place of one's own, with rows contrasted with an amateur's, by a part
        of the model."""
        known = self.slots if slots is None else slots
        x, logits, wanted = self._forward(plan, known, part or Part())
        if amateur is not None:
            _contrast(plan, known, logits, wanted, amateur)
        outputs = answer(plan, known, logits, wanted)
        for number, at, which, want in pools(plan):
            outputs[number][at] = Pooled(add_rows(want.before, self.model.final(x[which]).double().cpu().numpy()))
        self.hidden.answer(plan, known, outputs)
        return StepOutput(plan.step, [tuple(answers) for answers in outputs])

    def _forward(self, plan: StepPlan, slots: Slots, part: Part) -> tuple[torch.Tensor, torch.Tensor, Wanted]:
        """The rows after the last layer, the logits of those that need them, and which these are."""
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        rows = [
            FeedRows(
                ids=slots[feed.slot].tokens[feed.start : feed.start + feed.count],
                table=slots[feed.slot].tables[0],
                start=feed.start,
                nodes=feed.nodes,
                parents=feed.parents,
            )
            for feed in plan.feeds
        ]
        ctx = build(self.pool, rows)
        x = self._enter(plan, slots, ctx)
        for layer in range(part.layers or self.model.config.num_layers):
            skip = part.skip(layer)
            x = run_layer(*self._recorded[layer], skip, x, ctx) if skip else self.model.layer(layer, x, ctx)
        if part == Part():
            self._leave(plan, slots, x)
        wanted = rows_wanted(plan)
        return x, (self.model.head(x[wanted.index.to(x.device)]) if len(wanted.index) else x[:0]), wanted

    @cached_property
    def _recorded(self) -> list[tuple[Segment, list[int]]]:
        """The layers op by op, and of which sublayer each is: for steps that leave something of a layer out."""
        return [(segment, sublayers(segment)) for segment in record(self.model, embeds=False).layers]

    def _enter(self, plan: StepPlan, slots: Slots, ctx: Context) -> torch.Tensor:
        """The rows that the layers take."""
        rows: torch.Tensor = self.model.embed(ctx)
        return rows

    def _leave(self, plan: StepPlan, slots: Slots, x: torch.Tensor) -> None:
        """Keep of the rows after the last layer what is needed later."""
        self.hidden.keep(plan, slots, x, self.model.final)
        if self.features.kept:
            self.features.keep(plan, slots, x)

    def reserve_hidden(self) -> None:
        self.hidden.reserve()

    def kv_bytes(self) -> int:
        return self.pool.bytes + self.hidden.bytes + self.features.bytes

    def close(self) -> None:
        """Nothing to give back: tensors go with the runner."""


def _contrast(plan: StepPlan, slots: Slots, logits: torch.Tensor, wanted: Wanted, amateur: Rows) -> None:
    """Combine the rows of feeds that the amateur was fed too."""
    ends = [*wanted.first[1:], len(logits)]
    for feed, start, end, root in zip(plan.feeds, wanted.first, ends, wanted.roots, strict=True):
        if feed.slot in amateur.first and end > start:
            params = slots[feed.slot].params
            assert params.contrastive_beta is not None
            at = amateur.first[feed.slot]
            mine, other = logits[start:end], amateur.logits[at : at + end - start]
            may = torch.cat([logits[start:root], permitted_rows(feed, slots[feed.slot], logits[root:end])])
            logits[start:end] = contrast(mine, other, params.contrastive_alpha, params.contrastive_beta, may)
