"""The runner: plan in, compact output out, for every back end. A target and the companions that draft for it or that it is
contrasted with, on the same slots and block ids.

Each program has its own pool of as many blocks. What the target's plan changes (slots, tables, moves, copies) holds for all
pools; a companion's plan carries feeds only.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import msgspec

from headrace.data.plan import FEATURES, HIDDEN, UPPER, Answers, Each, Feed, Pooled, Ranked, StepOutput, StepPlan, Top
from headrace.runner.classifier import Exits, Staged, asked
from headrace.runner.early_exit import Cascade, Leaving, Propagating
from headrace.runner.exit_head import Exit
from headrace.runner.program import AnyLive, Program, Step
from headrace.runner.slots import Slots
from headrace.runner.span import WHOLE, Span
from headrace.runner.stored_rows import Rows
from headrace.runner.wants import add_rows, pools


class Runner:
    """Carries out plans on the program they name, one at a time; no state but slots, pools and kept rows outlives a step.

    A companion is a program, a span of the target, or one that ends in an exit. `amateur` is the number of the companion whose
    logits are combined with the target's: a plan for the target feeds it the same rows wherever a request is decoded so, so
    its K and V are always there as far as the target's are. By the exit `leaves` tokens may leave the target early, with rows
    that `propagate` or are kept for the layers above; a program in its place is the smaller model of a cascade. `kept` are
    hidden rows of the target by the name of their KV group.
    """

    def __init__(
        self,
        target: Program,
        companions: Sequence[Program | Span | Exit] = (),
        amateur: int = 0,
        leaves: Exit | Program | None = None,
        propagate: bool = False,
    ) -> None:
        self._exits = {number: each for number, each in enumerate(companions, 1) if isinstance(each, Exit)}
        headed = [each.head if isinstance(each, Exit) else each for each in companions]
        self.programs = [target, *(each for each in headed if not isinstance(each, Span))]
        self._models: list[tuple[Program, Span]] = [(target, WHOLE)]
        self._models += [(target, each) if isinstance(each, Span) else (each, WHOLE) for each in headed]
        self._amateur = self._models[amateur][0] if amateur else None
        self.slots = Slots(target.live)
        self.kept = {HIDDEN: target.kept(), FEATURES: target.kept()}
        self.exits: Exits | None = None  # of the target
        self.leaving: Leaving | None = None
        if isinstance(leaves, Exit):
            self.kept[UPPER] = target.kept()
            self.programs.append(leaves.head)
            self.leaving = (Propagating if propagate else Leaving)(target, leaves, self.kept[UPPER])
        elif leaves is not None:
            self.programs.append(leaves)
            self.leaving = Cascade(target, leaves)
        self._chains: dict[tuple[int, int], AnyLive] = {}  # by model and slot: a scratch copy

    def execute(self, plan: StepPlan) -> StepOutput:
        """Carry out a plan. What a step raises is raised; slots and tables then are as the plan says all the same."""
        self.slots.apply(plan)
        if not plan.model:
            self._rearrange(plan)
            self._encode(plan.feeds)
        return self.run(plan) if plan.feeds else StepOutput(plan.step)

    def run(self, plan: StepPlan, span: Span | None = None) -> StepOutput:
        """Feed the plan's program, and answer the wants; by a span of it in place of the one that is the companion's."""
        program, own = self._models[plan.model]
        span = own if span is None else span
        feeds, lives = plan.feeds, [self.slots[feed.slot] for feed in plan.feeds]
        if plan.model:
            feeds, lives = self._follow(plan.model, feeds, lives)
        if (exit := self._exits.get(plan.model)) is not None:
            return StepOutput(plan.step, exit.run(self.target, feeds, lives))
        keeps = not plan.model and span == WHOLE
        features = keeps and self.kept[FEATURES].reserved
        amateur = self._amateur_rows(plan) if self._amateur is not None and not plan.model else None
        if self.exits is not None and asked(feeds):
            return StepOutput(plan.step, Staged(self.exits, feeds, lives).run(program))
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
        """The target's answers after a span to its end, which begins with these rows."""
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
        """The answers of every feed to a step of a program by a span; `keeps`: they are the target's, after its last layer."""
        program, step, span = ran
        features = keeps and self.kept[FEATURES].reserved
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(feed, live, None if live.params.combined is None else amateur)
        searched = keeps and any(live.params.penalty_alpha for live in lives)
        chained = program.inputs is not None and program.inputs.chains
        keep = features or searched or chained or any(True for _ in pools(feeds))
        hidden = program.run(step, span, rows, keep)
        if program.inputs is not None and chained:
            program.inputs.left(feeds, hidden)
        outputs = step.answers()
        if features:
            self._keep_features(feeds, lives, hidden)
        if searched:
            self._search(program, feeds, lives, hidden, outputs)
        for number, at, which, want in pools(feeds):
            outputs[number][at] = Pooled(add_rows(want.before, program.on_host(program.final(hidden[which]))))
        return [tuple(answers) for answers in outputs]

    @property
    def target(self) -> Program:
        """The program of the target."""
        return self.programs[0]

    @contextmanager
    def classifying(self, classifier: Exits) -> Iterator[None]:
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
        """Take the memory of kept rows, before the first of them. Raises ValueError where it does not fit."""
        self.kept[group].reserve()

    def kv_bytes(self) -> int:
        return sum(program.kv_bytes() for program in self.programs) + sum(kept.bytes for kept in self.kept.values())

    def close(self) -> None:
        self.slots.clear()
        self._chains.clear()
        for program in reversed(self.programs):
            program.close()

    def _rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies wherever there is a row or K and V of a token."""
        if plan.moves or plan.copies:
            for program in self.programs:
                program.rearrange(plan)
            for kept in self.kept.values():
                kept.rearrange(plan)

    def _encode(self, feeds: Sequence[Feed]) -> None:
        """Have the sources that feeds bring encoded, by every model that reads them: all do so from the same blocks."""
        sources = [(feed.source, self.slots[feed.slot].source_table) for feed in feeds if feed.source]
        if sources:
            for program in self.programs:
                program.encode(sources)

    def _follow(self, model: int, feeds: list[Feed], lives: list[AnyLive]) -> tuple[list[Feed], list[AnyLive]]:
        """The feeds of a companion, with draft chains as known tokens of scratch copies of their slots.

        A feed without known tokens brings a chain's next token. As a known token of the copy it is drawn from as any other:
        with the noise of its position, and with penalties that count the chain.
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
        """A step of the amateur with the rows of logits of all feeds that are decoded together with it; None where none is."""
        feeds = [feed for feed in plan.feeds if self.slots[feed.slot].params.combined is not None]
        if not feeds or self._amateur is None:
            return None
        step: Step = self._amateur.step()
        for feed in feeds:
            step.rows(feed, self.slots[feed.slot])
        self._amateur.run(step, WHOLE)
        return step

    def _keep_features(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], hidden: Rows) -> None:
        """Keep the rows after the last layer as they are, of all tokens: heads draft from them."""
        end = 0
        for feed, live in zip(feeds, lives, strict=True):
            start, end = end, end + feed.count + len(feed.nodes)
            self.kept[FEATURES].store(feed, live.table, hidden[start:end])

    def _search(
        self, program: Program, feeds: Sequence[Feed], lives: Sequence[AnyLive], hidden: Rows, outputs: list[list]
    ) -> None:
        """Keep the final hidden states of what contrastive search decodes, of length 1, and say how near to those before them
        come the nodes of wants that ask."""
        kept, end = self.kept[HIDDEN], 0
        for feed, live, answers in zip(feeds, lives, outputs, strict=True):
            start, end = end, end + feed.count + len(feed.nodes)
            if not live.params.penalty_alpha:
                continue
            kept.store(feed, live.table, kept.unit(program.final(hidden[start:end])))
            for want, answer in zip(feed.wants, answers, strict=True):
                if isinstance(want, Top) and want.closest and isinstance(answer, Each):
                    for one, near in zip(answer.answers, kept.closest(feed, live.table), strict=True):
                        if isinstance(one, Ranked):
                            one.closest = near
