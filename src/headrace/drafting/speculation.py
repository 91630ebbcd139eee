"""Speculation as the engine sees it: asks drafters for drafts and applies the drafting policy to them."""

import logging
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from statistics import mode
from typing import Any, TypeVar

from headrace.data.plan import MAX_NODES, Answers, Each, StepOutput, StepPlan
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.base import (
    Drafter,
    MarkFilled,
    ModelDrafter,
    Observes,
    Reads,
    Remembers,
    RunModel,
    TargetFeed,
    check_draft,
)
from headrace.drafting.draft_model import Chain, set_chain
from headrace.drafting.policy import Acceptance, Budgets, Candidate, Costs, choose_depths, draft_value, pause_steps
from headrace.drafting.tuning import TUNING, Tuning

log = logging.getLogger("headrace")

AnyTarget = TypeVar("AnyTarget", bound=TargetFeed)
STATE = ""  # key of `SequenceState` in a sequence's memory; no drafter has this name


@dataclass(slots=True)
class Proposal:
    """The best draft for a sequence, before the policy decides how much of it the target verifies."""

    request: Request
    seq: Sequence
    draft: Draft
    candidate: Candidate


@dataclass(slots=True)
class Unverified:
    """The first token of a draft that was not verified: the next token of the sequence shows whether it was right."""

    length: int  # tokens of the sequence at that time
    token: int
    kind: tuple[str, int]


@dataclass(slots=True)
class SequenceState:
    """What speculation remembers of a sequence; it ends with the sequence."""

    unverified: Unverified | None = None
    rests_until: int = 0  # the last step without a draft


