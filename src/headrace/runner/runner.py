"""The eager torch runner: plan in, compact output out, on any device torch knows. The reference for every other back end."""

import torch

from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from headrace.ops.registry import accumulator
from headrace.runner.answers import answer, rows_wanted
from headrace.runner.pooling import pools
from headrace.runner.slots import Slots
from headrace.types import StepOutput, StepPlan


class TorchRunner:
    """Runs plans on a torch model and its paged pool. One plan at a time; no state but slots and pool outlives a step."""

    def __init__(self, model: Model, pool: KVPool, threads: int | None = None) -> None:
        self.model = model
        self.pool = pool
        self.slots = Slots()
        self.threads = threads

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepOutput:
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)
        self.slots.apply(plan)
        self.pool.move([(source, to) for _, source, to in plan.moves])
        self.pool.copy_blocks([(source, to) for _, source, to in plan.copies])
        rows = [
            FeedRows(
                ids=self.slots[feed.slot].tokens[feed.start : feed.start + feed.count],
                table=self.slots[feed.slot].tables[0],
                start=feed.start,
                nodes=feed.nodes,
                parents=feed.parents,
            )
            for feed in plan.feeds
        ]
        ctx = build(self.pool, rows)
        x = self.model.embed(ctx)
        for layer in range(self.model.config.num_layers):
            x = self.model.layer(layer, x, ctx)
        wanted = rows_wanted(plan)
        logits = self.model.head(x[wanted.index.to(x.device)]) if len(wanted.index) else x[:0]
        outputs = answer(plan, self.slots, logits, wanted)
        for number, first, which in pools(plan):
            final = self.model.final(x[first + which.start : first + which.stop])
            outputs[number].pooled = final.to(accumulator(final.dtype)).sum(0).tolist()
        return StepOutput(plan.step, outputs)

    def kv_bytes(self) -> int:
        return self.pool.bytes

    def close(self) -> None:
        """Nothing to give back: tensors go with the runner."""
