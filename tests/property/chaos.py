"""What may fail fails at random: hooks of strategies, processors, constraints and drafters, rows and whole steps.

A step that fails strikes nobody, as its requests are tried again; a step in which one is tried again strikes that one.
"""

import random
from collections.abc import Callable
from typing import Any

from headrace.data.plan import Failed, StepOutput, StepPlan
from headrace.data.types import Request, Sequence
from headrace.engine.engine import Engine
from headrace.engine.feeding import Flight

OFTEN = {"results": 15, "draft": 2, "retry": 8}  # what is asked, or comes, seldom fails more often
HOOKS = ("want", "observe", "select", "done", "results", "draft", "masks", "apply")


class BrokenError(RuntimeError):
    """What a broken hook raises."""


class Chaos:
    """Breaks hooks of chosen requests, rows of theirs, and steps with whoever is in them, each time with some probability.

    `struck`: ids of the requests that something was done to; all others must end as if nothing had happened. `stale`: chunks of
    prompts that were under way behind a failed chunk.
    """

    def __init__(self, seed: int, rate: float = 0.04, step_rate: float = 0.02) -> None:
        self.rng = random.Random(seed)
        self.rate = rate
        self.step_rate = step_rate
        self.struck: set[str] = set()
        self.hooks: dict[str, int] = {}
        self.stale = 0

    def install(self, engine: Engine, victim: Callable[[Request], bool]) -> None:
        """From now on, requests for which `victim` says so meet faults, and steps fail."""
        add = engine.add

        def adding(*args: Any, **more: Any) -> Request:
            request = add(*args, **more)
            if victim(request):
                self._break_hooks(request)
            return request

        engine.add = adding  # type: ignore[method-assign]
        self._break_steps(engine, victim)
        land = engine.scheduler.land

        def landing(flight: Flight) -> None:
            self.stale += sum(work.stale for work in flight.works)
            land(flight)

        engine.scheduler.land = landing  # type: ignore[method-assign]

    def strikes(self, what: str, *requests: Request, rate: float | None = None) -> bool:
        if self.rng.random() >= (self.rate if rate is None else rate):
            return False
        self.struck.update(request.id for request in requests)
        self.hooks[what] = self.hooks.get(what, 0) + 1
        return True

    def _break_hooks(self, request: Request) -> None:
        request.observes = True
        for owner in (request.strategy, *request.processors, *(seq.decode.constraint for seq in request.seqs)):
            for name in HOOKS:
                if callable(hook := getattr(owner, name, None)):
                    self._break(request, owner, name, hook)

    def _break(self, request: Request, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        def breaking(*args: Any, **more: Any) -> Any:
            if self.strikes(name, request, rate=self.rate * OFTEN.get(name, 1)):
                raise BrokenError(name)
            return hook(*args, **more)

        setattr(owner, name, breaking)

    def _break_steps(self, engine: Engine, victim: Callable[[Request], bool]) -> None:
        """A step raises before anything of it was carried out, in its middle, or after all of it; a row says that it failed."""
        runner = engine.executor.runner  # type: ignore[attr-defined]
        execute = runner.execute

        def fed(plan: StepPlan) -> list[Request]:
            slots = {feed.slot for feed in plan.feeds}
            return [r for r in engine.requests.values() if r.in_flight and any(seq.wire.slot in slots for seq in r.seqs)]

        def fails(when: str, plan: StepPlan) -> bool:
            retried = [request for request in fed(plan) if request in engine.scheduler.retries]
            what = "retry" if retried else "step"
            rate = self.step_rate * OFTEN.get(what, 1)
            return bool(plan.feeds) and self.strikes(f"{what} {when}", *retried, rate=rate)

        def breaking(plan: StepPlan) -> StepOutput:
            if fails("before", plan):
                raise BrokenError("step before")
            output: StepOutput = execute(plan)
            if fails("after", plan):
                raise BrokenError("step after")
            if plan.model == 0:
                for at, feed in enumerate(plan.feeds):
                    (owner,) = [r for r in fed(plan) if any(seq.wire.slot == feed.slot for seq in r.seqs)]
                    if victim(owner) and self.strikes("row", owner, rate=self.step_rate):
                        output.feeds[at] = tuple(Failed("a broken row") for _ in feed.wants)
            return output

        runner.execute = breaking


class FaultyDrafter:
    """A drafter that raises at random, where it drafts and where it learns what became of a draft. It fails no request."""

    trees = True

    def __init__(self, inner: Any, seed: int) -> None:
        self.inner = inner
        self.name = inner.name
        self.rng = random.Random(seed)
        self.raised = 0

    def draft(self, request: Request, seq: Sequence, most: int) -> Any:
        self._fail("draft")
        draft = self.inner.draft(request, seq, most)
        if draft is not None:
            draft.observed = True
        return draft

    def observe(self, request: Request, seq: Sequence, *answered: Any) -> None:
        self._fail("observe")

    def remember(self, request: Request, seq: Sequence) -> None:
        self._fail("remember")

    def _fail(self, where: str) -> None:
        if self.rng.random() < 0.05:
            self.raised += 1
            raise BrokenError(where)