class Speculation:
    """Gives drafts to the sequences that may carry one; owned by an engine.

    gamma: the depth of every draft; None: the policy decides, and may decide for no draft. clock: returns seconds, of which
    only differences count.
    """

    def __init__(
        self,
        drafters: Many[Drafter],
        max_model_len: int,
        gamma: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        tuning: Tuning = TUNING,
    ) -> None:
        self.drafters = tuple(drafters)
        self.max_model_len = max_model_len
        self.gamma = gamma
        self.tuning = tuning
        self.vocab_size = 2**31  # of the target; the engine sets it
        self._usual, self._mixed = Costs(tuning), MixedCosts(tuning)
        self.costs = self._usual  # for the rows of the step under way
        self.acceptance = Acceptance(tuning)
        self.budgets = Budgets(tuning)
        self._clock = clock
        self._output_tokens = tuning.output_tokens  # average over finished outputs
        self._step = 0
        self._pause = 0  # the last step without drafts
        self._idle = 0  # times in a row that no draft was worth its rows
        self._failures: dict[tuple[str, str], int] = {}  # exceptions by request and drafter
        # Looked up once: an isinstance check of a protocol takes as long as a draft.
        self._models = {drafter.name: drafter for drafter in drafters if isinstance(drafter, ModelDrafter)}
        self._readers = [drafter for drafter in drafters if isinstance(drafter, Reads)]

    def serves(self, request: Request) -> bool:
        """Whether a request's sequences may carry drafts: its strategy verifies them, no processor must see every token in
        order, and the full model writes all tokens."""
        return (
            bool(request.strategy.speculates)
            and not request.params.leaves
            and all(processor.scope != "stateful" for processor in request.processors)
        )

    def refusal(self, request: Request) -> str:
        """Why the request's verification rule does not work with these drafters; empty if it does."""
        trees = [drafter.name for drafter in self.drafters if getattr(drafter, "trees", False)]
        if not request.params.rejects or not trees:
            return ""
        rule = request.params.verification
        return f"verification {rule!r} takes chains, and {', '.join(trees)} drafts trees; use noise, or another drafter"

    def pauses(self) -> bool:
        """Begin a step; returns whether it goes without drafts, because no draft paid a moment ago."""
        self._step += 1
        self.budgets.settle(self.costs)
        return self._step <= self._pause

    def propose(self, seqs: Many[tuple[Request, Sequence]], plain: int, early: int = 0) -> None:
        """Give drafts to these sequences, all of which decode.

        plain: sequences that decode in the step, with or without drafts. early: those of them that may exit early.
        """
        began, proposals = self._clock(), []
        self.costs = self._mixed.costs if early else self._usual
        rows = self._mixed.expected_rows(plain, early) if early else plain
        for drafter in self._readers:
            drafter.begin()
        if (base := self.costs.step_seconds(rows)) is not None:
            self.budgets.open([drafter.name for drafter in self.drafters], base)
        crowd = self.gamma is None and plain >= self.tuning.crowd
        for request, seq in seqs:
            if self._rests(seq):
                continue
            proposal = self._best(request, seq, rows, plain)
            if proposal is not None:
                proposals.append(proposal)
            if crowd and (proposal is None or proposal.candidate.alpha < self.tuning.min_alpha):
                _state(seq).rests_until = self._step + self.tuning.rest_steps
        if self.gamma is not None:
            for proposal in proposals:
                proposal.seq.decode.draft = proposal.draft
            return
        candidates = [proposal.candidate for proposal in proposals]
        depths = choose_depths(candidates, rows, self.costs, self.budgets.by_drafter, plain)
        for proposal, depth in zip(proposals, depths, strict=True):
            self._apply(proposal, depth)
            if proposal.candidate.tree_rows and not depth and self._too_costly(proposal.candidate, rows, plain):
                _state(proposal.seq).rests_until = self._step + self.tuning.tree_rest_steps
        if base is not None:
            self._idle = 0 if any(depths) else self._idle + 1
            self._pause = self._step + pause_steps(self._idle, plain, (self._clock() - began) / base, self.tuning)

    def run_models(self, targets: list[AnyTarget], run: RunModel, mark_filled: MarkFilled) -> list[AnyTarget]:
        """Let drafters that run a model replace the tokens of these targets' drafts. Returns the targets whose drafter
        failed."""
        failed: list[AnyTarget] = []
        for name, drafter in self._models.items() if targets else ():
            own = [one for one in targets if one.seq.decode.draft is not None and one.seq.decode.draft.drafter == name]
            if not own:
                continue
            try:
                self._run_model(drafter, name, [*own], run, mark_filled)
            except Exception:
                self._record_failure(name, list({one.request.id: one.request for one in own}.values()))
                for one in own:
                    if one.seq.decode.draft is not None:
                        set_chain(one, Chain())
                failed += own
        return failed

    def _run_model(
        self, drafter: ModelDrafter, name: str, targets: list[TargetFeed], run: RunModel, mark_filled: MarkFilled
    ) -> None:
        behind = sum(drafter.lag(one.seq) for one in targets)
        began = self._clock()
        drafter.propose_tokens(targets, run, mark_filled)
        seconds = self._clock() - began
        drafts = [one.seq.decode.draft for one in targets if one.seq.decode.draft is not None]
        for draft in drafts:
            draft.drafter = name
        self._record_draft(name, len(targets), max([len(draft.tokens) for draft in drafts], default=1), behind, seconds)

    def _record_draft(self, name: str, sequences: int, depth: int, behind: int, seconds: float) -> None:
        """Learn from a draft model that read `behind` known tokens and ran `depth` steps for `sequences` sequences."""
        if behind <= self.tuning.free_lag * sequences:
            self.costs.record_draft(sequences, seconds / depth)
            usual = self.tuning.contention * depth * self.costs.draft_seconds(sequences)
            self.budgets.charge_draft(name, min(seconds, usual))
            return
        reading = max(seconds - depth * self.costs.draft_estimate(sequences), 0.0)
        self.costs.record_reading(behind, reading)
        whole_text = reading if behind > self.tuning.max_lag * sequences else 0.0
        self.budgets.charge_draft(name, seconds - whole_text)
        self.budgets.charge_reading(name, whole_text)

    def record_step(self, plan: StepPlan, output: StepOutput) -> None:
        """Learn from the time of a step. Steps with prompts show nothing about verification; of a pause only the last
        counts."""
        seconds = output.seconds
        self.costs = self._mixed.costs if output.exited else self._usual
        if self._step < self._pause or len(output.exited) == len(plan.feeds):
            self.budgets.record_pause(seconds)
            return
        if output.exited and all(feed.count == 1 for feed in plan.feeds):
            self.budgets.record_step(*self._mixed.record_step(plan, output), seconds, len(plan.feeds))
            return
        rows, plain = plan.num_tokens, len(plan.feeds)
        decodes_only = rows == plain or all(feed.count == 1 for feed in plan.feeds)
        if decodes_only:
            self.costs.record_step(rows, seconds)
        else:
            decoding = [feed for feed in plan.feeds if feed.count == 1]
            plain, rows = len(decoding), sum(1 + len(feed.nodes) for feed in decoding)
        if plain:
            self.budgets.record_step(plain, rows, seconds if decodes_only else None)

    def observe(self, request: Request, seq: Sequence, draft: Draft, path: tuple[int, ...], answers: Answers) -> None:
        """Learn from a verified draft, of which `path` was accepted. If the draft is `observed`, the last answer has the
        target's token after each node."""
        tip = path[-1] if path else -1
        tried = len(path) + int(tip in draft.parents)  # a child of the path's last node was rejected
        self.acceptance.observe(request.id, (draft.drafter, draft.confidence), len(path), tried)
        self.budgets.record_draft(draft.drafter, len(draft.tokens), len(path))
        for drafter in self.drafters if draft.observed else ():
            if drafter.name == draft.drafter and isinstance(drafter, Observes) and isinstance(answers[-1], Each):
                self._call(drafter, request, drafter.observe, request, seq, draft, path, answers[-1].answers)

    def end(self, request: Request) -> None:
        """Forget a finished request; drafters that learn from outputs receive its outputs."""
        self.acceptance.forget(request.id)
        for seq in request.finished:
            self._output_tokens += self.tuning.output_weight * (_written(seq) - self._output_tokens)
            for drafter in self.drafters:
                if isinstance(drafter, Remembers):
                    self._call(drafter, request, drafter.remember, request, seq)
        for drafter in self.drafters if self._failures else ():
            self._failures.pop((request.id, drafter.name), None)

    def _too_costly(self, tree: Candidate, rows: int, tokens: int) -> bool:
        """Whether a tree costs more than it brings."""
        base = self.costs.step_seconds(rows)
        return base is not None and draft_value(tree, rows, self.costs, tokens) <= tokens / base

    def _rests(self, seq: Sequence) -> bool:
        """Whether a sequence gets no draft now, because its last drafts did not pay."""
        rests = _state(seq).rests_until >= self._step
        if rests:
            seq.decode.draft = None
        return rests

    def _remaining(self, request: Request, seq: Sequence) -> int:
        """The most tokens an output may still have."""
        remaining = self.max_model_len - len(seq.tokens)
        if request.params.max_tokens is not None:
            remaining = min(remaining, request.params.max_tokens - _written(seq))
        return remaining

    def _max_depth(self, request: Request, seq: Sequence) -> int:
        """The deepest draft. The step adds a token of its own, so a draft ends one token before the output must."""
        if len(seq.tokens) == seq.prompt_len and request.width > 1:
            return 0  # the prompt's sequence forks after this step, and a fork cannot follow a draft
        limit = self.tuning.max_depth if self.gamma is None else self.gamma
        return min(limit, self._remaining(request, seq) - 1, MAX_NODES)

    def _best(self, request: Request, seq: Sequence, rows: int, tokens: int) -> Proposal | None:
        """The proposal with the largest value, of all drafters. Without drafts the step has `rows` rows and gives `tokens`
        tokens."""
        self._observe_unverified(request, seq)
        seq.decode.draft = None
        if (depth := self._max_depth(request, seq)) <= 0:
            return None
        proposals = []
        for drafter in self.drafters:
            model = self._models.get(drafter.name)
            lag = model.lag(seq) if model is not None and self.gamma is None else 0
            if lag > self.tuning.max_lag and self.budgets.empty(drafter.name):
                continue
            draft = self._call(drafter, request, self._draft, drafter, request, seq, depth)
            if draft is None:
                continue
            draft.drafter = draft.drafter or drafter.name
            proposals.append(Proposal(request, seq, draft, self._candidate(request, seq, draft, drafter.name, lag, depth)))
        if len(proposals) < 2:
            return proposals[0] if proposals else None
        return max(proposals, key=lambda proposal: draft_value(proposal.candidate, rows, self.costs, tokens))

    def _candidate(self, request: Request, seq: Sequence, draft: Draft, name: str, lag: int, most: int) -> Candidate:
        by_model = name in self._models
        depth, tree_rows = _shape(draft, by_model)
        read_seconds = lag_seconds = 0.0
        remaining = 256
        if lag > self.tuning.max_lag:
            read_seconds = self.costs.reading_seconds(lag)
            expected = max(self._output_tokens - _written(seq), self.tuning.min_remaining)
            remaining = int(min(self._remaining(request, seq), expected))
        elif lag > self.tuning.free_lag:
            lag_seconds = self.costs.reading_seconds(lag)
        alpha = self.acceptance.alpha(request.id, (draft.drafter, draft.confidence))
        return Candidate(alpha, min(depth, most), by_model, tree_rows, name, lag_seconds, read_seconds, remaining)

    def _draft(self, drafter: Drafter, request: Request, seq: Sequence, depth: int) -> Draft | None:
        """A drafter's draft, cut to what a step can feed and the sequence's grammar allows."""
        draft = drafter.draft(request, seq, depth)
        if draft is None:
            return None
        # The draft of a model is only room for tokens so far.
        if has_tokens := drafter.name not in self._models:
            check_draft(draft, self.vocab_size)
        draft = cut_depth(draft, depth)
        if draft is not None and has_tokens and seq.decode.constraint is not None:
            draft = prune(draft, seq.decode.constraint.fitting(draft.tokens, draft.parents))
        return draft

    def _call(self, drafter: Drafter, request: Request, hook: Callable[..., Any], *args: Any) -> Any:
        """The result of a drafter's method; None if it raises. A request does without a drafter that keeps raising."""
        if self._failures and self._failures.get((request.id, drafter.name), 0) >= self.tuning.max_failures:
            return None
        try:
            return hook(*args)
        except Exception:
            self._record_failure(drafter.name, [request])
            return None

    def _record_failure(self, name: str, requests: list[Request]) -> None:
        log.exception("drafter %s failed; this step of %s does without", name, ", ".join(request.id for request in requests))
        for request in requests:
            self._failures[request.id, name] = self._failures.get((request.id, name), 0) + 1

    def _apply(self, proposal: Proposal, depth: int) -> None:
        """Give a sequence its draft, cut to the chosen depth."""
        draft, seq, candidate = proposal.draft, proposal.seq, proposal.candidate
        tree = candidate.tree_rows > 0
        if depth == 0:
            if not candidate.by_model and not tree:
                kind = (draft.drafter, draft.confidence)
                _state(seq).unverified = Unverified(len(seq.tokens), draft.tokens[0], kind)
            return
        if not tree:
            del draft.tokens[depth:], draft.parents[depth:]
        seq.decode.draft = draft

    def _observe_unverified(self, request: Request, seq: Sequence) -> None:
        """Learn from a draft that was not verified: the sequence now has the token in its place."""
        state = _state(seq)
        unverified, state.unverified = state.unverified, None
        if unverified is not None and len(seq.tokens) > unverified.length:
            right = seq.tokens[unverified.length] == unverified.token
            self.acceptance.observe(request.id, unverified.kind, int(right), 1)


