"""Speculation as the engine sees it: who drafts for which sequence, and how far."""

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.data.plan import MAX_NODES, Answers, Each, StepOutput, StepPlan
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import Drafter, Fed, Filled, ModelDrafter, Observes, Reads, Remembers, Run, check_draft
from headrace.drafting.budget import WAITED, Budgets
from headrace.drafting.controller import LEAST, Acceptance, Choice, choose, value
from headrace.drafting.costs import Costs
from headrace.drafting.draft_model import Chain, settle
from headrace.drafting.mixed import MixedCosts

log = logging.getLogger("headrace")

AnyFed = TypeVar("AnyFed", bound=Fed)

CROWD, REST = 4, 3  # in batches of this size a sequence that gives nothing to draft is left alone for so many steps
TREE_REST = 16  # and one whose tree does not pay, for so many: to build it takes time too
ASKING = 0.01  # of all time, that asking may take where nothing comes of it again and again
TEXT = 256.0  # tokens that an output is thought to have before one has ended
LEFT = 32  # and how many it is thought to have still, at least
LAG, GAP = 3, 16  # tokens behind that a model reads as it begins to draft; and beyond which it catches up with a text
OURS = ""  # no drafter's name: where what is kept of a sequence lies
FAILURES = 3  # after so many a drafter is not asked again for a request
MOST = 16  # the longest chain, unless told otherwise: what lies further is seldom reached


@dataclass(slots=True)
class Proposal:
    """The best draft that anyone has for a sequence, before it is decided how much of it is verified."""

    request: Request
    seq: Sequence
    draft: Draft
    choice: Choice


@dataclass(slots=True)
class Unverified:
    """A proposal that was not verified: the tokens that come will say whether it was right."""

    length: int  # of the sequence when it was made
    token: int
    kind: tuple[str, int]


@dataclass(slots=True)
class Standing:
    """What is kept of a sequence, beside what its drafters remember; it goes when the sequence goes."""

    unverified: Unverified | None = None
    rest: int = 0  # the last step without a drafter


