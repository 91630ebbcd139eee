"""Drafting policy: for which sequences to draft, and how many tokens. Decisions follow from measured times and acceptance.

A step over R rows takes T(R) seconds, one step of a draft model c seconds. A chain of gamma tokens, each accepted with
probability alpha, yields E = (1 - alpha^(gamma + 1)) / (1 - alpha) tokens (Leviathan et al., "Fast Inference from Transformers
via Speculative Decoding", arXiv 2211.17192). Of all gammas, 0 included, the policy takes the one that gives the batch most
tokens per second: the largest E / (gamma c + T(rows with drafts)). Reading a text into a draft model counts too, spread over
the tokens that the output may still have.

Nothing here reads a clock, runs a model or knows an engine. The state is `Costs`, `Acceptance` and `Budgets`, which change by
recorded numbers alone; `draft_value`, `choose_depths` and `pause_steps` decide from the state and change nothing. All constants
are fields of `tuning.Tuning`.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.drafting.tuning import TUNING, Tuning

Kind = tuple[str, int]  # a drafter's name and the confidence of its draft


# -- times -------------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Costs:
    """Seconds of a target step by rows, of a draft step by sequences, and of a token that a draft model reads.

    Of the last `samples` measurements the least counts: a step can wait for another process, but cannot be faster than it is.
    """

    tuning: Tuning = TUNING
    steps: dict[int, float] = field(default_factory=dict)
    drafts: dict[int, float] = field(default_factory=dict)
    _samples: dict[tuple[str, int], deque[float]] = field(default_factory=dict)
    _measured: dict[int, int] = field(default_factory=dict)  # by rows: number of the step that was measured last
    _count: dict[int, int] = field(default_factory=dict)  # by rows: measurements
    _estimates: dict[int, float | None] = field(default_factory=dict)  # by rows; cleared by each measurement
    _read_token: float | None = None
    _now: int = 0

    def record_step(self, rows: int, seconds: float) -> None:
        """Add a measured step. Old measurements are dropped, so that what was slow by accident is tried again."""
        self._now += 1
        self._estimates.clear()
        self.steps[rows] = self._least("step", rows, seconds)
        self._measured[rows] = self._now
        self._count[rows] = self._count.get(rows, 0) + 1
        if self._now % self.tuning.remeasure_steps == 0:
            for old in [rows for rows, when in self._measured.items() if self._now - when > self.tuning.forget_steps]:
                del self._measured[old], self._count[old], self.steps[old], self._samples["step", old]

    def record_draft(self, sequences: int, seconds: float) -> None:
        """Add a measured draft step."""
        self.drafts[sequences] = self._least("draft", sequences, seconds)

    def record_reading(self, tokens: int, seconds: float) -> None:
        """Add the time in which a draft model read `tokens` known tokens."""
        self._read_token = self._least("token", 0, seconds / tokens)

    def stale(self, rows: int) -> bool:
        """Whether a step over `rows` should be measured (again) before drafts are compared with it."""
        count = self._count.get(rows, 0)
        if count < self.tuning.plain_samples:
            return True
        return self._now - self._measured[rows] >= min(self.tuning.remeasure_steps, 2 ** (count + 1))

    def recent(self, rows: int) -> bool:
        """Whether a step over `rows` was one of the last few measured."""
        recent = self.tuning.recent_steps
        return self._now - self._measured.get(rows, -recent) < recent

    def step_seconds(self, rows: int) -> float | None:
        """Seconds of a step over `rows`; None before the first measurement."""
        if rows not in self._estimates:
            self._estimates[rows] = _interpolate(self.steps, rows, self.tuning.row_guess)
        return self._estimates[rows]

    @property
    def max_rows(self) -> int:
        """Rows that a step may have: a few more than the largest one measured, as estimates far beyond are uncertain."""
        return max(self.steps, default=1) + 2

    def draft_seconds(self, sequences: int) -> float:
        """Seconds of one draft step; 0 before the first measurement."""
        return _interpolate(self.drafts, sequences, self.tuning.row_guess) or 0.0

    def draft_estimate(self, sequences: int) -> float:
        """Seconds of one draft step; a share of the target's step before the first measurement."""
        return self.draft_seconds(sequences) or self.tuning.draft_guess * (self.step_seconds(sequences) or 0.0)

    def reading_seconds(self, tokens: int) -> float:
        """Seconds in which a draft model reads `tokens` known tokens, beyond the step that it drafts with."""
        each = self.tuning.read_guess * (self.step_seconds(1) or 0.0) if self._read_token is None else self._read_token
        return tokens * each

    def _least(self, what: str, at: int, seconds: float) -> float:
        samples = self._samples.setdefault((what, at), deque(maxlen=self.tuning.samples))
        samples.append(seconds)
        return min(samples)


