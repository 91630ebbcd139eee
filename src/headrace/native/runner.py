"""The native runner: a step plan in, compact output out; everything between is one call into the C++ core."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headrace.data.params import SamplingParams
from headrace.data.plan import Feed, FeedOutput, StepOutput, StepPlan, TokenLogprob, Want
from headrace.models.base import Model
from headrace.native import core
from headrace.native.buffers import Buffers, Ropes
from headrace.native.lowering import FUSIONS, Lowered, lower
from headrace.native.slots import Slot, new_slot
from headrace.native.threads import thread_pool
from headrace.native.weights import PackedWeights
from headrace.ops.rejection import round_key
from headrace.runner.answers import add_live
from headrace.runner.hidden import Features, HiddenStates
from headrace.runner.parts import Part
from headrace.runner.pooling import add_rows, pools
from headrace.runner.record import record
from headrace.weights.source import WeightSource

log = logging.getLogger("headrace")

KV_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "float32": "f32", "int8": "int8"}


def kv_block_bytes(config: Any, block_size: int, kv_dtype: str = "auto") -> int:
    """Bytes that one block of the pool takes in all layers."""
    sizes = config.num_layers, block_size, config.num_kv_heads, config.head_dim
    return int(core().KVPool.block_bytes(*sizes, KV_DTYPES[kv_dtype]))


@dataclass(slots=True)
class Rows:
    """The rows of logits that a plan's feeds want, as answers of a step that has run, by slot."""

    step: Any  # _core.Step
    answers: dict[int, list[int]]

    def contrast(self, step: Any, slot: int, params: SamplingParams) -> None:
        """Have the feed that a step got last contrasted with these; they are used up."""
        for row, answer in enumerate(self.answers[slot]):
            step.contrast(row, self.step, answer, params.contrastive_alpha, params.contrastive_beta)


