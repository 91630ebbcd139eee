"""Costs of steps in which some rows may exit early: next to requests with exits or with a cascade, other requests still draft.

Only the rows that run through the upper layers (of a cascade: through the target model) vary from step to step. So these steps
have a table of their own, by upper rows. A draft token adds a row to it, as to any step.
"""

from collections import deque
from statistics import mode

from headrace.data.plan import StepOutput, StepPlan
from headrace.drafting.policy import Costs
from headrace.drafting.tuning import TUNING, Tuning


class MixedCosts:
    """Seconds by upper rows, and the upper rows that requests with early exits add to a step."""

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
