"""Whether to speculate, and how far: what pays is decided by what was measured (card F2).

A step over R rows takes T(R) seconds, a model's draft step c, and a chain of gamma tokens that are each accepted with
probability alpha yields E = (1 - alpha^(gamma + 1)) / (1 - alpha) tokens. Of all gammas, 0 included, the one is taken that
gives the batch most tokens per second; in units of a plain step that is the largest E / (gamma c + v(gamma + 1)).
"""

from bisect import bisect_left
from dataclasses import dataclass, field

WORTH = 1.03  # a gain below this is not sought: it could be noise
LEAST = 0.25  # a token less likely than this is not worth a row anywhere
FRESH, FORGET = 64, 512  # steps after which a plain step is measured again, and any other forgotten
TRIAL = 16  # requests without a draft of a model's after which the next one tries it again: nothing else would tell
GUESS = 0.2  # what one more row is thought to cost, in plain steps, until it has been measured


def expected(alpha: float, gamma: int) -> float:
    """Tokens a step yields on average when `gamma` were drafted."""
    return gamma + 1.0 if alpha >= 1.0 else (1.0 - alpha ** (gamma + 1)) / (1.0 - alpha)


def best_gamma(alpha: float, c: float, most: int = 64) -> tuple[int, float]:
    """gamma* and its speed-up where a verification costs as much as a plain step (Leviathan et al. 2022, corollary 3.9)."""
    gains = [expected(alpha, gamma) / (gamma * c + 1.0) for gamma in range(most + 1)]
    best = max(gains)
    return gains.index(best), best


@dataclass(slots=True)
class Costs:
    """Seconds of a step by its rows, and of a draft step by its sequences: running averages of what was measured here."""

    keep: float = 0.8
    steps: dict[int, float] = field(default_factory=dict)
    drafts: dict[int, float] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)  # rows -> when that was measured last
    _known: dict[int, float | None] = field(default_factory=dict)  # answers since the last measurement
    _now: int = 0

    def step_took(self, rows: int, seconds: float) -> None:
        """What is long past may have been an accident, so it is forgotten and tried again."""
        self._now += 1
        self._known.clear()
        _average(self.steps, rows, seconds, self.keep)
        self._seen[rows] = self._now
        if self._now % FRESH == 0:
            for old in [rows for rows, when in self._seen.items() if self._now - when > FORGET]:
                del self._seen[old], self.steps[old]

    def stale(self, rows: int) -> bool:
        """Whether a step over `rows` should be measured again."""
        return self._now - self._seen.get(rows, -FRESH) >= FRESH

    def draft_took(self, sequences: int, seconds: float) -> None:
        _average(self.drafts, sequences, seconds, self.keep)

    def step(self, rows: int) -> float | None:
        """Seconds of a step over `rows`; None before anything was measured."""
        if rows not in self._known:
            self._known[rows] = _between(self.steps, rows, GUESS)
        return self._known[rows]

    @property
    def reach(self) -> int:
        """As many rows as may be tried: a few more than were, since a guess far beyond could be far off."""
        return max(self.steps, default=1) + 2

    def draft(self, sequences: int) -> float:
        """Seconds of one draft step of so many sequences; 0 before one was measured."""
        return _between(self.drafts, sequences, GUESS) or 0.0


def _average(table: dict[int, float], at: int, seconds: float, keep: float) -> None:
    old = table.get(at)
    # A step that waited for another process says nothing of what steps cost.
    table[at] = seconds if old is None else keep * old + (1 - keep) * min(seconds, 2 * old)


def _between(table: dict[int, float], at: int, guess: float) -> float | None:
    """A value between (or beyond) those that were measured; more never costs less."""
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


Kind = tuple[str, int]  # drafter, trust


