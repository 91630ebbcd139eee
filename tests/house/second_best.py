"""A decoding method on wants that there are: the second likeliest token."""

from headrace.data.plan import AnyWant, Feed, Ranked, Top
from headrace.data.types import Child, Request, Sequence
from headrace.decoding.base import Outputs, Strategy


class SecondBest(Strategy):
    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (Top(2),) if last else ()

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        return [[Child(token=answer.ids[1])] for _, (answer,) in outputs if isinstance(answer, Ranked)]