def _interpolate(table: dict[int, float], at: int, guess: float) -> float | None:
    """The value of a table at `at`, linear between (or beyond) its entries and never falling. `guess`: the slope by rows, as a
    share of the value, if there is only one entry."""
    if not table:
        return None
    known = sorted(table)
    place = bisect_left(known, at)
    if place < len(known) and known[place] == at:
        return table[at]
    if place == 0:
        return table[known[0]] * min(1.0, (1 + guess * (at - 1)) / (1 + guess * (known[0] - 1)))
    low = known[place - 1]
    if place == len(known):
        slope = max((table[low] - table[known[0]]) / (low - known[0]) if low > known[0] else guess * table[low] / low, 0.0)
        return table[low] + slope * (at - low)
    high = known[place]
    return table[low] + max(table[high] - table[low], 0.0) * (at - low) / (high - low)


# -- acceptance --------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Average:
    """A running average of outcomes in [0, 1], and how many outcomes it counts for."""

    value: float
    weight: float

    def add(self, outcome: float, memory: float) -> None:
        """Add an outcome; the average counts for at most `memory` outcomes."""
        self.weight = min(self.weight + 1, memory)
        self.value += (outcome - self.value) / self.weight


@dataclass(slots=True)
class Acceptance:
    """Probability that a drafted token is accepted (alpha), per request and kind of draft; new requests begin with that of all.

    A kind that the policy leaves out is not observed again. So after `retry_requests` requests without it one request begins
    with the prior.
    """

    tuning: Tuning = TUNING
    shared: dict[Kind, Average] = field(default_factory=dict)
    requests: dict[str, dict[Kind, Average]] = field(default_factory=dict)
    _without: dict[Kind, int] = field(default_factory=dict)  # requests that ended without a draft of the kind, in a row
    _trial: dict[Kind, str] = field(default_factory=dict)  # the request that tries the kind again

    def alpha(self, request: str, kind: Kind) -> float:
        """The acceptance probability to expect for a request."""
        own = self.requests.get(request)
        if own is not None and kind in own:
            return own[kind].value
        usual, prior = self.usual(kind), self._prior(kind)
        if (
            usual < prior
            and self._without.get(kind, 0) >= self.tuning.retry_requests
            and self._trial.setdefault(kind, request) == request
        ):
            return prior
        return usual

    def usual(self, kind: Kind) -> float:
        """The average over all requests."""
        return self.shared[kind].value if kind in self.shared else self._prior(kind)

    def observe(self, request: str, kind: Kind, accepted: int, drafted: int) -> None:
        """Record that `accepted` of a chain's `drafted` tokens were accepted; tokens behind the first rejected one count for
        nothing."""
        own = self.requests.setdefault(request, {})
        if kind not in own:
            own[kind] = Average(self.alpha(request, kind), self.tuning.prior_weight)
        shared = self.shared.setdefault(kind, Average(self._prior(kind), self.tuning.prior_weight))
        for trial in range(min(accepted + 1, drafted)):
            outcome = 1.0 if trial < accepted else 0.0
            own[kind].add(outcome, self.tuning.request_memory)
            shared.add(outcome, self.tuning.shared_memory)
        self._without[kind] = 0
        self._trial.pop(kind, None)

    def forget(self, request: str) -> None:
        """Drop what a finished request observed."""
        own = self.requests.pop(request, {})
        for kind in self.shared:
            self._without[kind] = 0 if kind in own else self._without.get(kind, 0) + 1
            if self._trial.get(kind) == request:
                del self._trial[kind]

    def _prior(self, kind: Kind) -> float:
        priors, confidence = self.tuning.match_priors, kind[1]
        return self.tuning.model_prior if confidence == 0 else priors[min(confidence, len(priors)) - 1]


