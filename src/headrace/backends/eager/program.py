"""The program of the torch back end, on any device of torch. It is the reference for other back ends."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from headrace.backends.eager.live import EagerLive
from headrace.backends.eager.play import play
from headrace.backends.eager.step import EagerStep
from headrace.backends.eager.stored_rows import EagerStoredRows
from headrace.data.plan import NewSlot, StepPlan
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.context import Context, FeedRows, build
from headrace.runner.last_use import kv_only, sublayers
from headrace.runner.program import InputRows, Source
from headrace.runner.record import Segment, record
from headrace.runner.span import Span


class EagerProgram:
    """A torch model and its paged KV pool. head_ids: token ids (ascending) with logits, None for all."""

    inputs: InputRows | None = None

    def __init__(self, model: Model, pool: KVPool, threads: int | None = None, head_ids: np.ndarray | None = None) -> None:
        self.model = model
        self.config = model.config
        self.pool = pool
        self.threads = threads
        self._weight = next(model.parameters())
        self._barred = None if head_ids is None else self._all_but(head_ids)

    def live(self, new: NewSlot) -> EagerLive:
        return EagerLive.of(new)

    def step(self) -> EagerStep:
        self._take_threads()
        return EagerStep()

    def _take_threads(self) -> None:
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    @torch.inference_mode()
    def run(self, step: EagerStep, span: Span, rows: torch.Tensor | None = None, keep: bool = False) -> torch.Tensor:
        """Run a step, which then has its logits. Returns the rows [n, hidden] after the last layer."""
        feeds = [
            FeedRows(
                ids=fed.live.tokens[fed.feed.start : fed.feed.start + fed.feed.count],
                table=fed.live.table,
                start=fed.feed.start,
                nodes=fed.feed.nodes,
                parents=fed.feed.parents,
                full=fed.feed.full,
                source=fed.live.reads,
                source_table=fed.live.source_table,
            )
            for fed in step.fed
        ]
        ctx = build(self.pool, feeds)
        x = rows if span.first and rows is not None else self.enter(ctx, rows)
        for layer in range(span.first, span.layers or self.config.num_layers):
            skip = span.skip(layer)
            if span.fill:
                play(*self._fills[layer], 0, x, ctx)
            else:
                x = play(*self._recorded[layer], skip, x, ctx) if skip else self.model.layer(layer, x, ctx)
        index = torch.tensor(step.index, dtype=torch.int64, device=x.device)
        step.logits = self.head(x[index]) if step.index else x[:0]
        return x

    @torch.inference_mode()
    def encode(self, sources: Sequence[Source]) -> None:
        """Encode sources one at a time, so that their K and V do not depend on each other."""
        if self.model.encoder is None:
            return
        self._take_threads()
        for source, table in sources:
            self._encode(self.model.encoder, source, table)

    def _encode(self, encoder: Model, source: Sequence[int], table: Sequence[int]) -> None:
        """Encode a source and store its K and V of every decoder layer in the blocks of a table."""
        size, numbers = self.pool.block_size, (self._weight.dtype, self._weight.device)
        blocks = -(-len(source) // size)
        ctx = build(KVPool(encoder.config, blocks, size, *numbers), [FeedRows(source, range(blocks))])
        x = encoder.embed(ctx)
        for layer in range(encoder.config.num_layers):
            x = encoder.layer(layer, x, ctx)
        memory, ctx = encoder.final(x), build(self.pool, [FeedRows(source, table)])
        for layer in range(self.config.num_layers):
            self.model.cross(layer, memory, ctx)

    def enter(self, ctx: Context, rows: torch.Tensor | None) -> torch.Tensor:
        """The input rows of the first layer."""
        x: torch.Tensor = self.model.embed(ctx)
        return x

    def head(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model.head(x)
        return logits if self._barred is None else logits.masked_fill(self._barred, -torch.inf)

    @torch.inference_mode()
    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.model.final(hidden)
        return x

    def on_host(self, rows: torch.Tensor) -> np.ndarray:
        numbers: np.ndarray = rows.double().cpu().numpy()
        return numbers

    @torch.inference_mode()
    def rearrange(self, plan: StepPlan) -> None:
        self.pool.move([(source, to) for _, source, to in plan.moves])
        self.pool.copy_blocks([(source, to) for _, source, to in plan.copies])

    def kept(self) -> EagerStoredRows:
        sizes = self.pool.num_blocks, self.pool.block_size, self.config.hidden_size
        return EagerStoredRows(*sizes, self._weight.dtype, self._weight.device)

    def kv_bytes(self) -> int:
        return self.pool.bytes

    def close(self) -> None:
        """Nothing to release: the tensors are freed with the program."""

    @cached_property
    def _recorded(self) -> list[tuple[Segment, list[int]]]:
        """The layers as recorded operations with their sublayers, for spans that skip a part of a layer."""
        return [(segment, sublayers(segment)) for segment in record(self.model, embeds=False).layers]

    @cached_property
    def _fills(self) -> list[tuple[Segment, list[int]]]:
        """The operations of each layer that compute K and V."""
        return [(made, [0] * len(made.nodes)) for made in (kv_only(segment) for segment, _ in self._recorded)]

    def _all_but(self, head_ids: np.ndarray) -> torch.Tensor:
        """Tokens without logits, [vocabulary] bool."""
        barred = torch.ones(self.config.vocab_size, dtype=torch.bool, device=self._weight.device)
        barred[torch.from_numpy(head_ids).long()] = False
        return barred