class NativeRunner:
    """Runs plans on a recorded model and a paged pool of the native core. One plan at a time.

    `kv_dtype`: auto (bfloat16), bfloat16, int8, float32. `threads` 0: one for each core. `quantize`: "", int8, int4, for
    files with float weights. `max_positions` bounds the positions a sequence may reach. Raises RecordError where the model
    cannot be recorded, WeightError as the loader does. `slots` are shared with other runners; `head_ids` (ascending) are the
    only tokens that get logits. Without `embeds` its steps begin with hidden rows, to which `enter` may do something before the
    first layer, and it holds no table of tokens. Without `pack` the caller has the weights packed before the first plan.
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
        slots: dict[int, Slot] | None = None,
        head_ids: np.ndarray | None = None,
        embeds: bool = True,
        enter: Callable[[Lowered, Ropes, Buffers], None] | None = None,
        pack: bool = True,
    ) -> None:
        self.model = model
        self.config = config = model.config
        pool = thread_pool(threads)
        self.weights = weights or PackedWeights(model, source, pool, quantize)
        sizes = max(config.num_layers, 1), num_blocks, block_size, config.num_kv_heads, config.head_dim
        self.kv = core().KVPool(*sizes, KV_DTYPES[kv_dtype])
        lowered = lower(
            record(model, embeds),
            self.weights,
            config,
            pool=pool,
            kv=self.kv,
            max_positions=max_positions,
            fuse=fuse,
            isa=isa,
            head_ids=head_ids,
            enter=enter,
        )
        if pack:
            self.weights.pack()
        self.program = lowered.program
        self.hidden = HiddenStates(num_blocks, block_size, config.hidden_size)
        self.features = Features(num_blocks, block_size, config.hidden_size)
        self.taps: Mapping[str, int] = lowered.taps
        self._final = Final(model, self.weights)
        self.slots: dict[int, Slot] = {} if slots is None else slots
        self._step = core().Step()
        if self.weights.said():
            log.info("%s", self.weights.said())

    def execute(self, plan: StepPlan) -> StepOutput:
        self.prepare(plan)
        self.rearrange(plan)
        return self.run(plan) if plan.feeds else StepOutput(plan.step)

    def rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies in this model's pool."""
        if plan.moves:
            self.kv.move([(source, to) for _, source, to in plan.moves])
        if plan.copies:
            self.kv.copy_blocks([(source, to) for _, source, to in plan.copies])
        self.hidden.rearrange(plan)
        self.features.rearrange(plan)

    def rows(self, plan: StepPlan) -> Rows:
        """Feed, and keep the rows of logits that are wanted."""
        step = self._step
        step.clear()
        answers = {}
        for feed in plan.feeds:
            count, _ = _head_rows(feed)
            step.feed(self.slots[feed.slot].sequence, feed.start, feed.count, count, feed.nodes, feed.parents)
            answers[feed.slot] = [step.logits(row) for row in range(count)]
        self.program.run(step)
        return Rows(step, answers)

    def run(
        self, plan: StepPlan, slots: Mapping[int, Slot] | None = None, amateur: Rows | None = None, part: Part | None = None
    ) -> StepOutput:
        """Feed, and answer the wants: with these slots in place of one's own, with rows contrasted with an amateur's, by a part
        of the model."""
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)  # torch's threads would spin on the cores of ours
        known = self.slots if slots is None else slots
        step = self._step
        step.clear()
        if amateur is None and (drawn := self._draw_each(step, plan, known, part or Part())) is not None:
            return StepOutput(plan.step, drawn)
        asked = []
        for feed in plan.feeds:
            asked.append(self._feed(step, feed, known[feed.slot]))
            if amateur is not None and feed.slot in amateur.answers:
                amateur.contrast(step, feed.slot, known[feed.slot].params)
        hidden = self._run(step, plan, known, part or Part())
        outputs = [self._output(step, feed, known[feed.slot], answers) for feed, answers in zip(plan.feeds, asked, strict=True)]
        for number, which, want in pools(plan):
            outputs[number].pooled = add_rows(want.before, self._final.rows(hidden[which]))
        self.hidden.answer(plan, known, outputs)
        return StepOutput(plan.step, outputs)

    def _draw_each(self, step: Any, plan: StepPlan, slots: Mapping[int, Slot], part: Part) -> list[FeedOutput] | None:
        """The short way for most steps: after one known token of each feed a token is drawn, and nothing else is asked. Where
        some feed is or wants anything else: None, and nothing was done."""
        if self.features.kept:
            return None
        sequences, starts = [], []
        for feed in plan.feeds:
            slot = slots[feed.slot]
            if feed.count != 1 or feed.nodes or feed.masks or len(feed.wants) != 1 or not slot.plain:
                return None
            want = feed.wants[0]
            if want.kind != "sample" or want.rows != "last" or want.n != 1 or want.logprobs is not None:
                return None
            if want.child != slot.child:
                slot.draw_as(want.child)
            sequences.append(slot.sequence)
            starts.append(feed.start)
        step.draw_each(sequences, starts)
        self.program.run(step, layers=(0, part.layers or -1), skips=list(part.skips))
        tokens = step.drawn()
        return [FeedOutput((token,)) if token >= 0 else FeedOutput(error=step.error(at)) for at, token in enumerate(tokens)]

    def _run(self, step: Any, plan: StepPlan, slots: Mapping[int, Slot], part: Part) -> np.ndarray:
        """Carry out the step; returns its hidden rows, where something is made of them."""
        searched = any(slots[feed.slot].params.penalty_alpha for feed in plan.feeds)
        kept = self.features.kept and part == Part()
        if not searched and not kept and not any(True for _ in pools(plan)):
            self.program.run(step, layers=(0, part.layers or -1), skips=list(part.skips))
            return np.empty((0, self._final.width), np.float32)
        hidden = np.empty((step.rows, self._final.width), np.float32)
        self.program.run(step, hidden_out=hidden)
        if kept:
            self.features.keep(plan, slots, hidden)
        if searched:
            self.hidden.keep(plan, slots, torch.from_numpy(hidden), lambda x: torch.from_numpy(self._final.rows(x.numpy())))
        return hidden

    def reserve_hidden(self) -> None:
        self.hidden.reserve()

    def kv_bytes(self) -> int:
        return int(self.kv.bytes) + self.hidden.bytes + self.features.bytes

    def close(self) -> None:
        """Give the packed weights and the pool back."""
        self.slots.clear()
        del self.program, self.weights, self.kv

    def prepare(self, plan: StepPlan) -> None:
        """Free, set up and fork slots, extend tables, append the tokens each feed brings."""
        slots = self.slots
        for number in plan.free:
            slots.pop(number, None)  # after a step that failed a slot may be given back twice
        for new in plan.new:
            slots[new.slot] = slots[new.source].fork() if new.source >= 0 else new_slot(new)
        for delta in plan.tables:
            slots[delta.slot].sequence.set_table(delta.start, delta.blocks)
        for feed in plan.feeds:
            if feed.new:
                slots[feed.slot].sequence.extend(feed.new)

    def _feed(self, step: Any, feed: Feed, slot: Slot) -> list[tuple[Want, Any]]:
        """Add a feed and what is wanted of it; returns where the answers will be."""
        rows, last = _head_rows(feed)
        if feed.nodes:
            step.feed(slot.sequence, feed.start, feed.count, rows, feed.nodes, feed.parents)
        else:
            step.feed(slot.sequence, feed.start, feed.count, rows)
        if feed.masks:
            step.mask(feed.masks)
        asked = [(want, self._ask_all(step, slot, want, last, feed)) for want in feed.wants]
        if live := [want for want in feed.wants if want.live]:
            step.mask(slot.live_masks(feed, self.config.vocab_size))  # for all that is asked from here on
            asked += [(want, self._ask_all(step, slot, want, last, feed)) for want in live]
        return asked

    def _ask_all(self, step: Any, slot: Slot, want: Want, last: int, feed: Feed) -> Any:
        """Ask at the last known token, or at each node: a list, which begins with the last known token's where that counts."""
        if want.kind == "pool":
            return None
        if want.rows != "nodes" or want.kind in ("verify", "reject"):
            return self._ask(step, slot, want, last, feed)
        first = last if want.kind == "logits" else last + 1
        return [self._ask(step, slot, want, row, feed) for row in range(first, last + 1 + len(feed.nodes))]

    def _ask(self, step: Any, slot: Slot, want: Want, last: int, feed: Feed) -> Any:
        logprobs = -1 if want.logprobs is None else want.logprobs
        processed = slot.params.logprobs_mode == "processed"
        if want.kind == "verify":
            return step.verify(last, slot.key(want.child), logprobs, processed, want.mu)
        if want.kind == "reject":
            key, block = round_key(slot.seed, len(slot), want.child), slot.params.verification == "block"
            return step.reject(last, key, feed.q, block, logprobs, processed)
        if want.kind == "propose":
            return step.propose(last, round_key(slot.seed, len(slot) - want.k, want.child))
        if want.kind == "sample":
            keys = [slot.key(child) for child in range(want.child, want.child + want.n)]
            return step.draw(last, keys, logprobs, processed, want.mu)
        if want.kind == "top":
            return step.top(last, want.k)
        if want.kind == "score":
            return step.score(0, max(logprobs, 0))
        if want.kind == "logits":
            return step.logits(last)
        raise ValueError(f"this runner does not answer {want.kind!r}")

    def _output(self, step: Any, feed: Feed, slot: Slot, asked: list[tuple[Want, Any]]) -> FeedOutput:
        out = FeedOutput()
        for want, answer in asked:
            if want.kind == "pool":
                continue  # filled in where the hidden rows are
            if want.kind == "score":
                _scores(step, answer, out)
            elif isinstance(answer, list):
                out.nodes = out.nodes or tuple(FeedOutput() for _ in feed.nodes)
                for each, place in zip(answer, [out, *out.nodes][-len(answer) :] if answer else (), strict=True):
                    _fill(step, slot, want, each, place)
            else:
                _fill(step, slot, want, answer, out)
        return out


