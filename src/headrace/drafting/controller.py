"""Whether to speculate, and how far: what pays is decided by what was measured.

A step over R rows takes T(R) seconds, a model's draft step c, and a chain of gamma tokens that are each accepted with
probability alpha yields E = (1 - alpha^(gamma + 1)) / (1 - alpha) tokens. Of all gammas, 0 included, the one is taken that
gives the batch most tokens per second; in units of a plain step that is the largest E / (gamma c + v(gamma + 1)). What a draft
model must read before it can draft counts too, spread over what is left of the text.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.drafting.budget import Budget
from headrace.drafting.costs import Costs

WORTH = 1.05  # a gain below this is not sought: it could be noise
LEAST = 0.25  # a token less likely than this is not worth a row anywhere
RARE = 0.05  # and one that is reached less often is not thought about
TRIAL = 16  # requests without a draft of a model's after which the next one tries it again: nothing else would tell
PAYBACK = 3.0  # a draft model catches up with a text where that is paid back this many times by the end of it
FEW = 4  # steps that bear what it takes to read a few tokens
# Drafted tokens: what a belief to begin with counts for; those remembered of one request, of all.
WEIGHT, MEMORY, LASTING = 4, 10, 25


def expected(alpha: float, gamma: int) -> float:
    """Tokens a step yields on average when `gamma` were drafted."""
    return gamma + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def best_gamma(alpha: float, c: float, most: int = 64) -> tuple[int, float]:
    """gamma* and its speed-up where a verification costs as much as a plain step (Leviathan et al. 2022, corollary 3.9)."""
    gains = [expected(alpha, gamma) / (gamma * c + 1.0) for gamma in range(most + 1)]
    best = max(gains)
    return gains.index(best), best


Kind = tuple[str, int]  # drafter, trust


@dataclass(slots=True)
class Belief:
    """A probability, and how many observations stand behind it."""

    value: float
    weight: float = WEIGHT

    def observe(self, outcome: float, memory: float) -> None:
        self.weight = min(self.weight + 1, memory)
        self.value += (outcome - self.value) / self.weight


@dataclass(slots=True)
class Acceptance:
    """How often a drafted token is accepted: running averages of one request, which begin where all requests are.

    A model that is left alone is not heard of again, so after TRIAL requests without it one begins as if nothing were known.
    """

    memory: float = MEMORY
    everyone: dict[Kind, Belief] = field(default_factory=dict)
    requests: dict[str, dict[Kind, Belief]] = field(default_factory=dict)
    _without: dict[Kind, int] = field(default_factory=dict)  # requests since one was heard of
    _trial: dict[Kind, str] = field(default_factory=dict)  # the request that tries it

    def alpha(self, request: str, kind: Kind) -> float:
        mine = self.requests.get(request)
        if mine is not None and kind in mine:
            return mine[kind].value
        usual, first = self.usual(kind), _prior(kind)
        if usual < first and self._without.get(kind, 0) >= TRIAL and self._trial.setdefault(kind, request) == request:
            return first
        return usual

    def usual(self, kind: Kind) -> float:
        """Of all requests."""
        return self.everyone[kind].value if kind in self.everyone else _prior(kind)

    def observe(self, request: str, kind: Kind, accepted: int, drafted: int) -> None:
        """`accepted` of a chain of `drafted` tokens; the first rejected one is the last that was tried."""
        mine = self.requests.setdefault(request, {})
        if kind not in mine:
            mine[kind] = Belief(self.alpha(request, kind))
        everyone = self.everyone.setdefault(kind, Belief(_prior(kind)))
        for trial in range(min(accepted + 1, drafted)):
            outcome = 1.0 if trial < accepted else 0.0
            mine[kind].observe(outcome, self.memory)
            everyone.observe(outcome, LASTING)
        self._without[kind] = 0
        self._trial.pop(kind, None)

    def forget(self, request: str) -> None:
        mine = self.requests.pop(request, {})
        for kind in self.everyone:
            self._without[kind] = 0 if kind in mine else self._without.get(kind, 0) + 1
            if self._trial.get(kind) == request:
                del self._trial[kind]


def _prior(kind: Kind) -> float:
    """Before anything is known: a longer match is believed more, and a model is tried."""
    return 0.75 if kind[1] == 0 else (0.3, 0.5, 0.6)[min(kind[1], 3) - 1]


@dataclass(slots=True)
class Choice:
    """One sequence's candidate: how sure, how long at most, and whether a model must run for each token of it.

    A tree of `rows` nodes (0: a chain, a row for each token) is `most` deep and verified as a whole, or not at all: what it
    would learn from lies anywhere in it. `behind`: seconds in which a model reads a few tokens that it missed, which the next
    few steps bear; `ahead`: seconds in which it reads a whole text first, and `rest`: how many tokens that may still have, in
    which those must be paid back.
    """

    alpha: float
    most: int
    model: bool = False
    gamma: int = 0
    rows: int = 0
    drafter: str = ""
    behind: float = 0.0
    ahead: float = 0.0
    rest: int = 256

    @property
    def surcharge(self) -> float:
        """Seconds of catching up that a step has to bring in."""
        return self.behind / FEW + self.ahead * PAYBACK / max(self.rest, 1)


def value(choice: Choice, plain: int, costs: Costs, tokens: int | None = None) -> float:
    """The most tokens per second with this one draft, next to other sequences. A step without drafts has `plain` rows and gives
    `tokens` tokens (None: one for each row)."""
    base, gives = costs.step(plain), plain if tokens is None else tokens
    if base is None:
        return choice.alpha
    c = costs.draft_guess(1) if choice.model else 0.0
    if choice.rows:
        return (gives - 1 + expected(choice.alpha, choice.most)) / (costs.step(plain + choice.rows) or base)
    best, total, added, surcharge = 0.0, float(gives), choice.alpha, choice.surcharge
    for gamma in range(1, choice.most + 1):
        total += added
        best = max(best, total / ((costs.step(plain + gamma) or base) + gamma * c + surcharge))
        added *= choice.alpha
        if added < RARE:
            break
    return best


@dataclass(slots=True)
class _Step:
    """A step as drafts are added to it. What it costs beside a plain one, its drafters must be able to lose."""

    costs: Costs
    budgets: Mapping[str, Budget]
    base: float
    tokens: float
    rows: int
    deepest: int = 0  # steps of models that draft, and for how many sequences
    models: int = 0
    surcharge: float = 0.0
    lost: dict[str, float] = field(default_factory=dict)
    ahead: dict[str, float] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / (self._seconds(self.rows, self.deepest, self.models) + self.surcharge)

    def _seconds(self, rows: int, deepest: int, models: int) -> float:
        return (self.costs.step(rows) or self.base) + (deepest * self.costs.draft_guess(models) if deepest else 0.0)

    def add(self, one: Choice, depth: int) -> bool:
        """The token at this depth of a draft, 1 the first; False: its drafter cannot afford that."""
        first = depth == 1
        deepest, models = (max(self.deepest, depth), self.models + first) if one.model else (self.deepest, self.models)
        more = self._seconds(self.rows + 1, deepest, models) - self._seconds(self.rows, self.deepest, self.models)
        lost = self.lost.get(one.drafter, 0.0) + more + first * one.behind
        ahead = self.ahead.get(one.drafter, 0.0) + first * one.ahead
        if not self._affords(one, lost, ahead):
            return False
        self.lost[one.drafter], self.ahead[one.drafter] = lost, ahead
        self.tokens, self.rows = self.tokens + one.alpha**depth, self.rows + 1
        self.deepest, self.models, self.surcharge = deepest, models, self.surcharge + first * one.surcharge
        return True

    def _affords(self, one: Choice, lost: float, ahead: float) -> bool:
        budget = self.budgets.get(one.drafter)
        if budget is None:
            return True
        alone = ahead == one.ahead and budget.ahead > 0  # the first catch-up of a step may overdraw
        return lost <= budget.steps and (ahead == 0 or alone or ahead <= budget.ahead)


def choose(
    choices: list[Choice],
    plain: int,
    costs: Costs,
    budgets: Mapping[str, Budget] | None = None,
    tokens: int | None = None,
) -> None:
    """Set each choice's gamma so that a step yields most tokens per second. Without drafts it has `plain` rows and gives
    `tokens` tokens (None: one for each row, which is a sequence that decodes).

    Tokens are added one by one, the likeliest first, as long as the whole batch gains: what each adds is alpha^k. `budgets` say
    what each drafter may lose by the step, by name; without one there is no limit.
    """
    base, gives = costs.step(plain), plain if tokens is None else tokens
    trees = [one for one in choices if one.rows]
    choices = [one for one in choices if one.alpha >= LEAST and not one.rows]
    if base is None or not (choices or trees) or costs.stale(plain):
        return  # a plain step, to be measured
    budgets = budgets or {}
    _choose_trees(trees, plain, gives, base, costs, budgets)
    reachable = max(costs.reach, plain + 2)
    step, best, kept = _Step(costs, budgets, base, gives, plain), gives / base, [0] * len(choices)
    reach, most = [0] * len(choices), [one.most for one in choices]
    start = best
    while step.rows < reachable:
        gains = [(one.alpha ** (reach[i] + 1), -one.ahead, -i) for i, one in enumerate(choices) if reach[i] < most[i]]
        if not gains or max(gains)[0] < RARE:
            break
        at = -max(gains)[2]
        if not step.add(choices[at], reach[at] + 1):
            most[at] = reach[at]
            continue
        reach[at] += 1
        if step.rate > best and step.rate > WORTH * start:
            best, kept = step.rate, list(reach)
    if any(one.ahead and gamma for one, gamma in zip(choices, kept, strict=True)) and not costs.recent(plain):
        return  # a plain step first: what is decided now is dear
    for one, gamma in zip(choices, kept, strict=True):
        one.gamma = gamma


def _choose_trees(
    trees: list[Choice], plain: int, gives: int, base: float, costs: Costs, budgets: Mapping[str, Budget]
) -> None:
    """Take those trees, the best first, with which the batch still gains. One far larger than any step that was measured is
    tried, alone: what so many rows cost cannot be guessed."""
    tokens, rows, best = float(gives), plain, gives / base
    for one in sorted(trees, key=lambda one: -one.alpha):
        more, budget = expected(one.alpha, one.most) - 1.0, budgets.get(one.drafter)
        seconds = costs.step(rows + one.rows) or base
        unknown = rows == plain and rows + one.rows > 1.5 * costs.reach
        if budget is not None and budget.steps < (0.0 if unknown else seconds - base):
            continue
        if unknown or ((tokens + more) / seconds > best and (tokens + more) / seconds > WORTH * gives / base):
            one.gamma, tokens, rows, best = one.most, tokens + more, rows + one.rows, (tokens + more) / seconds
        if unknown:
            return
