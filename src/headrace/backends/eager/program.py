"""The program of the torch back end, on any device, and that of trained heads. It is the reference for other back ends."""

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from headrace.backends.eager.live import EagerLive
from headrace.backends.eager.step import EagerStep
from headrace.data.frames import rows_of
from headrace.data.plan import NewSlot, StepPlan, pairs_of
from headrace.data.sources import Frames, Source, Tokens
from headrace.kv.pool import KVPool, as_bytes, from_bytes
from headrace.models.base import Model
from headrace.models.layers import Linear
from headrace.ops.context import Context, FeedRows, build
from headrace.ops.patches import patch_rows
from headrace.ops.registry import OPS
from headrace.runner.heads import HeadInputs, Heads, HeadsSource, enter, heads_config
from headrace.runner.last_use import kv_only, sublayers
from headrace.runner.program import InputRows, Placed
from headrace.runner.record import Segment, record
from headrace.runner.span import Span
from headrace.runner.stored_rows import StoredRows
from headrace.weights.loader import load_model
from headrace.weights.lora import Adapter, numbers_of
from headrace.weights.source import WeightSource


class EagerStoredRows(StoredRows):
    """Stored rows in the model's dtype, on its device."""

    def __init__(self, num_blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(num_blocks, block_size, width, dtype.itemsize)
        self.dtype, self.device = dtype, device

    def allocate(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def read_blocks(self, blocks: Sequence[int], out: np.ndarray) -> None:
        out[:] = as_bytes(self.by_block()[list(blocks)])

    def write_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        rows = self.by_block()
        rows[list(blocks)] = from_bytes(data, rows).view(len(blocks), *rows.shape[1:])

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)

    def unit(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(rows, dim=-1)

    def nearest(self, rows: torch.Tensor, nodes: torch.Tensor) -> list[float]:
        best: list[float] = (rows @ nodes.T).amax(0).tolist()
        return best


def attach(model: Model, adapters: Sequence[Adapter]) -> None:
    """Give the model's linear layers the matrices of its adapters, in its dtype."""
    if not adapters:
        return
    weight = next(model.parameters())
    for path, holder in model.holders():
        if not isinstance(holder, Linear):
            continue
        firsts = dict(zip((name for name, _ in holder.parts), accumulate(holder.sizes, initial=0), strict=False))
        holder.adapters = {
            number: [
                (firsts[name], *(torch.from_numpy(np.ascontiguousarray(each)).to(weight) for each in (part.down, part.up)))
                for name, part in adapter.layers[path].items()
            ]
            for number, adapter in enumerate(adapters, 1)
            if path in adapter.layers
        }


class EagerProgram:
    """A torch model with its adapters, and its paged KV pool. head_ids: token ids (ascending) with logits, None for all."""

    inputs: InputRows | None = None

    def __init__(
        self,
        model: Model,
        pool: KVPool,
        threads: int | None = None,
        head_ids: np.ndarray | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self.model = model
        self.numbers = numbers_of(adapters)
        attach(model, adapters)
        self.config = model.config
        self.pool = pool
        self.threads = threads
        self._weight = next(model.parameters())
        self._barred = None if head_ids is None else self._all_but(head_ids)

    def live(self, new: NewSlot) -> EagerLive:
        return EagerLive.of(new, self.numbers.get((new.params and new.params.adapter) or "", 0))

    def step(self) -> EagerStep:
        self._take_threads()
        return EagerStep()

    def _take_threads(self) -> None:
        if self.threads is not None and torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)

    @torch.inference_mode()
    def run(
        self,
        step: EagerStep,
        span: Span,
        rows: torch.Tensor | None = None,
        keep: bool = False,
        taps: dict[str, np.ndarray] | None = None,
    ) -> torch.Tensor:
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
                window_table=fed.live.window_table,
                adapter=fed.live.adapter,
            )
            for fed in step.fed
        ]
        ctx = build(self.pool, feeds)
        ctx.taps.update(dict.fromkeys(taps or ()))
        x = rows if span.first and rows is not None else self.enter(ctx, rows)
        for layer in range(span.first, span.layers or self.config.num_layers):
            skip = span.skip(layer)
            if span.fill:
                play(*self._fills[layer], 0, x, ctx)
            else:
                x = play(*self._recorded[layer], skip, x, ctx) if skip else self.model.layer(layer, x, ctx)
        index = torch.tensor(step.index, dtype=torch.int64, device=x.device)
        step.logits = self.head(x[index]) if step.index else x[:0]
        if taps is not None:
            taps.update({name: value.float().cpu().numpy() for name, value in ctx.taps.items() if value is not None})
        return x

    @torch.inference_mode()
    def source_keys(self, live: EagerLive, layer: int, positions: int) -> np.ndarray:
        keys, _ = self.pool.kv(layer)
        numbers: np.ndarray = keys[live.source_table].flatten(0, 1)[:positions].float().cpu().numpy()
        return numbers

    @torch.inference_mode()
    def encode(self, sources: Sequence[Placed]) -> None:
        """Encode sources one at a time, so that their K and V do not depend on each other."""
        if self.model.encoder is None:
            return
        self._take_threads()
        for source, table in sources:
            self._encode(self.model.encoder, source, table)

    def _encode(self, encoder: Model, source: Source, table: Sequence[int]) -> None:
        """Encode a source and store its K and V of every decoder layer in the blocks of a table."""
        size, numbers = self.pool.block_size, (self._weight.dtype, self._weight.device)
        blocks = -(-source.positions // size)
        ids = source.ids if isinstance(source, Tokens) else [0] * source.positions
        ctx = build(KVPool(encoder.config, blocks, size, *numbers), [FeedRows(ids, range(blocks))])
        x = encoder.embed(ctx) if isinstance(source, Tokens) else self._convolve(encoder, source, ctx)
        for layer in range(encoder.config.num_layers):
            x = encoder.layer(layer, x, ctx)
        memory, ctx = encoder.final(x), build(self.pool, [FeedRows(ids, table)])
        for layer in range(self.config.num_layers):
            self.model.cross(layer, memory, ctx)

    def _convolve(self, encoder: Model, frames: Frames, ctx: Context) -> torch.Tensor:
        """The rows of the encoder's first layer, from log-mel rows."""
        audio = encoder.config.audio
        assert audio is not None
        x = torch.from_numpy(rows_of(frames).copy()).to(self._weight)
        for number, stride in enumerate(audio.strides):
            rows = torch.from_numpy(patch_rows(len(x), audio.taps, stride)).to(x.device)
            x = encoder.convolve(number, torch.cat([x, x.new_zeros(1, x.shape[1])])[rows].flatten(1), ctx)
        first: torch.Tensor = x + encoder.positions.weight[: len(x)]
        return first

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
        for pool in range(len(self.pool.parts)):
            self.pool.move(pairs_of(plan.moves, pool), pool)
            self.pool.copy_blocks(pairs_of(plan.copies, pool), pool)

    def block_bytes(self) -> int:
        return self.pool.data.nbytes // self.pool.num_blocks

    def read_blocks(self, blocks: Sequence[int], out: np.ndarray) -> None:
        self.pool.read_blocks(blocks, out)

    @torch.inference_mode()
    def write_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        self.pool.write_blocks(blocks, data)

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
        return [(filled, [0] * len(filled.nodes)) for filled in (kv_only(segment) for segment, _ in self._recorded)]

    def _all_but(self, head_ids: np.ndarray) -> torch.Tensor:
        """Tokens without logits, [vocabulary] bool."""
        barred = torch.ones(self.config.vocab_size, dtype=torch.bool, device=self._weight.device)
        barred[torch.from_numpy(head_ids).long()] = False
        return barred


class EagerHeads(EagerProgram):
    """A program of trained heads. It uses the target's block ids."""

    inputs: HeadInputs

    def __init__(self, heads: Heads, target: EagerProgram, source: WeightSource) -> None:
        config, weight = heads_config(heads.kind, target.config), next(target.model.parameters())
        model = load_model(HeadsSource(heads, target.config, source), weight.dtype, weight.device, config)
        pool = KVPool(config, target.pool.num_blocks, target.pool.block_size, target.pool.dtype, weight.device)
        super().__init__(model, pool, target.threads, heads.vocab)
        self.target = target
        self.inputs = HeadInputs(heads)

    def enter(self, ctx: Context, rows: torch.Tensor | None) -> torch.Tensor:
        assert rows is not None, "heads begin with hidden rows"
        if self.inputs.chains:
            rows = enter(self.inputs.tensors, self.target.model.embed(ctx), rows)
        return rows.to(self._weight.dtype)


def play(
    segment: Segment,
    marks: list[int],
    skip: int,
    x: torch.Tensor,
    ctx: Context,
    instead: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> torch.Tensor:
    """A recorded layer without the sublayers whose bits `skip` has: hidden rows [n, hidden] -> [n, hidden].

    `marks` are those of `sublayers`. What leads to the residuals of these is not computed, nor are K and V written; a residual
    hands its rows on. `instead`: what some ops are carried out by.
    """
    values: dict[int | None, Any] = {segment.entry: x}
    for node, mark in zip(segment.nodes, marks, strict=True):
        if mark & skip:
            if node.op == "residual":
                values[node.outputs[0]] = values[node.inputs["x"]]
            continue
        first, *others = (
            (name, values[node.inputs[name]] if name in node.inputs else node.settings.get(name, ctx))
            for name in OPS[node.op].parameters
        )
        result = instead.get(node.op, OPS[node.op])(first[1], **dict(others))
        values.update(zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    rows: torch.Tensor = values[segment.result]
    return rows