# -- budgets -----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Budget:
    """Seconds that one drafter may lose: `drafting` by drafting and verifying, `reading` by these and by reading known tokens,
    which is paid before anything has come of it. One reading may overdraw a budget that is not empty."""

    drafting: float
    reading: float

    def refill(self, seconds: float, most: float) -> None:
        """Add time that may be lost, up to `most`, so that nothing is saved up to be lost at once."""
        self.drafting = max(self.drafting, min(self.drafting + seconds, most))
        self.reading = max(self.reading, min(self.reading + seconds, most))

    def add(self, seconds: float, base: float, tuning: Tuning) -> None:
        """Add saved time (below 0: lost time). `base`: seconds of a plain step."""
        self.drafting = min(self.drafting + seconds, tuning.max_draft_steps * base)
        self.reading = min(self.reading + seconds, tuning.max_read_steps * base)


@dataclass(slots=True)
class StepUse:
    """One drafter's part of one step."""

    seconds: float = 0.0  # of drafting
    rows: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Budgets:
    """The budget of each drafter, by name. Estimates decide whether a draft is worth its rows; budgets bound the loss where
    estimates are wrong. A drafter without budget stops until plain steps have refilled it."""

    tuning: Tuning = TUNING
    by_drafter: dict[str, Budget] = field(default_factory=dict)
    _step: dict[str, StepUse] = field(default_factory=dict)
    _recorded: tuple[int, int, float | None, int] | None = None
    _paused: float = 0.0

    def open(self, names: list[str], base: float) -> None:
        """Give a budget to each drafter that has none. `base`: seconds of a plain step."""
        start = self.tuning.start_steps * base
        for name in names:
            self.by_drafter.setdefault(name, Budget(start, start))

    def empty(self, name: str) -> bool:
        """Whether a drafter may not read known tokens now."""
        return name in self.by_drafter and self.by_drafter[name].reading <= 0

    def charge_draft(self, name: str, seconds: float) -> None:
        """Charge the time of drafting to the step under way."""
        self._step.setdefault(name, StepUse()).seconds += seconds

    def charge_reading(self, name: str, seconds: float) -> None:
        """Charge the reading of known tokens at once."""
        if name in self.by_drafter:
            self.by_drafter[name].reading -= seconds

    def record_draft(self, name: str, rows: int, accepted: int) -> None:
        """Record the verification of one draft in the step under way."""
        use = self._step.setdefault(name, StepUse())
        use.rows += rows
        use.accepted += accepted

    def record_pause(self, seconds: float) -> None:
        """Record a step in which no drafter was asked; its share of time comes with the next recorded step."""
        self._paused += seconds

    def record_step(self, plain: int, rows: int, seconds: float | None, tokens: int | None = None) -> None:
        """Record a step: its rows without drafts, its rows, its seconds (None: prompts took part), and the tokens it would have
        given without drafts (None: one a row)."""
        self._recorded = (plain, rows, seconds, plain if tokens is None else tokens)

    def settle(self, costs: Costs) -> None:
        """Close the recorded step: add what its drafts saved, compared with a plain step, to their drafters' budgets."""
        if self._recorded is None:
            return
        plain, rows, measured, tokens = self._recorded
        if (base := costs.step_seconds(plain)) is not None:
            usual = max(costs.step_seconds(rows) or base, base)
            seconds = usual if measured is None else min(measured, self.tuning.contention * usual)
            verified = sum(use.rows for use in self._step.values())
            for name, budget in self.by_drafter.items():
                if measured is not None:
                    budget.refill(self.tuning.loss_share * (seconds + self._paused), self.tuning.start_steps * base)
                if (use := self._step.get(name)) is not None:
                    extra = (seconds - base) * use.rows / verified if verified else 0.0
                    budget.add(base * use.accepted / tokens - extra - use.seconds, base, self.tuning)
        self._step.clear()
        self._recorded, self._paused = None, 0.0