@dataclass(slots=True)
class Acceptance:
    """How often a drafted token is accepted: running averages of one request, which begin where all requests are.

    A model that is left alone is not heard of again, so every TRIAL requests one of them begins as if nothing were known.
    """

    keep: float = 0.9
    everyone: dict[Kind, float] = field(default_factory=dict)
    requests: dict[str, dict[Kind, float]] = field(default_factory=dict)
    _without: dict[Kind, int] = field(default_factory=dict)  # requests since one was heard of

    def alpha(self, request: str, kind: Kind) -> float:
        mine = self.requests.get(request)
        if mine is not None and kind in mine:
            return mine[kind]
        return _prior(kind) if self._without.get(kind, 0) >= TRIAL else self.everyone.get(kind, _prior(kind))

    def heard(self, request: str, kind: Kind, accepted: int, drafted: int) -> None:
        """`accepted` of a chain of `drafted` tokens; the first rejected one is the last that was tried."""
        mine = self.requests.setdefault(request, {})
        value, average = self.alpha(request, kind), self.everyone.get(kind, _prior(kind))
        for trial in range(min(accepted + 1, drafted)):
            outcome = 1.0 if trial < accepted else 0.0
            value = self.keep * value + (1 - self.keep) * outcome
            average = 0.96 * average + 0.04 * outcome
        mine[kind], self.everyone[kind] = value, average
        self._without[kind] = 0

    def forget(self, request: str) -> None:
        mine = self.requests.pop(request, {})
        for kind in self.everyone:
            self._without[kind] = 0 if kind in mine else self._without.get(kind, 0) + 1


def _prior(kind: Kind) -> float:
    """Before anything is known: a longer match is believed more, and a model is tried."""
    return 0.75 if kind[1] == 0 else (0.3, 0.5, 0.6)[min(kind[1], 3) - 1]


@dataclass(slots=True)
class Choice:
    """One sequence's candidate: how sure, how long at most, and whether a model must run for each token of it.

    A tree of `rows` nodes (0: a chain, a row for each token) is `most` deep and verified as a whole, or not at all: what it
    would learn from lies anywhere in it.
    """

    alpha: float
    most: int
    model: bool = False
    gamma: int = 0
    rows: int = 0


def value(choice: Choice, plain: int, costs: Costs) -> float:
    """The most tokens per second that this one draft could bring, beside `plain` - 1 other sequences."""
    base = costs.step(plain)
    if base is None:
        return choice.alpha
    c = costs.draft(1) if choice.model else 0.0
    if choice.rows:
        return (plain - 1 + expected(choice.alpha, choice.most)) / (costs.step(plain + choice.rows) or base)
    return max(
        (plain - 1 + expected(choice.alpha, gamma)) / ((costs.step(plain + gamma) or base) + gamma * c)
        for gamma in range(1, choice.most + 1)
    )


def choose(choices: list[Choice], plain: int, costs: Costs) -> None:
    """Set each choice's gamma so that a step of `plain` rows (one for each sequence that decodes) yields most per second.

    Tokens are added one by one, the likeliest first, as long as the whole batch gains: what each adds is alpha^k.
    """
    base = costs.step(plain)
    trees = [one for one in choices if one.rows]
    choices = [one for one in choices if one.alpha >= LEAST and not one.rows]
    if base is None or not (choices or trees) or costs.stale(plain):
        return  # a plain step, to be measured
    _choose_trees(trees, plain, base, costs)
    reachable = max(costs.reach, plain + 2)
    tokens, rows, deepest = float(plain), plain, 0
    best, kept = plain / base, [0] * len(choices)
    reach = [0] * len(choices)
    start = best
    while True:
        gains = [(one.alpha ** (reach[i] + 1), -i) for i, one in enumerate(choices) if reach[i] < one.most]
        if not gains:
            break
        gain, at = max(gains)
        if gain < 0.05 or rows == reachable:
            break
        reach[-at] += 1
        tokens, rows = tokens + gain, rows + 1
        if choices[-at].model:
            deepest = max(deepest, reach[-at])
        drafting = sum(one.model for one in choices)
        rate = tokens / ((costs.step(rows) or base) + deepest * costs.draft(drafting))
        if rate > best and rate > WORTH * start:
            best, kept = rate, list(reach)
    for one, gamma in zip(choices, kept, strict=True):
        one.gamma = gamma


def _choose_trees(trees: list[Choice], plain: int, base: float, costs: Costs) -> None:
    """Take those trees, the best first, with which the batch still gains. One far larger than any step that was measured is
    tried, alone: what so many rows cost cannot be guessed."""
    tokens, rows, best = float(plain), plain, plain / base
    for one in sorted(trees, key=lambda one: -one.alpha):
        more = expected(one.alpha, one.most) - 1.0
        rate = (tokens + more) / (costs.step(rows + one.rows) or base)
        unknown = rows == plain and rows + one.rows > 1.5 * costs.reach
        if unknown or (rate > best and rate > WORTH * plain / base):
            one.gamma, tokens, rows, best = one.most, tokens + more, rows + one.rows, rate
        if unknown:
            return
