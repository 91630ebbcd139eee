"""The native runner: a step plan in, compact output out; everything between is one call into the C++ core."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch

from headrace.models.base import Model
from headrace.native import core
from headrace.native.program import FUSIONS, lower
from headrace.native.sampling import sample_params
from headrace.native.weights import PackedWeights
from headrace.ops.noise import Key, key
from headrace.params import SamplingParams
from headrace.runner.pooling import pools
from headrace.runner.record import record
from headrace.types import Feed, FeedOutput, NewSlot, StepOutput, StepPlan, TokenLogprob, Want
from headrace.weights.source import WeightSource

log = logging.getLogger("headrace")

KV_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "float32": "f32", "int8": "int8"}
SPIN_MICROSECONDS = 1000  # workers stay awake while Python works between two steps


@cache
def thread_pool(threads: int) -> Any:
    """The threads of the process (0: one for each core it may use); engines share them and take turns."""
    pool = core().ThreadPool(threads)
    pool.set_spin(SPIN_MICROSECONDS)
    return pool


def kv_block_bytes(config: Any, block_size: int, kv_dtype: str = "auto") -> int:
    """Bytes that one block of the pool takes in all layers."""
    sizes = config.num_layers, block_size, config.num_kv_heads, config.head_dim
    return int(core().KVPool.block_bytes(*sizes, KV_DTYPES[kv_dtype]))


@dataclass(slots=True)
class Slot:
    """A live sequence: what the core knows of it, and the keys of its noise."""

    sequence: Any  # _core.Sequence
    seed: int
    params: SamplingParams
    keys: dict[int, Key] = field(default_factory=dict)  # by child

    def key(self, child: int) -> Key:
        if child not in self.keys:
            self.keys[child] = key(self.seed, child)
        return self.keys[child]


class NativeRunner:
    """Runs plans on a recorded model and a paged pool of the native core. One plan at a time.

    `kv_dtype`: auto (bfloat16), bfloat16, int8, float32. `threads` 0: one for each core. `quantize`: "", int8, int4, for
    files with float weights. `max_positions` bounds the positions a sequence may reach. Raises RecordError where the model
    cannot be recorded, WeightError as the loader does.
    """

    def __init__(
        self,
        model: Model,
        source: WeightSource,
        *,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        kv_dtype: str = "auto",
        threads: int = 0,
        quantize: str = "",
        fuse: frozenset[str] = FUSIONS,
        isa: str = "",
        weights: PackedWeights | None = None,
    ) -> None:
        config = model.config
        pool = thread_pool(threads)
        self.weights = weights or PackedWeights(model, source, pool, quantize)
        sizes = config.num_layers, num_blocks, block_size, config.num_kv_heads, config.head_dim
        self.kv = core().KVPool(*sizes, KV_DTYPES[kv_dtype])
        lowered = lower(
            record(model), self.weights, config, pool=pool, kv=self.kv, max_positions=max_positions, fuse=fuse, isa=isa
        )
        self.program = lowered.program
        self.taps: Mapping[str, int] = lowered.taps
        self._final = Final(model, self.weights)
        self._slots: dict[int, Slot] = {}
        self._step = core().Step()
        if self.weights.said():
            log.info("%s", self.weights.said())

    def execute(self, plan: StepPlan) -> StepOutput:
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # torch's threads would spin on the cores of ours
        self._apply(plan)
        if plan.moves:
            self.kv.move([(source, to) for _, source, to in plan.moves])
        if plan.copies:
            self.kv.copy_blocks([(source, to) for _, source, to in plan.copies])
        step = self._step
        step.clear()
        asked = [self._feed(step, feed) for feed in plan.feeds]
        pooled = list(pools(plan))
        hidden = np.empty((step.rows if pooled else 0, self._final.width), np.float32)
        self.program.run(step, hidden_out=hidden if pooled else None)
        outputs = [self._output(step, feed, answers) for feed, answers in zip(plan.feeds, asked, strict=True)]
        for number, first, rows in pooled:
            outputs[number].pooled = self._final.sum(hidden[first + rows.start : first + rows.stop])
        return StepOutput(plan.step, outputs)

    def kv_bytes(self) -> int:
        return int(self.kv.bytes)

    def close(self) -> None:
        """Give the packed weights and the pool back."""
        self._slots.clear()
        del self.program, self.weights, self.kv

    def _apply(self, plan: StepPlan) -> None:
        """Free, set up and fork slots, extend tables, append the tokens each feed brings."""
        slots = self._slots
        for number in plan.free:
            del slots[number]
        for new in plan.new:
            slots[new.slot] = self._fork(new) if new.source >= 0 else _new_slot(new)
        for delta in plan.tables:
            slots[delta.slot].sequence.set_table(delta.start, delta.blocks)
        for feed in plan.feeds:
            if feed.new:
                slots[feed.slot].sequence.extend(feed.new)

    def _fork(self, new: NewSlot) -> Slot:
        source = self._slots[new.source]
        return Slot(source.sequence.copy(), source.seed, source.params, source.keys)

    def _feed(self, step: Any, feed: Feed) -> list[Any]:
        """Add a feed and what is wanted of it; returns where the answers will be, one for each want."""
        slot, wants = self._slots[feed.slot], feed.wants
        last = 0  # the row of the last known token among those with logits
        for want in wants:
            if want.kind == "pool":  # which reads hidden rows
                wants = tuple(other for other in wants if other.kind != "pool")
            elif want.rows == "all":
                last = feed.count - 1
        rows = last + 1 + len(feed.nodes) if wants else 0
        if feed.nodes:
            step.feed(slot.sequence, feed.start, feed.count, rows, feed.nodes, feed.parents)
        else:
            step.feed(slot.sequence, feed.start, feed.count, rows)
        return [None if want.kind == "pool" else self._ask(step, slot, want, last) for want in feed.wants]

    def _ask(self, step: Any, slot: Slot, want: Want, last: int) -> Any:
        logprobs = -1 if want.logprobs is None else want.logprobs
        if want.kind == "sample":
            processed = slot.params.logprobs_mode == "processed"
            keys = [slot.key(child) for child in range(want.child, want.child + want.n)]
            return step.draw(last, keys, logprobs, processed, want.mu)
        if want.kind == "top":
            return step.top(last, want.k)
        if want.kind == "score":
            return step.score(0, max(logprobs, 0))
        if want.kind == "logits":
            return step.logits(last)
        raise ValueError(f"this runner does not answer {want.kind!r}")

    def _output(self, step: Any, feed: Feed, answers: list[Any]) -> FeedOutput:
        out = FeedOutput()
        for want, answer in zip(feed.wants, answers, strict=True):
            if want.kind == "pool":
                continue  # filled in where the hidden rows are
            if want.kind == "score":
                _scores(step, answer, out)
            elif error := step.error(answer):
                out.error = out.error or error
            elif want.kind == "sample":
                out.tokens = step.tokens(answer)
                if want.logprobs is not None:
                    out.logprobs = [_logprob(report) for report in step.reports(answer)]
                if self._slots[feed.slot].params.mirostat_tau:
                    out.mus = [report.mu for report in step.reports(answer)]
            elif want.kind == "top":
                (best,) = step.reports(answer)
                out.top_ids, out.top_logprobs = best.top_ids, best.top_logprobs
            else:
                out.logits = step.row_of_logits(answer)
        return out


class Final:
    """The norm before the head, on hidden rows that have left the program: embeddings are pooled from what it gives."""

    def __init__(self, model: Model, weights: PackedWeights) -> None:
        self.width = model.config.hidden_size
        self._kind, self._eps = model.norm.kind, model.norm.eps
        self._weight, self._bias = weights.vector(model.norm), weights.vector(model.norm, "bias")

    def sum(self, rows: np.ndarray) -> list[float]:
        """The sum of normed rows [r, width]."""
        normed = core().norm(np.ascontiguousarray(rows), self._kind, self._weight, self._bias, self._eps)
        return normed.sum(0).tolist() if len(rows) else [0.0] * self.width


def _scores(step: Any, answer: tuple[int, int], out: FeedOutput) -> None:
    """The log-probabilities of known tokens: one answer each."""
    first, count = answer
    out.scores = [_logprob(step.reports(at)[0]) for at in range(first, first + count)]
    errors = [error for at in range(first, first + count) if (error := step.error(at))]
    out.error = out.error or "".join(errors[:1])


def _new_slot(new: NewSlot) -> Slot:
    assert new.params is not None
    sequence = core().Sequence(new.tokens[: new.prompt_len], sample_params(new.params, new.stop_ids))
    sequence.extend(new.tokens[new.prompt_len :])
    return Slot(sequence, new.seed, new.params)


def _logprob(report: Any) -> TokenLogprob:
    return TokenLogprob(report.id, report.logprob, report.rank, report.top_ids, report.top_logprobs)