class Speculation:
    """Asks drafters for each sequence that may carry a draft, and decides which of the drafts are worth their rows.

    With `gamma` every draft is verified, up to so many tokens deep; without, what was measured decides, and 0 is a choice.
    `clock`: seconds, of which only differences count.
    """

    def __init__(
        self,
        drafters: Many[Drafter],
        max_model_len: int,
        gamma: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.drafters = tuple(drafters)
        self.max_model_len = max_model_len
        self.gamma = gamma
        self.vocab_size = 2**31  # of the target: the engine's to say
        self._usual, self._mixed = Costs(), MixedCosts()
        self.costs = self._usual  # of the step under way: its kind of rows
        self.acceptance = Acceptance()
        self.budgets = Budgets()
        self._clock = clock
        self._text = TEXT  # how long outputs are, on average
        self._step = 0
        self._pause = 0  # the last step in which nobody is asked
        self._idle = 0  # times in a row that drafters were asked and nothing was worth its rows
        self._failed: dict[tuple[str, str], int] = {}  # by request and drafter: how often it raised
        # Asked once: to ask a protocol takes as long as to draft.
        self._fills = {drafter.name: drafter for drafter in drafters if isinstance(drafter, ModelDrafter)}
        self._reads = [drafter for drafter in drafters if isinstance(drafter, Reads)]

    def serves(self, request: Request) -> bool:
        """Whether a request's sequences may carry drafts: its strategy can verify them, no processor must see every token in
        order, and the whole model writes all of them."""
        return (
            bool(request.strategy.speculates)
            and not request.params.leaves
            and all(processor.scope != "stateful" for processor in request.processors)
        )

    def refusal(self, request: Request) -> str:
        """Why drafts here cannot be verified as the request wants it; empty where they can."""
        trees = [drafter.name for drafter in self.drafters if getattr(drafter, "trees", False)]
        if not request.params.rejects or not trees:
            return ""
        rule = request.params.verification
        return f"verification {rule!r} takes chains, and {', '.join(trees)} drafts trees; use noise, or another drafter"

    def pauses(self) -> bool:
        """Whether nobody is asked for the step that begins: where nothing paid a moment ago, to ask for each sequence takes
        longer than there is to gain."""
        self._step += 1
        self.budgets.settle(self.costs)
        return self._step <= self._pause

    def propose(self, seqs: Many[tuple[Request, Sequence]], plain: int, early: int = 0) -> None:
        """Give drafts to these sequences, all of which decode. `plain`: how many sequences decode in all; `early`: how many of
        those may exit early."""
        began, made = self._clock(), []
        self.costs = self._mixed.costs if early else self._usual
        rows = self._mixed.rows(plain, early) if early else plain
        for drafter in self._reads:
            drafter.begin()
        if (base := self.costs.step(rows)) is not None:
            self.budgets.open([drafter.name for drafter in self.drafters], base)
        for request, seq in seqs:
            if self._rests(seq):
                continue
            proposal = self._best(request, seq, rows, plain)
            if proposal is not None:
                made.append(proposal)
            if self.gamma is None and plain >= CROWD and (proposal is None or proposal.choice.alpha < LEAST):
                _standing(seq).rest = self._step + REST
        if self.gamma is None:
            choose([proposal.choice for proposal in made], rows, self.costs, self.budgets.by_drafter, plain)
        for proposal in made:
            self._decide(proposal)
            if self.gamma is None and proposal.choice.rows and self._too_costly(proposal.choice, rows, plain):
                _standing(proposal.seq).rest = self._step + TREE_REST
        if self.gamma is None and base is not None:
            self._idle = 0 if any(proposal.choice.gamma for proposal in made) else self._idle + 1
            self._pause = self._step + self._pause_for(plain, (self._clock() - began) / base)

    def fill(self, works: list[AnyFed], run: Run, filled: Filled) -> list[AnyFed]:
        """These works' drafts have their room: drafters that run a model now say of which tokens they are. Returns the works
        whose drafts failed."""
        failed: list[AnyFed] = []
        for name, drafter in self._fills.items() if works else ():
            mine = [work for work in works if work.seq.decode.draft is not None and work.seq.decode.draft.drafter == name]
            if not mine:
                continue
            try:
                self._fill(drafter, name, [*mine], run, filled)
            except Exception:
                self._note_failure(name, list({work.request.id: work.request for work in mine}.values()))
                for work in mine:
                    if work.seq.decode.draft is not None:
                        settle(work, Chain())
                failed += mine
        return failed

    def _fill(self, drafter: ModelDrafter, name: str, works: list[Fed], run: Run, filled: Filled) -> None:
        behind = sum(drafter.lag(work.seq) for work in works)
        began = self._clock()
        drafter.fill(works, run, filled)
        seconds = self._clock() - began
        made = [work.seq.decode.draft for work in works if work.seq.decode.draft is not None]
        for draft in made:
            draft.drafter = name
        self._filled(name, len(works), max([len(draft.tokens) for draft in made], default=1), behind, seconds)

    def _filled(self, name: str, sequences: int, longest: int, behind: int, seconds: float) -> None:
        """A model drafted for so many sequences, `longest` steps, and first read what it was behind."""
        if behind <= LAG * sequences:
            self.costs.draft_took(sequences, seconds / longest)
            self.budgets.drafted(name, min(seconds, WAITED * longest * self.costs.draft(sequences)))
            return
        reading = max(seconds - longest * self.costs.draft_guess(sequences), 0.0)
        self.costs.caught_up(behind, reading)
        ahead = reading if behind > GAP * sequences else 0.0
        self.budgets.drafted(name, seconds - ahead)
        self.budgets.caught_up(name, ahead)

    def record_step(self, plan: StepPlan, output: StepOutput) -> None:
        """Learn from the time of a step. Steps with prompts say nothing of verification; of a pause only the last counts."""
        seconds = output.seconds
        self.costs = self._mixed.costs if output.exited else self._usual
        if self._step < self._pause or len(output.exited) == len(plan.feeds):
            self.budgets.passed(seconds)
            return
        if output.exited and all(feed.count == 1 for feed in plan.feeds):
            self.budgets.record_step(*self._mixed.record_step(plan, output), seconds, len(plan.feeds))
            return
        rows, plain = plan.num_tokens, len(plan.feeds)
        alone = rows == plain or all(feed.count == 1 for feed in plan.feeds)
        if alone:
            self.costs.step_took(rows, seconds)
        else:
            decoding = [feed for feed in plan.feeds if feed.count == 1]
            plain, rows = len(decoding), sum(1 + len(feed.nodes) for feed in decoding)
        if plain:
            self.budgets.record_step(plain, rows, seconds if alone else None)

    def observe(self, request: Request, seq: Sequence, draft: Draft, path: tuple[int, ...], answers: Answers) -> None:
        """A draft of this sequence was verified. Where it is `observed`, the last answer is of its nodes."""
        tip = path[-1] if path else -1
        tried = len(path) + int(tip in draft.parents)  # below the tip of the path there was something, and it was wrong
        self.acceptance.observe(request.id, (draft.drafter, draft.confidence), len(path), tried)
        self.budgets.verified(draft.drafter, len(draft.tokens), len(path))
        for drafter in self.drafters if draft.observed else ():
            if drafter.name == draft.drafter and isinstance(drafter, Observes) and isinstance(answers[-1], Each):
                self._ask(drafter, request, drafter.observe, request, seq, draft, path, answers[-1].answers)

    def end(self, request: Request) -> None:
        """A request is over: what its outputs were may help the next."""
        self.acceptance.forget(request.id)
        for seq in request.finished:
            self._text += 0.1 * (_written(seq) - self._text)
            for drafter in self.drafters:
                if isinstance(drafter, Remembers):
                    self._ask(drafter, request, drafter.remember, request, seq)
        for drafter in self.drafters if self._failed else ():
            self._failed.pop((request.id, drafter.name), None)

    def _pause_for(self, plain: int, asked: float) -> int:
        """Steps until drafters are asked again, which took as long as `asked` plain steps. Each time that nothing comes of it
        one more, until it takes no more than its share of the time; one by one, as any token may begin what pays."""
        return max(plain // 2, min(self._idle, int(asked / ASKING))) if self._idle else 0

    def _too_costly(self, choice: Choice, rows: int, tokens: int) -> bool:
        """Whether a tree was left out because it would cost more than it brings."""
        base = self.costs.step(rows)
        return choice.gamma == 0 and base is not None and value(choice, rows, self.costs, tokens) <= tokens / base

    def _rests(self, seq: Sequence) -> bool:
        """Whether nobody drafts for a sequence now, because it gave nothing to believe a moment ago."""
        rests = _standing(seq).rest >= self._step
        if rests:
            seq.decode.draft = None
        return rests

    def _left(self, request: Request, seq: Sequence) -> int:
        """How many tokens an output may still have."""
        left = self.max_model_len - len(seq.tokens)
        if request.params.max_tokens is not None:
            left = min(left, request.params.max_tokens - _written(seq))
        return left

    def _room(self, request: Request, seq: Sequence) -> int:
        """How deep a draft may be: the step adds a token of its own, so it ends one before the output must."""
        if len(seq.tokens) == seq.prompt_len and request.width > 1:
            return 0  # the prompt's sequence becomes several: none can follow a draft
        return min(MOST if self.gamma is None else self.gamma, self._left(request, seq) - 1, MAX_NODES)

    def _best(self, request: Request, seq: Sequence, rows: int, tokens: int) -> Proposal | None:
        """Of all drafters' proposals the one that is worth most."""
        self._settle_shadow(request, seq)
        seq.decode.draft = None
        if (most := self._room(request, seq)) <= 0:
            return None
        made = []
        for drafter in self.drafters:
            model = self._fills.get(drafter.name)
            lag = model.lag(seq) if model is not None and self.gamma is None else 0
            if lag > GAP and self.budgets.empty(drafter.name):
                continue
            draft = self._ask(drafter, request, self._drafted, drafter, request, seq, most)
            if draft is None:
                continue
            draft.drafter = draft.drafter or drafter.name
            alpha = self.acceptance.alpha(request.id, (draft.drafter, draft.confidence))
            deep, rows = _shape(draft, model is not None)
            choice = Choice(alpha, min(deep, most), model is not None, rows=rows, drafter=drafter.name)
            if lag > GAP:
                choice.ahead = self.costs.catching_up(lag)
                choice.rest = int(min(self._left(request, seq), max(self._text - _written(seq), LEFT)))
            elif lag > LAG:
                choice.behind = self.costs.catching_up(lag)
            made.append(Proposal(request, seq, draft, choice))
        if len(made) < 2:
            return made[0] if made else None
        return max(made, key=lambda proposal: value(proposal.choice, rows, self.costs, tokens))

    def _drafted(self, drafter: Drafter, request: Request, seq: Sequence, most: int) -> Draft | None:
        """What a drafter proposes, as far as it can be fed and a grammar lets it come."""
        draft = drafter.draft(request, seq, most)
        if draft is None:
            return None
        if known := drafter.name not in self._fills:  # of a model's draft only the room is
            check_draft(draft, self.vocab_size)
        draft = bounded(draft, most)
        if draft is not None and known and seq.decode.constraint is not None:
            draft = prune(draft, seq.decode.constraint.fitting(draft.tokens, draft.parents))
        return draft

    def _ask(self, drafter: Drafter, request: Request, hook: Callable[..., Any], *args: Any) -> Any:
        """What a drafter says. One that raises costs its request a draft; one that keeps raising is not asked for it again."""
        if self._off(drafter.name, request):
            return None
        try:
            return hook(*args)
        except Exception:
            self._note_failure(drafter.name, [request])
            return None

    def _off(self, name: str, request: Request) -> bool:
        """Whether a drafter has raised too often for a request."""
        return bool(self._failed) and self._failed.get((request.id, name), 0) >= FAILURES

    def _note_failure(self, name: str, requests: list[Request]) -> None:
        log.exception("drafter %s failed; this step of %s does without", name, ", ".join(request.id for request in requests))
        for request in requests:
            self._failed[request.id, name] = self._failed.get((request.id, name), 0) + 1

    def _decide(self, proposal: Proposal) -> None:
        draft, seq = proposal.draft, proposal.seq
        if self.gamma is not None:
            seq.decode.draft = draft
            return
        gamma, tree = proposal.choice.gamma, proposal.choice.rows > 0
        if gamma == 0 and not proposal.choice.model and not tree:
            _standing(seq).unverified = Unverified(len(seq.tokens), draft.tokens[0], (draft.drafter, draft.confidence))
        if gamma > 0 and not tree:
            del draft.tokens[gamma:], draft.parents[gamma:]
        if gamma > 0:
            seq.decode.draft = draft

    def _settle_shadow(self, request: Request, seq: Sequence) -> None:
        """Learn from a proposal that nobody paid for."""
        standing = _standing(seq)
        unverified, standing.unverified = standing.unverified, None
        if unverified is not None and len(seq.tokens) > unverified.length:
            right = seq.tokens[unverified.length] == unverified.token
            self.acceptance.observe(request.id, unverified.kind, int(right), 1)


def _standing(seq: Sequence) -> Standing:
    if OURS not in seq.decode.memory:
        seq.decode.memory[OURS] = Standing()
    standing: Standing = seq.decode.memory[OURS]
    return standing


def _written(seq: Sequence) -> int:
    """Tokens of the output so far."""
    return len(seq.tokens) - seq.prompt_len


def _shape(draft: Draft, model: bool) -> tuple[int, int]:
    """How deep a draft is, and how many nodes it has where it is a tree; 0: a chain."""
    if model or draft.parents == list(range(-1, len(draft.tokens) - 1)):
        return len(draft.tokens), 0
    return max(_depths(draft)), len(draft.tokens)


def _depths(draft: Draft) -> list[int]:
    """How many tokens each node and those above it are."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


def bounded(draft: Draft, most: int) -> Draft | None:
    """The nodes that lie no deeper than `most`, MAX_NODES at most. None: nothing is left."""
    if len(draft.tokens) <= min(most, MAX_NODES):
        return draft if draft.tokens else None
    return prune(draft, [node < MAX_NODES and depth <= most for node, depth in enumerate(_depths(draft))])


def prune(draft: Draft, fits: list[bool]) -> Draft | None:
    """The nodes that fit; where one does not, nothing below it does. None: nothing is left."""
    kept = [node for node, fit in enumerate(fits) if fit]
    if len(kept) == len(fits):
        return draft
    place = {node: at for at, node in enumerate(kept)} | {-1: -1}
    tokens, parents = [draft.tokens[node] for node in kept], [place[draft.parents[node]] for node in kept]
    q = None if draft.q is None else [draft.q[node] for node in kept]
    memo = [draft.memo[node] for node in kept] if draft.memo else []
    return Draft(tokens, parents, draft.required, q, draft.drafter, draft.confidence, draft.observed, memo) if kept else None
