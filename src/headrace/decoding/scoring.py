"""Scoring: the log-probability of every prompt token, and nothing drawn."""

from headrace.data.plan import FeedOutput, Want
from headrace.data.types import Child, Request, Sequence


class Scoring:
    """Ends a request when its prompt has been fed; `prompt_logprobs` is what it is run for."""

    streams = True
    speculates = False
    drops_failed = False
    honours = frozenset({"prompt_logprobs"})

    def width(self, request: Request) -> int:
        return 1

    def want(self, request: Request, seq: Sequence) -> Want | None:
        return None

    def select(self, request: Request, outputs: list[tuple[Sequence, FeedOutput]]) -> list[list[Child]]:
        return [[] for _ in outputs]

    def done(self, request: Request) -> bool:
        return False

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        return []
