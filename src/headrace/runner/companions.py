"""Several models on the same slots and block ids: the target, and companions that draft for it or that it is contrasted with.

Each model has its own pool of as many blocks. What the target's plan changes (slots, tables, moves, copies) holds for all
pools; a companion's plan carries feeds only.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from headrace.data.plan import Feed, StepOutput, StepPlan
from headrace.runner.parts import Part


class ModelRunner(Protocol):
    """A model that runs feeds. `slots` may be shared between models; `rows` is what `run` takes to contrast with."""

    slots: Any

    def execute(self, plan: StepPlan) -> StepOutput:
        """All of the below, for a plan of its own."""

    def prepare(self, plan: StepPlan) -> None:
        """Bring the slots up to date."""

    def rearrange(self, plan: StepPlan) -> None:
        """Carry out the plan's moves and copies in this model's pool."""

    def rows(self, plan: StepPlan) -> Any:
        """Feed, and keep the rows of logits that are wanted."""

    def run(self, plan: StepPlan, slots: Any = None, amateur: Any = None, part: Part | None = None) -> StepOutput:
        """Feed, and answer the wants: with these slots in place of one's own, with rows combined with an amateur's, by a part
        of the model."""

    def reserve_hidden(self) -> None:
        """Take the memory of hidden states, before the first contrastive search. Raises ValueError where it does not fit."""

    def kv_bytes(self) -> int: ...

    def close(self) -> None: ...


class Companions:
    """Carries out plans on the model they name. `amateur` is the number of the companion that contrastive decoding uses.

    A plan for the target feeds the amateur the same rows wherever a request is decoded by contrast, so its K and V are
    always there as far as the target's are.
    """

    def __init__(self, target: ModelRunner, companions: Sequence[ModelRunner], amateur: int = 0) -> None:
        self.models = (target, *companions)
        self.amateur = amateur
        self._chains = [Chains(target.slots) for _ in companions]

    def execute(self, plan: StepPlan) -> StepOutput:
        target = self.models[0]
        target.prepare(plan)
        if plan.model:
            return self.models[plan.model].run(*self._chains[plan.model - 1].follow(plan))
        for model in self.models:
            model.rearrange(plan)
        if not plan.feeds:
            return StepOutput(plan.step)
        contrasted = [feed for feed in plan.feeds if target.slots[feed.slot].params.contrastive_beta is not None]
        if not contrasted:
            return target.run(plan)
        rows = self.models[self.amateur].rows(StepPlan(plan.step, feeds=contrasted))
        return target.run(plan, amateur=rows)

    def reserve_hidden(self) -> None:
        self.models[0].reserve_hidden()

    def kv_bytes(self) -> int:
        return sum(model.kv_bytes() for model in self.models)

    def close(self) -> None:
        for model in reversed(self.models):
            model.close()


class SelfDraft:
    """A part of the target as a companion of it (LayerSkip, Elhoushi et al. 2024; Draft & Verify, Zhang et al. 2023).

    It reads the target's K and V and writes those of its chain over there: approximate ones, which the target's own step
    writes again before anything else reads them.
    """

    def __init__(self, target: ModelRunner, part: Part) -> None:
        self.target = target
        self.part = part
        self.slots = target.slots

    def execute(self, plan: StepPlan) -> StepOutput:
        return self.run(plan)

    def prepare(self, plan: StepPlan) -> None:
        """The target does."""

    def rearrange(self, plan: StepPlan) -> None:
        """The target does."""

    def rows(self, plan: StepPlan) -> Any:
        raise NotImplementedError("a part of the target is nobody's amateur")

    def run(self, plan: StepPlan, slots: Any = None, amateur: Any = None, part: Part | None = None) -> StepOutput:
        return self.target.run(plan, slots, part=part or self.part)

    def reserve_hidden(self) -> None:
        """The target does."""

    def kv_bytes(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is its own."""


class Chains:
    """The draft chains that a companion grows token by token, each on a scratch copy of its slot.

    A feed without known tokens brings a chain's next token. As a known token of the scratch slot it is drawn from as any
    other: with the noise of its position, and with penalties that count the chain.
    """

    def __init__(self, slots: Any) -> None:
        self._slots = slots
        self._scratch: dict[int, Any] = {}

    def follow(self, plan: StepPlan) -> tuple[StepPlan, Any]:
        """The plan with chains as known tokens, and the slots that it then is about."""
        slots = Overlaid(self._slots)
        feeds = [self._extend(feed, slots) if feed.nodes and not feed.count else feed for feed in plan.feeds]
        return msgspec.structs.replace(plan, feeds=feeds), slots

    def _extend(self, feed: Feed, slots: "Overlaid") -> Feed:
        assert len(feed.nodes) == 1, "a chain grows by one token"
        slot = self._slots[feed.slot]
        if feed.start == len(slot):
            self._scratch[feed.slot] = slot.fork()
        chain = slots.over[feed.slot] = self._scratch[feed.slot]
        assert len(chain) == feed.start, "a chain has no gaps"
        chain.extend(feed.nodes)
        return msgspec.structs.replace(feed, count=1, nodes=[], parents=[])


class Overlaid:
    """Slots, some of them replaced."""

    def __init__(self, slots: Any) -> None:
        self._slots = slots
        self.over: dict[int, Any] = {}

    def __getitem__(self, number: int) -> Any:
        return self.over[number] if number in self.over else self._slots[number]