# -- decisions ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence's draft before its depth is chosen.

    alpha: probability that a token is accepted. max_depth: tokens of the longest chain. by_model: each token takes a step of a
    draft model. tree_rows: nodes of a tree, which is verified whole or not at all (0: a chain). lag_seconds: to read a few
    known tokens, spread over the next steps. read_seconds: to read a whole text first, to be paid back within `remaining`
    tokens.
    """

    alpha: float
    max_depth: int
    by_model: bool = False
    tree_rows: int = 0
    drafter: str = ""
    lag_seconds: float = 0.0
    read_seconds: float = 0.0
    remaining: int = 256

    def surcharge(self, tuning: Tuning = TUNING) -> float:
        """Seconds of reading that one step has to bring in."""
        return self.lag_seconds / tuning.lag_steps + self.read_seconds * tuning.payback / max(self.remaining, 1)


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens that a step yields on average with `gamma` drafted tokens, the target's own included."""
    return gamma + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def draft_value(candidate: Candidate, plain: int, costs: Costs, tokens: int | None = None) -> float:
    """The most tokens per second with this one draft. A step without drafts has `plain` rows and gives `tokens` tokens (None:
    one a row)."""
    base, gives = costs.step_seconds(plain), plain if tokens is None else tokens
    if base is None:
        return candidate.alpha
    if candidate.tree_rows:
        seconds = costs.step_seconds(plain + candidate.tree_rows) or base
        return (gives - 1 + expected_tokens(candidate.alpha, candidate.max_depth)) / seconds
    draft_step = costs.draft_estimate(1) if candidate.by_model else 0.0
    best, total, reach, surcharge = 0.0, float(gives), candidate.alpha, candidate.surcharge(costs.tuning)
    for gamma in range(1, candidate.max_depth + 1):
        total += reach
        best = max(best, total / ((costs.step_seconds(plain + gamma) or base) + gamma * draft_step + surcharge))
        reach *= candidate.alpha
        if reach < costs.tuning.min_reach:
            break
    return best


def choose_depths(
    candidates: list[Candidate],
    plain: int,
    costs: Costs,
    budgets: Mapping[str, Budget] | None = None,
    tokens: int | None = None,
) -> list[int]:
    """The depth of each draft (0: none) with which a step yields most tokens per second.

    A step without drafts has `plain` rows and gives `tokens` tokens (None: one a row). `budgets`, by drafter, bound what each
    may lose by the step; a drafter without one has no bound.
    """
    base, gives = costs.step_seconds(plain), plain if tokens is None else tokens
    depths = [0] * len(candidates)
    trees = [at for at, one in enumerate(candidates) if one.tree_rows]
    chains = [at for at, one in enumerate(candidates) if one.alpha >= costs.tuning.min_alpha and not one.tree_rows]
    if base is None or not (chains or trees) or costs.stale(plain):
        return depths  # a plain step, to be measured
    step = _Step(costs, budgets or {}, base, gives, plain)
    for at in _choose_trees([(at, candidates[at]) for at in trees], step):
        depths[at] = candidates[at].max_depth
    for at, depth in zip(chains, _grow_chains([candidates[at] for at in chains], step), strict=True):
        depths[at] = depth
    return depths