class Final:
    """The norm before the head, on hidden rows that have left the program: embeddings are pooled from what it gives."""

    def __init__(self, model: Model, weights: PackedWeights) -> None:
        self.width = model.config.hidden_size
        self._kind, self._eps = model.norm.kind, model.norm.eps
        self._weight, self._bias = weights.vector(model.norm), weights.vector(model.norm, "bias")

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Normed rows [r, width]."""
        if not len(rows):
            return rows
        normed: np.ndarray = core().norm(np.ascontiguousarray(rows), self._kind, self._weight, self._bias, self._eps)
        return normed


def _head_rows(feed: Feed) -> tuple[int, int]:
    """How many of a feed's last rows need logits, and which of these is the last known token's."""
    wants = [want for want in feed.wants if want.kind != "pool"]  # which reads hidden rows
    if not wants:
        return 0, 0
    known = feed.count if any(want.rows == "all" for want in wants) else min(feed.count, 1)
    return known + len(feed.nodes), known - 1


def _fill(step: Any, slot: Slot, want: Want, answer: int, out: FeedOutput) -> None:
    """What was asked of one row, or of the walk over a draft."""
    if want.live and out.top_ids:  # the second answer: the best that end nothing, of which none may be left
        for best in () if step.error(answer) else step.reports(answer):
            add_live(out, best.top_ids, best.top_logprobs)
    elif error := step.error(answer):
        out.error = out.error or error
    elif want.kind == "propose":
        out.tokens, out.logits = tuple(step.tokens(answer)), step.row_of_logits(answer)
    elif want.kind in ("sample", "verify", "reject"):
        out.tokens = tuple(step.tokens(answer))
        if want.kind != "sample":
            out.path = tuple(step.path(answer))
        if want.logprobs is not None:
            out.logprobs = tuple(_logprob(report) for report in step.reports(answer))
        if slot.params.mirostat_tau:
            out.mus = tuple(report.mu for report in step.reports(answer))
    elif want.kind == "top":
        (best,) = step.reports(answer)
        out.top_ids, out.top_logprobs = tuple(best.top_ids), tuple(best.top_logprobs)
    else:
        out.logits = step.row_of_logits(answer)


def _scores(step: Any, answer: tuple[int, int], out: FeedOutput) -> None:
    """The log-probabilities of known tokens: one answer each."""
    first, count = answer
    out.scores = tuple(_logprob(step.reports(at)[0]) for at in range(first, first + count))
    errors = [error for at in range(first, first + count) if (error := step.error(at))]
    out.error = out.error or "".join(errors[:1])


def _logprob(report: Any) -> TokenLogprob:
    return TokenLogprob(report.id, report.logprob, report.rank, report.top_ids, report.top_logprobs)
