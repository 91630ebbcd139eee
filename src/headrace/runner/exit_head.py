"""A part of a model that answers for itself: some of its layers, and a trained head after them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.data.plan import Answers, Feed
from headrace.runner.program import AnyLive, Program
from headrace.runner.span import WHOLE, Span


@dataclass(frozen=True, slots=True)
class Exit:
    """The layers of a target that run (`span`), and the program that answers after them: one that begins with hidden rows. Of
    its trained exits the one numbered `number` stands there. `partial`: it chooses from a part of the vocabulary."""

    span: Span
    head: Program
    number: int = 0
    partial: bool = False

    def run(self, target: Program, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> list[Answers]:
        """The answers of every feed, in the order of their wants. K and V are written in the layers that ran."""
        step = target.step()
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(msgspec.structs.replace(feed, wants=(), allowed=b""), live)
        return self.judge(feeds, lives, target.run(step, self.span, keep=True))

    def sure(self, row: Any) -> float:
        """How likely the head says of a row [hidden] what the whole model would, by the exit's classifier."""
        assert self.head.inputs is not None
        return self.head.inputs.sure(self.number, row)

    def judge(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Any) -> list[Answers]:
        """What the head says of the rows [n, hidden] that the layers have left."""
        assert self.head.inputs is not None
        step = self.head.step()
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(feed, live)
        self.head.run(step, WHOLE, self.head.inputs.at_exit(self.number, rows))
        return [tuple(answers) for answers in step.answers()]
