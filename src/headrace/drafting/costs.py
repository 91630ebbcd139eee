"""What steps take on this machine: by rows, by sequences that draft, by tokens that a draft model catches up with.

A step that waits for another process takes longer, none takes less than it must: so the least of the last few measurements
counts, and a machine that was busy when a step was first measured is soon seen through.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

SAMPLES = 8  # measurements that are kept of each
ENOUGH = 2  # plain steps that are measured before anything is compared with them
FRESH, FORGET = 64, 512  # steps after which a plain step is measured again, at first sooner; and any other forgotten
RECENT = 8  # steps for which a measurement is good enough to catch up with a text for
# Guesses until they are measured, in plain steps: a row more, a draft step, a token to catch up.
ROW, DRAFT, TOKEN = 0.2, 0.3, 0.06


@dataclass(slots=True)
class Costs:
    """Seconds of a step by its rows, of a draft step by its sequences, and of catching up."""

    steps: dict[int, float] = field(default_factory=dict)
    drafts: dict[int, float] = field(default_factory=dict)
    _recent: dict[tuple[str, int], deque[float]] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)  # rows -> when that was measured last
    _count: dict[int, int] = field(default_factory=dict)  # and how often
    _known: dict[int, float | None] = field(default_factory=dict)  # answers since the last measurement
    _token: float | None = None
    _now: int = 0

    def step_took(self, rows: int, seconds: float) -> None:
        """What is long past may have been an accident, so it is forgotten and tried again."""
        self._now += 1
        self._known.clear()
        self.steps[rows] = self._least("step", rows, seconds)
        self._seen[rows] = self._now
        self._count[rows] = self._count.get(rows, 0) + 1
        if self._now % FRESH == 0:
            for old in [rows for rows, when in self._seen.items() if self._now - when > FORGET]:
                del self._seen[old], self._count[old], self.steps[old], self._recent["step", old]

    def stale(self, rows: int) -> bool:
        """Whether a step over `rows` should be measured (again) before anything is compared with it."""
        count = self._count.get(rows, 0)
        return count < ENOUGH or self._now - self._seen[rows] >= min(FRESH, 2 ** (count + 1))

    def recent(self, rows: int) -> bool:
        """Whether a step over `rows` was measured a moment ago."""
        return self._now - self._seen.get(rows, -RECENT) < RECENT

    def draft_took(self, sequences: int, seconds: float) -> None:
        self.drafts[sequences] = self._least("draft", sequences, seconds)

    def caught_up(self, tokens: int, seconds: float) -> None:
        """A draft model was fed so many tokens that it had not seen."""
        self._token = self._least("token", 0, seconds / tokens)

    def step(self, rows: int) -> float | None:
        """Seconds of a step over `rows`; None before anything was measured."""
        if rows not in self._known:
            self._known[rows] = _between(self.steps, rows, ROW)
        return self._known[rows]

    @property
    def reach(self) -> int:
        """As many rows as may be tried: a few more than were, since a guess far beyond could be far off."""
        return max(self.steps, default=1) + 2

    def draft(self, sequences: int) -> float:
        """Seconds of one draft step of so many sequences; 0 before one was measured."""
        return _between(self.drafts, sequences, ROW) or 0.0

    def draft_guess(self, sequences: int) -> float:
        """The same; before one was measured a guess."""
        return self.draft(sequences) or DRAFT * (self.step(sequences) or 0.0)

    def catching_up(self, tokens: int) -> float:
        """Seconds until a draft model has seen so many tokens, beyond the step that it drafts with."""
        each = TOKEN * (self.step(1) or 0.0) if self._token is None else self._token
        return tokens * each

    def _least(self, what: str, at: int, seconds: float) -> float:
        recent = self._recent.setdefault((what, at), deque(maxlen=SAMPLES))
        recent.append(seconds)
        return min(recent)


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