def _state(seq: Sequence) -> SequenceState:
    if STATE not in seq.decode.memory:
        seq.decode.memory[STATE] = SequenceState()
    state: SequenceState = seq.decode.memory[STATE]
    return state


def _written(seq: Sequence) -> int:
    """Tokens of the output so far."""
    return len(seq.tokens) - seq.prompt_len


def _shape(draft: Draft, by_model: bool) -> tuple[int, int]:
    """The depth of a draft, and its nodes if it is a tree (0: a chain)."""
    if by_model or draft.parents == list(range(-1, len(draft.tokens) - 1)):
        return len(draft.tokens), 0
    return max(_depths(draft)), len(draft.tokens)


def _depths(draft: Draft) -> list[int]:
    """The depth of each node; children of the last known token have depth 1."""
    depths: list[int] = []
    for parent in draft.parents:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return depths


def cut_depth(draft: Draft, depth: int) -> Draft | None:
    """The nodes no deeper than `depth`, at most MAX_NODES; None if none remains."""
    if len(draft.tokens) <= min(depth, MAX_NODES):
        return draft if draft.tokens else None
    return prune(draft, [node < MAX_NODES and at <= depth for node, at in enumerate(_depths(draft))])


def prune(draft: Draft, fits: list[bool]) -> Draft | None:
    """The nodes that fit; None if none remains. The caller marks all nodes below one that does not fit."""
    kept = [node for node, fit in enumerate(fits) if fit]
    if len(kept) == len(fits):
        return draft
    place = {node: at for at, node in enumerate(kept)} | {-1: -1}
    tokens, parents = [draft.tokens[node] for node in kept], [place[draft.parents[node]] for node in kept]
    q = None if draft.q is None else [draft.q[node] for node in kept]
    memo = [draft.memo[node] for node in kept] if draft.memo else []
    return Draft(tokens, parents, draft.required, q, draft.drafter, draft.confidence, draft.observed, memo) if kept else None