def pause_steps(idle: int, plain: int, asked: float, tuning: Tuning = TUNING) -> int:
    """Steps until drafters are asked again, after they were asked `idle` times in a row for nothing, the last time in as long
    as `asked` plain steps. The pause grows by one step each time, up to `ask_share`, as any token may begin a text that
    pays."""
    return max(plain // 2, min(idle, int(asked / tuning.ask_share))) if idle else 0


@dataclass(slots=True)
class _Step:
    """A step while drafted tokens are added to it, and what it costs each drafter compared with a plain step."""

    costs: Costs
    budgets: Mapping[str, Budget]
    base: float
    gives: int
    plain: int
    tokens: float = field(init=False)
    rows: int = field(init=False)
    draft_steps: int = 0  # of draft models, for `drafting` sequences
    drafting: int = 0
    surcharge: float = 0.0
    lost: dict[str, float] = field(default_factory=dict)
    read: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens, self.rows = float(self.gives), self.plain

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / (self._seconds(self.rows, self.draft_steps, self.drafting) + self.surcharge)

    def _seconds(self, rows: int, draft_steps: int, drafting: int) -> float:
        return (self.costs.step_seconds(rows) or self.base) + (
            draft_steps * self.costs.draft_estimate(drafting) if draft_steps else 0.0
        )

    def add(self, one: Candidate, depth: int) -> bool:
        """Add the token at a depth of a draft, from 1; False if its drafter cannot afford it."""
        first = depth == 1
        draft_steps, drafting = self.draft_steps, self.drafting
        if one.by_model:
            draft_steps, drafting = max(draft_steps, depth), drafting + first
        more = self._seconds(self.rows + 1, draft_steps, drafting) - self._seconds(self.rows, self.draft_steps, self.drafting)
        lost = self.lost.get(one.drafter, 0.0) + more + first * one.lag_seconds
        read = self.read.get(one.drafter, 0.0) + first * one.read_seconds
        if not self._affords(one, lost, read):
            return False
        self.lost[one.drafter], self.read[one.drafter] = lost, read
        self.tokens, self.rows = self.tokens + one.alpha**depth, self.rows + 1
        self.draft_steps, self.drafting = draft_steps, drafting
        self.surcharge += first * one.surcharge(self.costs.tuning)
        return True

    def _affords(self, one: Candidate, lost: float, read: float) -> bool:
        budget = self.budgets.get(one.drafter)
        if budget is None:
            return True
        # The first reading of a step may overdraw the budget.
        overdraws = read == one.read_seconds and budget.reading > 0
        return lost <= budget.drafting and (read == 0 or overdraws or read <= budget.reading)


def _grow_chains(chains: list[Candidate], step: _Step) -> list[int]:
    """The depth of each chain. Tokens are added one by one, the likeliest first, as long as the whole batch gains."""
    tuning, costs = step.costs.tuning, step.costs
    start = best = step.gives / step.base
    kept, reach, most = [0] * len(chains), [0] * len(chains), [one.max_depth for one in chains]
    max_rows = max(costs.max_rows, step.plain + 2)
    while step.rows < max_rows:
        gains = [(one.alpha ** (reach[i] + 1), -one.read_seconds, -i) for i, one in enumerate(chains) if reach[i] < most[i]]
        if not gains or max(gains)[0] < tuning.min_reach:
            break
        at = -max(gains)[2]
        if not step.add(chains[at], reach[at] + 1):
            most[at] = reach[at]
            continue
        reach[at] += 1
        if step.rate > best and step.rate > tuning.min_gain * start:
            best, kept = step.rate, list(reach)
    if any(one.read_seconds and depth for one, depth in zip(chains, kept, strict=True)) and not costs.recent(step.plain):
        return [0] * len(chains)  # a plain step first: reading a text is a dear decision
    return kept


def _choose_trees(trees: list[tuple[int, Candidate]], step: _Step) -> list[int]:
    """The numbers of the trees with which the batch still gains, the likeliest first. A tree far larger than any measured step
    is tried alone, as its cost cannot be estimated."""
    costs, base, tuning = step.costs, step.base, step.costs.tuning
    start = best = step.gives / base
    tokens, rows, chosen = float(step.gives), step.plain, list[int]()
    for number, one in sorted(trees, key=lambda tree: -tree[1].alpha):
        more, budget = expected_tokens(one.alpha, one.max_depth) - 1.0, step.budgets.get(one.drafter)
        seconds = costs.step_seconds(rows + one.tree_rows) or base
        unknown = rows == step.plain and rows + one.tree_rows > tuning.unknown_rows * costs.max_rows
        if budget is not None and budget.drafting < (0.0 if unknown else seconds - base):
            continue
        rate = (tokens + more) / seconds
        if unknown or (rate > best and rate > tuning.min_gain * start):
            chosen.append(number)
            tokens, rows, best = tokens + more, rows + one.tree_rows, rate
        if unknown:
            break
    return chosen
