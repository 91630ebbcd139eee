"""The native runner: a step plan in, compact output out; everything between is one call into the C++ core."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

import numpy as np
import torch

from headrace.data.params import SamplingParams
from headrace.data.plan import (
    Answer,
    Answers,
    AnyWant,
    Drawn,
    Each,
    Failed,
    Feed,
    LogitRow,
    Logits,
    Pool,
    Pooled,
    Propose,
    Ranked,
    Reject,
    Sample,
    Score,
    Scores,
    StepOutput,
    StepPlan,
    TokenLogprob,
    Top,
    Verify,
    Where,
)
from headrace.kv.layout import kv_shape
from headrace.models.base import Model
from headrace.native import core
from headrace.native.buffers import Buffers, Ropes
from headrace.native.lowering import FUSIONS, Lowered, lower
from headrace.native.slots import Slot, new_slot
from headrace.native.threads import thread_pool
from headrace.native.weights import PackedWeights
from headrace.ops.rejection import round_key
from headrace.runner.answers import add_live, logit_rows, named_rows
from headrace.runner.hidden import Features, HiddenStates
from headrace.runner.parts import Part
from headrace.runner.pooling import add_rows, pools
from headrace.runner.record import record
from headrace.weights.source import WeightSource

log = logging.getLogger("headrace")

KV_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "float32": "f32", "int8": "int8"}


def kv_block_bytes(config: Any, block_size: int, kv_dtype: str = "auto") -> int:
    """Bytes that one block of the pool takes in all layers."""
    layers, heads, head_dim = kv_shape(config)
    return int(core().KVPool.block_bytes(layers, block_size, heads, head_dim, KV_DTYPES[kv_dtype]))


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
        layers, heads, head_dim = kv_shape(config)
        self.kv = core().KVPool(max(layers, 1), num_blocks, block_size, heads, head_dim, KV_DTYPES[kv_dtype])
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
            count = logit_rows(feed)
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
        outputs = [
            [_answer(step, known[feed.slot], *one) for one in each] for feed, each in zip(plan.feeds, asked, strict=True)
        ]
        for number, at, which, want in pools(plan):
            outputs[number][at] = Pooled(add_rows(want.before, self._final.rows(hidden[which])))
        self.hidden.answer(plan, known, outputs)
        return StepOutput(plan.step, [tuple(answers) for answers in outputs])

    def _draw_each(self, step: Any, plan: StepPlan, slots: Mapping[int, Slot], part: Part) -> list[Answers] | None:
        """The short way for most steps: after one known token of each feed a token is drawn, and nothing else is asked. Where
        some feed is or wants anything else: None, and nothing was done."""
        if self.features.kept:
            return None
        sequences, starts = [], []
        for feed in plan.feeds:
            slot = slots[feed.slot]
            if feed.count != 1 or feed.nodes or feed.allowed or len(feed.wants) != 1 or not slot.plain:
                return None
            want = feed.wants[0]
            if type(want) is not Sample or want.at is not Where.LAST or want.n != 1 or want.logprobs is not None:
                return None
            if want.child != slot.child:
                slot.draw_as(want.child)
            sequences.append(slot.sequence)
            starts.append(feed.start)
        step.draw_each(sequences, starts)
        self.program.run(step, layers=(0, part.layers or -1), skips=list(part.skips))
        tokens = step.drawn()
        return [(Drawn((token,)) if token >= 0 else Failed(step.error(at)),) for at, token in enumerate(tokens)]

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

    def _feed(self, step: Any, feed: Feed, slot: Slot) -> list[tuple[AnyWant, Any, Any]]:
        """Add a feed and what is wanted of it; returns each want, where its answer will be, and that among what goes on."""
        rows = logit_rows(feed)
        last = rows - len(feed.nodes) - 1  # where there are any
        if feed.nodes:
            step.feed(slot.sequence, feed.start, feed.count, rows, feed.nodes, feed.parents)
        else:
            step.feed(slot.sequence, feed.start, feed.count, rows)
        if feed.allowed:
            step.mask(feed.allowed)
        asked = [(want, self._ask(step, slot, want, last, feed), None) for want in feed.wants]
        if any(isinstance(want, Top) and want.live for want in feed.wants):
            step.mask(slot.live_masks(feed, self.config.vocab_size))  # for all that is asked from here on
            asked = [
                (want, answer, self._ask(step, slot, want, last, feed) if isinstance(want, Top) and want.live else None)
                for want, answer, _ in asked
            ]
        return asked

    def _ask(self, step: Any, slot: Slot, want: AnyWant, last: int, feed: Feed) -> Any:
        """Ask at the last known token, or at each row that a want names: a list."""
        processed = slot.params.logprobs_mode == "processed"
        match want:
            case Verify():
                return step.verify(last, slot.key(want.child), _most(want.logprobs), processed, want.mu)
            case Reject():
                key, block = round_key(slot.seed, len(slot), want.child), slot.params.verification == "block"
                return step.reject(last, key, feed.q, block, _most(want.logprobs), processed)
            case Propose():
                return step.propose(last, round_key(slot.seed, len(slot) - want.known, want.child))
            case Score():
                return step.score(0, want.logprobs)
            case Sample() | Top() | Logits():
                if want.at is Where.LAST:
                    return self._ask_row(step, slot, want, last, processed)
                return [self._ask_row(step, slot, want, last + 1 + node, processed) for node in named_rows(feed, want)]
            case Pool():
                return None  # filled in where the hidden rows are
            case _:
                assert_never(want)

    def _ask_row(self, step: Any, slot: Slot, want: Sample | Top | Logits, row: int, processed: bool) -> Any:
        match want:
            case Sample():
                keys = [slot.key(child) for child in range(want.child, want.child + want.n)]
                return step.draw(row, keys, _most(want.logprobs), processed, want.mu)
            case Top():
                return step.top(row, want.k)
            case Logits():
                return step.logits(row)


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


def _most(logprobs: int | None) -> int:
    """How many alternatives are told of a token, as the core takes it: -1 says nothing of any."""
    return -1 if logprobs is None else logprobs


def _answer(step: Any, slot: Slot, want: AnyWant, number: Any, live: Any) -> Any:
    """What came of a want: `number` are the step's, `live` those of the second question, for what goes on."""
    if isinstance(want, Pool):
        return None
    if isinstance(want, Score):
        return _scores(step, number)
    if not isinstance(number, list):
        return _one(step, slot, want, number, live)
    more = live or [None] * len(number)
    return Each(tuple(_one(step, slot, want, *one) for one in zip(number, more, strict=True)))