class MixedCosts:
    """Costs of steps in which some rows may exit early, next to requests that draft.

    Only the rows that run through the upper layers (of a cascade: through the target model) vary from step to step. So these
    steps have a table of their own, by upper rows. A draft token adds a row to it, as to any step.
    """

    def __init__(self, tuning: Tuning = TUNING) -> None:
        self.costs = Costs(tuning)
        self._tuning = tuning
        self._added: dict[int, deque[int]] = {}  # by number of such requests: upper rows in the last steps

    def expected_rows(self, sequences: int, early: int) -> int:
        """Upper rows to expect of a step without drafts over `sequences` rows, `early` of which may exit early.

        It takes the most frequent number, not the mean: a step with that many rows has been measured."""
        added = self._added.get(early)
        return sequences - early + (mode(added) if added else early)

    def record_step(self, plan: StepPlan, output: StepOutput) -> tuple[int, int]:
        """Add a measured step without prompts; returns its upper rows without drafts, and with them."""
        drafted = sum(len(feed.nodes) for feed in plan.feeds)
        rows = upper_rows(plan, output)
        early = len(output.exited)
        added = rows - drafted - (len(plan.feeds) - early)
        self._added.setdefault(early, deque(maxlen=self._tuning.upper_samples)).append(added)
        self.costs.record_step(rows, output.seconds)
        return rows - drafted, rows


def upper_rows(plan: StepPlan, output: StepOutput) -> int:
    """Rows of a step that ran through the upper layers, lagging rows included."""
    exited = {*output.unfilled, *output.propagated}
    return sum(feed.lag + feed.count + len(feed.nodes) for number, feed in enumerate(plan.feeds) if number not in exited)
