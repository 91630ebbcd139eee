"""What drafting may cost: each drafter has a budget, and drafts only as long as it holds what a step could lose.

Estimates decide whether a draft is worth its rows; the budget bounds what is lost where they are wrong, whatever the reason. It
begins with a few plain steps, is given a small share of all time, takes what drafts save and pays what they cost.
"""

from dataclasses import dataclass, field

from headrace.drafting.costs import Costs

SHARE = 0.01  # of all time, that drafting may lose for good
START = 4.0  # plain steps that a drafter may lose before it has saved any
STEPS, AHEAD = 8.0, 128.0  # plain steps, the most a budget keeps: for the next steps, and for catching up
WAITED = 1.25  # a step that takes so many times what such steps take has waited for another process


@dataclass(slots=True)
class Budget:
    """Seconds that one drafter may lose. `steps`: by drafting and verifying; `ahead`: by that and by catching up, which is paid
    before anything has come of it. A budget that is not empty may be overdrawn by one catch-up."""

    steps: float
    ahead: float

    def allow(self, seconds: float, base: float) -> None:
        """So much more may be lost, up to what a budget begins with: nothing is saved up to be lost at once."""
        self.steps = max(self.steps, min(self.steps + seconds, START * base))
        self.ahead = max(self.ahead, min(self.ahead + seconds, START * base))

    def add(self, seconds: float, base: float) -> None:
        """What was saved, or, below 0, lost."""
        self.steps = min(self.steps + seconds, STEPS * base)
        self.ahead = min(self.ahead + seconds, AHEAD * base)


@dataclass(slots=True)
class StepCost:
    """What a drafter did in one step."""

    seconds: float = 0.0  # drafting
    rows: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Budgets:
    """The budgets of all drafters, by name, and what the step under way has cost so far."""

    by_drafter: dict[str, Budget] = field(default_factory=dict)
    _step: dict[str, StepCost] = field(default_factory=dict)
    _took: tuple[int, int, float | None, int] | None = None
    _passed: float = 0.0

    def open(self, names: list[str], base: float) -> None:
        """A budget for each that has none yet; a plain step takes `base` seconds."""
        for name in names:
            self.by_drafter.setdefault(name, Budget(START * base, START * base))

    def empty(self, name: str) -> bool:
        """Whether a drafter may not catch up with anything."""
        return name in self.by_drafter and self.by_drafter[name].ahead <= 0

    def drafted(self, name: str, seconds: float) -> None:
        self._step.setdefault(name, StepCost()).seconds += seconds

    def caught_up(self, name: str, seconds: float) -> None:
        if name in self.by_drafter:
            self.by_drafter[name].ahead -= seconds

    def verified(self, name: str, rows: int, accepted: int) -> None:
        spent = self._step.setdefault(name, StepCost())
        spent.rows += rows
        spent.accepted += accepted

    def passed(self, seconds: float) -> None:
        """A step in which nobody drafted took so long; its share is given with the next that is recorded."""
        self._passed += seconds

    def record_step(self, plain: int, rows: int, seconds: float | None, tokens: int | None = None) -> None:
        """The step's rows without drafts, its rows, its seconds (None: it had prompts, too), and the tokens that it would have
        given without drafts (None: one for each row)."""
        self._took = (plain, rows, seconds, plain if tokens is None else tokens)

    def settle(self, costs: Costs) -> None:
        """The step is over: what it saved beside plain steps, and cost, goes to those who drafted."""
        if self._took is None:
            return
        if (base := costs.step(self._took[0])) is not None:
            _, rows, seconds, tokens = self._took
            usual = max(costs.step(rows) or base, base)
            seconds, alone = usual if seconds is None else min(seconds, WAITED * usual), seconds is None
            verified = sum(spent.rows for spent in self._step.values())
            for name, budget in self.by_drafter.items():
                if not alone:
                    budget.allow(SHARE * (seconds + self._passed), base)
                if (spent := self._step.get(name)) is not None:
                    extra = (seconds - base) * spent.rows / verified if verified else 0.0
                    budget.add(base * spent.accepted / tokens - extra - spent.seconds, base)
        self._step.clear()
        self._took, self._passed = None, 0.0
