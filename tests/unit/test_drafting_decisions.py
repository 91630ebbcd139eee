"""The drafting policy's decisions on three recorded traces: how many draft tokens each step verifies, step by step.

The traces run on a simulated machine whose clock only its own steps move, so they are the same on every computer. A change
of the policy that is meant shows here as a difference; record again with `python -m tests.unit.test_drafting_decisions`.
"""

import json
from itertools import groupby
from pathlib import Path

import pytest

from headrace.data.plan import StepPlan
from tests.machine import Bench, Exits, Text

RECORD = Path(__file__).parents[1] / "data" / "drafting_decisions.json"


class Recorded(Bench):
    """A simulated machine that notes the draft tokens of each feed, per step of the target."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.steps: list[str] = []
        submit = self.engine.executor.submit

        def note(plan: StepPlan):  # type: ignore[no-untyped-def]
            if plan.model == 0 and plan.feeds:
                self.steps.append(" ".join(str(len(feed.nodes)) for feed in plan.feeds))
            return submit(plan)

        self.engine.executor.submit = note  # type: ignore[method-assign]

    def decisions(self) -> list[str]:
        """One entry for each run of equal steps: draft tokens by feed, and how many steps."""
        return [f"{step} x{len(list(same))}" for step, same in groupby(self.steps)]


def ngram() -> list[str]:
    """Lookups alone: a text that copies, then one that does not, at two batch sizes."""
    bench = Recorded(Text(0.85, 0.0, 2), draft=False)
    for batch, lookup in ((1, 0.85), (2, 0.85), (2, 0.1), (4, 0.5)):
        bench.text.lookup = lookup
        bench.run(batch, 60)
    return bench.decisions()


def draft_model() -> list[str]:
    """A draft model next to lookups, over several requests, a batch and a long prompt."""
    bench = Recorded(Text(0.3, 0.8, 4))
    for batch, model in ((1, 0.8), (1, 0.65), (1, 0.2), (4, 0.8), (1, 0.8)):
        bench.text.model = model
        bench.run(batch, 60)
    bench.prompt = 300
    bench.run(1, 60)
    return bench.decisions()


def mixed() -> list[str]:
    """Next to requests that exit early, with an acceptance that changes between runs."""
    bench = Recorded(Text(0.85, 0.0, 2), draft=False, exits=Exits())
    for lookup in (0.85, 0.1, 0.9):
        bench.text.lookup = lookup
        bench.next_to_exits(2, 2, 60)
    bench.run(2, 60)
    return bench.decisions()


TRACES = {trace.__name__: trace for trace in (ngram, draft_model, mixed)}


@pytest.mark.parametrize("trace", TRACES)
def test_the_decisions_equal_the_recorded_decisions(trace: str) -> None:
    recorded = json.loads(RECORD.read_text("utf-8"))[trace]
    assert TRACES[trace]() == recorded.split(", ")
    assert len(set(recorded.split(", "))) > 10, "the trace holds many kinds of steps"


if __name__ == "__main__":
    RECORD.write_text(json.dumps({name: ", ".join(trace()) for name, trace in TRACES.items()}, indent=1) + "\n", "utf-8")
