"""An exit of a decoder: its first layers, and a trained head that answers after them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.data.plan import Answers, Feed
from headrace.runner.program import AnyLive, Program
from headrace.runner.span import WHOLE, Span


@dataclass(frozen=True, slots=True)
class Exit:
    """The layers of the target that run (`span`), and the program of the head, which starts from hidden rows.

    number: which of the trained exits it is. partial: the head chooses from a part of the vocabulary.
    """

    span: Span
    head: Program
    number: int = 0
    partial: bool = False

    def run(self, target: Program, feeds: Sequence[Feed], lives: Sequence[AnyLive]) -> list[Answers]:
        """Run the layers and the head; returns the answers of every feed. K/V are written in the layers that ran."""
        step = target.step()
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(msgspec.structs.replace(feed, wants=(), allowed=b""), live)
        return self.judge(feeds, lives, target.run(step, self.span, keep=True))

    def confidence(self, row: Any) -> float:
        """The exit classifier's probability that the head's token of a row [hidden] equals the full model's."""
        assert self.head.inputs is not None
        return self.head.inputs.confidence(self.number, row)

    def judge(self, feeds: Sequence[Feed], lives: Sequence[AnyLive], rows: Any) -> list[Answers]:
        """The head's answers for the rows [n, hidden] after the exit's layers."""
        assert self.head.inputs is not None
        step = self.head.step()
        for feed, live in zip(feeds, lives, strict=True):
            step.feed(feed, live)
        self.head.run(step, WHOLE, self.head.inputs.at_exit(self.number, rows))
        return [tuple(answers) for answers in step.answers()]
