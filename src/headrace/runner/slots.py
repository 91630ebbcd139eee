"""What a runner remembers between steps, so that a plan carries only what is new: the live sequences, by slot."""

from collections.abc import Callable

from headrace.data.plan import NewSlot, StepPlan
from headrace.runner.program import AnyLive


class Slots(dict[int, AnyLive]):
    """Live sequences by slot, kept up to date by the deltas of each plan. `live` sets one up."""

    def __init__(self, live: Callable[[NewSlot], AnyLive]) -> None:
        self._live = live

    def apply(self, plan: StepPlan) -> None:
        """Free, set up and fork slots, extend tables, append the tokens each feed brings."""
        for slot in plan.free:
            self.pop(slot, None)  # after a step that failed a slot may be given back twice
        for new in plan.new:
            self[new.slot] = self[new.source].fork() if new.source >= 0 else self._live(new)
        for delta in plan.tables:
            self[delta.slot].set_table(delta.table, delta.start, delta.blocks)
        for feed in plan.feeds:
            if feed.new:
                self[feed.slot].extend(feed.new)
