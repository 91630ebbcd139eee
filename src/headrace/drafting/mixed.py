"""Costs of steps in which some rows may exit early: next to requests with exits or with a cascade, others still draft.

Only the rows that go through the upper layers (of a cascade: through the target model) vary from step to step, so these steps
have a table of their own, by upper rows. A draft adds a row to it as to any step.
"""

from collections import deque
from statistics import mode

from headrace.data.plan import StepOutput, StepPlan
from headrace.drafting.costs import Costs

REMEMBERED = 16  # steps from which the upper rows of the next one are predicted


class MixedCosts:
    """Seconds by upper rows, and how many upper rows the requests that may exit early bring to a step."""

    def __init__(self) -> None:
        self.costs = Costs()
        self._brought: dict[int, deque[int]] = {}  # by number of such requests: upper rows of the last steps

    def rows(self, sequences: int, early: int) -> int:
        """Upper rows to expect of a step without drafts over so many sequences, `early` of which may exit early. The most
        frequent number, not the mean: a step with it has been measured."""
        brought = self._brought.get(early)
        return sequences - early + (mode(brought) if brought else early)

    def record_step(self, plan: StepPlan, output: StepOutput) -> tuple[int, int]:
        """Learn from a step without prompts; returns its upper rows without drafts, and with them."""
        drafted = sum(len(feed.nodes) for feed in plan.feeds)
        rows = upper_rows(plan, output)
        early = len(output.exited)
        brought = rows - drafted - (len(plan.feeds) - early)
        self._brought.setdefault(early, deque(maxlen=REMEMBERED)).append(brought)
        self.costs.step_took(rows, output.seconds)
        return rows - drafted, rows


def upper_rows(plan: StepPlan, output: StepOutput) -> int:
    """Rows of a step that went through the upper layers, lagging ones included."""
    exited = {*output.unfilled, *output.propagated}
    return sum(feed.lag + feed.count + len(feed.nodes) for number, feed in enumerate(plan.feeds) if number not in exited)