def _one(step: Any, slot: Slot, want: AnyWant, number: int, live: int | None) -> Any:
    """What was asked of one row, or of the walk over a draft."""
    if error := step.error(number):
        return Failed(error)
    match want:
        case Sample() | Verify() | Reject():
            out = Drawn(tuple(step.tokens(number)))
            if not isinstance(want, Sample):
                out.path = tuple(step.path(number))
            if want.logprobs is not None:
                out.logprobs = tuple(_logprob(report) for report in step.reports(number))
            if slot.params.mirostat_tau:
                out.mus = tuple(report.mu for report in step.reports(number))
            return out
        case Propose():
            return Drawn(tuple(step.tokens(number)), q=step.row_of_logits(number))
        case Top():
            (best,) = step.reports(number)
            ranked = Ranked(tuple(best.top_ids), tuple(best.top_logprobs))
            for best in () if live is None or step.error(live) else step.reports(live):  # of which none may be left
                add_live(ranked, best.top_ids, best.top_logprobs)
            return ranked
        case _:
            return LogitRow(step.row_of_logits(number))


def _scores(step: Any, asked: tuple[int, int]) -> Answer:
    """The log-probabilities of known tokens: one answer each."""
    numbers = range(asked[0], sum(asked))
    error = next((error for at in numbers if (error := step.error(at))), "")
    return Failed(error) if error else Scores(tuple(_logprob(step.reports(at)[0]) for at in numbers))


def _logprob(report: Any) -> TokenLogprob:
    return TokenLogprob(report.id, report.logprob, report.rank, report.top_ids, report.top_logprobs)
