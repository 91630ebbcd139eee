"""The runner carries out plans, for every back end: plan in, compact output out. It has a target model and the models that
draft for it or are combined with it, on the same slots and block ids.

Each program has its own pool with the same number of blocks. Changes of slots, tables, moves and copies in the target's plan
hold for all pools; the plan of another model carries only feeds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec
import numpy as np

from headrace.data.plan import (
    AMATEUR,
    CASCADE,
    FEATURES,
    HIDDEN,
    UPPER,
    Answers,
    Each,
    Feed,
    KVGroup,
    NewSlot,
    Pooled,
    Ranked,
    StepOutput,
    StepPlan,
    Top,
)
from headrace.kv.block_memory import BlockMemory, BlockPart
from headrace.runner.alignment import align, aligns, queries
from headrace.runner.classifier import ClassifierRun, ExitClassifiers, asked
from headrace.runner.early_exit import DraftExits, EarlyExit, Exit, PropagatingExit, TokenCascade
from headrace.runner.program import AnyLive, Program, Step
from headrace.runner.span import WHOLE, Span
from headrace.runner.stored_rows import Rows
from headrace.runner.wants import add_rows, pools


class Runner:
    """Carries out plans one at a time; owned by an executor. Between steps it keeps slots, pools and stored rows.

    parts: the models 1, 2, … of plans: programs, spans of the target, or spans that end in an exit. amateur: number of the
    model whose logits are combined with the target's; it runs the same feeds, so its K/V reach as far. leaves: the exits at
    which tokens may stop, ascending, or the smaller model of a cascade. propagate: exited rows are propagated, not stored.
    kept: stored hidden rows of the target, by KV group; those of several exits have the exit's number behind the name.
    """

    def __init__(
        self,
        target: Program,
        parts: Sequence[Program | Span | Exit | DraftExits] = (),
        amateur: int = 0,
        leaves: Exit | Sequence[Exit] | Program | None = None,
        propagate: bool = False,
    ) -> None:
        self._exits = {number: part for number, part in enumerate(parts, 1) if isinstance(part, Exit | DraftExits)}
        headed = [part.head if isinstance(part, Exit | DraftExits) else part for part in parts]
        self.programs = [target, *(part for part in headed if not isinstance(part, Span))]
        self._models: list[tuple[Program, Span]] = [(target, WHOLE)]
        self._models += [(target, part) if isinstance(part, Span) else (part, WHOLE) for part in headed]
        self._amateur = self._models[amateur][0] if amateur else None
        self.slots = Slots(target.live)
        self.kept = {HIDDEN: target.kept(), FEATURES: target.kept()}
        self.exits: ExitClassifiers | None = None  # of the target
        self.leaving: EarlyExit | None = None
        if isinstance(leaves, Exit):
            leaves = (leaves,)
        if isinstance(leaves, Sequence):
            rows = {f"{UPPER}.{number}" if number else UPPER: target.kept() for number in range(len(leaves))}
            self.kept |= rows
            self.programs.append(leaves[0].head)
            self.leaving = (PropagatingExit if propagate else EarlyExit)(target, leaves, [*rows.values()])
        elif leaves is not None:
            self.programs.append(leaves)
            self.leaving = TokenCascade(target, leaves)
        self._chains: dict[tuple[int, int], AnyLive] = {}  # by model and slot: a copy with draft tokens

    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry out a plan. If the step raises, slots and tables are as after the plan all the same."""
        self.slots.apply(plan)
        if not plan.model:
            self._rearrange(plan)
            self._encode(plan.feeds)
        return self.run(plan) if plan.feeds else StepOutput(plan.step)

    def run(self, plan: StepPlan, span: Span | None = None) -> StepOutput:
        """Run the feeds of the plan's model and answer their wants. span: instead of the model's own."""
        program, own = self._models[plan.model]
        span = own if span is None else span
        feeds, lives = plan.feeds, [self.slots[feed.slot] for feed in plan.feeds]
        if plan.model:
            feeds, lives = self._with_chains(plan.model, feeds, lives)
        if (exit := self._exits.get(plan.model)) is not None:
            return StepOutput(plan.step, exit.run(self.target, feeds, lives))
        keeps = not plan.model and span == WHOLE
        features = keeps and self.kept[FEATURES].reserved
        amateur = self._amateur_rows(plan) if self._amateur is not None and not plan.model else None
        if self.exits is not None and asked(feeds):
            return StepOutput(plan.step, ClassifierRun(self.exits, feeds, lives).run(program))
        if self.leaving is not None and keeps and self.leaving.asked(feeds, lives):
            return self.leaving.run(plan.step, feeds, lives, partial(self._after, amateur))
        step = program.step()
        if amateur is None and not features and program.inputs is None and step.draw_each(feeds, lives):
            program.run(step, span)
            return StepOutput(plan.step, step.drawn())
        rows = None if program.inputs is None else program.inputs.rows(feeds, self.slots, self.kept[FEATURES])
        return StepOutput(plan.step, self._answers((program, step, span), amateur, feeds, lives, rows, keeps))

    def _after(
        self, amateur: Step | None, feeds: Sequence[Feed], lives: Sequence[AnyLive], span: Span, rows: Rows
    ) -> list[Answers]:
        """The target's answers after a span to its end that starts from `rows`."""
        program = self.target
        return self._answers((program, program.step(), span), amateur, feeds, lives, rows, keeps=True)

    def _answers(
        self,
        ran: tuple[Program, Step, Span],
        amateur: Step | None,
        feeds: Sequence[Feed],
        lives: Sequence[AnyLive],
        rows: Rows,
        keeps: bool,
    ) -> list[Answers]:
        """The answers of every feed to a step of a program. keeps: the step ends with the target's last layer, so its rows may
        be stored."""
        program, step, span = ran
        features = keeps and self.kept[FEATURES].reserved
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(feed, live, None if live.params.combined is None else amateur)
        searched = keeps and any(live.params.penalty_alpha for live in lives)
        chained = program.inputs is not None and program.inputs.chains
        keep = features or searched or chained or any(True for _ in pools(feeds))
        taps = dict.fromkeys((name for *_, want in aligns(feeds) for name in queries(want)), np.empty(0))
        hidden = program.run(step, span, rows, keep, **({"taps": taps} if taps else {}))
        if program.inputs is not None and chained:
            program.inputs.store_tips(feeds, hidden)
        outputs = step.answers()
        if features:
            self._keep_features(feeds, lives, hidden)
        if searched:
            self._store_final_rows(program, feeds, lives, hidden, outputs)
        for number, at, which, want in pools(feeds):
            outputs[number][at] = Pooled(add_rows(want.before, program.on_host(program.final(hidden[which]))))
        for number, at, which, alignment in aligns(feeds):
            asked = {name: rows[which] for name, rows in taps.items()}
            keys = partial(program.source_keys, lives[number], positions=alignment.positions)
            outputs[number][at] = align(alignment, asked, keys)
        return [tuple(answers) for answers in outputs]

    @property
    def target(self) -> Program:
        """The program of the target."""
        return self.programs[0]

    @contextmanager
    def classifying(self, classifier: ExitClassifiers) -> Iterator[None]:
        """Classify with `classifier` inside the `with` block, and as before after it. For an idle engine."""
        before = self.exits
        self.exits = classifier
        try:
            yield
        finally:
            self.exits = before

    def rows_after(self, feed: Feed, layers: Sequence[int] = ()) -> list[Rows]:
        """Hidden rows [tokens, hidden] of a feed after the first `layers` layers of the target (ascending), and after all."""
        first, rows, result = 0, None, []
        for last in (*layers, self.target.config.num_layers):
            step = self.target.step()
            step.feed(feed, self.slots[feed.slot])
            rows = self.target.run(step, Span(last, first=first), rows, keep=True)
            result.append(rows)
            first = last
        return result

    def reserve(self, group: str) -> None:
        """Allocate stored rows, those of all exits together, before the first of them. Raises ValueError if they do not fit."""
        for name, kept in self.kept.items():
            if name.partition(".")[0] == group:
                kept.reserve()

    def block_memory(self, groups: Sequence[KVGroup]) -> BlockMemory:
        """What holds the K/V and stored rows of each group. Rows for contrastive search are left out."""
        return BlockMemory([self._part(group) for group in groups])

    def _part(self, group: KVGroup) -> BlockPart | None:
        if group.name == FEATURES:
            return self.kept[FEATURES]
        if group.name == HIDDEN:
            return None
        if group.name == AMATEUR:
            return self._amateur
        # A cascade's smaller model is the last program.
        return self.programs[-1] if group.name == CASCADE else self._models[group.model][0]

    def kv_bytes(self) -> int:
        return sum(program.kv_bytes() for program in self.programs) + sum(kept.bytes for kept in self.kept.values())

    def close(self) -> None:
        self.slots.clear()
        self._chains.clear()
        for program in reversed(self.programs):
            program.close()

    def _rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies in all pools and stored rows."""
        if plan.moves or plan.copies:
            for program in self.programs:
                program.rearrange(plan)
            for kept in self.kept.values():
                kept.rearrange(plan)

    def _encode(self, feeds: Sequence[Feed]) -> None:
        """Encode the sources of feeds, in every model that reads them."""
        sources = [(feed.source, self.slots[feed.slot].source_table) for feed in feeds if feed.source is not None]
        if sources:
            for program in self.programs:
                program.encode(sources)

    def _with_chains(self, model: int, feeds: list[Feed], lives: list[AnyLive]) -> tuple[list[Feed], list[AnyLive]]:
        """Feeds of a draft model, in which the draft tokens are known tokens of copies of their slots.

        A feed without known tokens brings a chain's next token. In the copy it is drawn like any other: with the noise of its
        position, and with penalties that count the chain.
        """
        feeds = list(feeds)
        for at, feed in enumerate(feeds):
            if feed.nodes and not feed.count:
                assert len(feed.nodes) == 1, "a chain grows by one token"
                if feed.start == len(lives[at]):
                    self._chains[model, feed.slot] = lives[at].fork()
                lives[at] = chain = self._chains[model, feed.slot]
                assert len(chain) == feed.start, "a chain has no gaps"
                chain.extend(feed.nodes)
                feeds[at] = msgspec.structs.replace(feed, count=1, nodes=(), parents=())
        return feeds, lives

    def _amateur_rows(self, plan: StepPlan) -> Step | None:
        """A finished step of the amateur model with its rows of logits; None if no feed is combined with it."""
        feeds = [feed for feed in plan.feeds if self.slots[feed.slot].params.combined is not None]
        if not feeds or self._amateur is None:
            return None
        step: Step = self._amateur.step()
        for feed in feeds:
            step.feed_for_rows(feed, self.slots[feed.slot])
        self._amateur.run(step, WHOLE)
        return step

    def _keep_features(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], hidden: Rows) -> None:
        """Store the rows after the last layer of all tokens, for heads that draft from them."""
        end = 0
        for feed, live in zip(feeds, lives, strict=True):
            start, end = end, end + feed.count + len(feed.nodes)
            self.kept[FEATURES].store(feed, live.table, hidden[start:end])

    def _store_final_rows(
        self, program: Program, feeds: Sequence[Feed], lives: Sequence[AnyLive], hidden: Rows, outputs: list[list]
    ) -> None:
        """Store the normalised final rows for contrastive search, and set each candidate's largest cosine with the rows
        before."""
        kept, end = self.kept[HIDDEN], 0
        for feed, live, answers in zip(feeds, lives, outputs, strict=True):
            start, end = end, end + feed.count + len(feed.nodes)
            if not live.params.penalty_alpha:
                continue
            kept.store(feed, live.table, kept.unit(program.final(hidden[start:end])))
            for want, answer in zip(feed.wants, answers, strict=True):
                if isinstance(want, Top) and want.closest and isinstance(answer, Each):
                    for ranked, near in zip(answer.answers, kept.closest(feed, live.table), strict=True):
                        if isinstance(ranked, Ranked):
                            ranked.closest = near


class Slots(dict[int, AnyLive]):
    """Live sequences by slot, updated by each plan. live: makes one from a NewSlot."""

    def __init__(self, live: Callable[[NewSlot], AnyLive]) -> None:
        self._live = live

    def apply(self, plan: StepPlan) -> None:
        """Free, set up and fork slots, extend block tables, append the new tokens of each feed."""
        for slot in plan.free:
            self.pop(slot, None)  # after a failed step a slot may be freed twice
        for new in plan.new:
            self[new.slot] = self[new.source].fork() if new.source >= 0 else self._live(new)
        for delta in plan.tables:
            self[delta.slot].set_table(delta.table, delta.start, delta.blocks)
        for feed in plan.feeds:
            if feed.new:
                self[feed.slot].extend(feed.new)
