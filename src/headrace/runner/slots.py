"""The live sequences that a runner keeps between steps, so that a plan carries only changes."""

from collections.abc import Callable

from headrace.data.plan import NewSlot, StepPlan
from headrace.runner.program import AnyLive


class Slots(dict[int, AnyLive]):
    """Live sequences by slot, updated by each plan. live: makes one from a NewSlot."""

    def __init__(self, live: Callable[[NewSlot], AnyLive]) -> None:
        self._live = live

    def apply(self, plan: StepPlan) -> None:
        """Free, set up and fork slots, extend block tables, append the new tokens of each feed."""
        for slot in plan.free:
            self.pop(slot, None)  # after a failed step a slot may be freed twice
        for new in plan.new:
            self[new.slot] = self[new.source].fork() if new.source >= 0 else self._live(new)
        for delta in plan.tables:
            self[delta.slot].set_table(delta.table, delta.start, delta.blocks)
        for feed in plan.feeds:
            if feed.new:
                self[feed.slot].extend(feed.new)
