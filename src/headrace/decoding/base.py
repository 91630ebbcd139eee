"""The interface of decoding methods: a strategy declares what it needs from a step, and turns the answers into children."""

from headrace.data.params import COMMON, DRAWN
from headrace.data.plan import Answers, AnyWant, Feed
from headrace.data.types import ALL, Child, Draft, Request, Sequence

__all__ = ["COMMON", "DRAWN", "Outputs", "Strategy"]

Outputs = list[tuple[Sequence, Answers]]  # of sequences with logits of their last token


class Strategy:
    """A decoding method in the engine loop. It sees sequences and compact answers, never a tensor, block or slot.

    A user's own method inherits from it and its defaults. One object may serve many requests, so its state belongs in
    `request.state` and `seq.decode.state`. A method that raises fails its request.
    """

    streams: bool = True
    """Whether tokens are delivered as they come; otherwise `results` returns them at the end."""

    speculates: bool = False
    """Whether sequences may carry optional drafts: `want` then verifies `seq.decode.draft`, and `select` returns paths."""

    drops_failed: bool = False
    """Whether a sequence whose grammar fails is dropped; otherwise it fails the request."""

    generates: bool = True
    """Whether it outputs tokens; otherwise no room is reserved for any."""

    uncut: bool = False
    """Whether the rows of its prompt must be in one feed, even if these are more than a step usually has."""

    honours: frozenset[str] = frozenset()
    """Fields of SamplingParams that it uses, in addition to COMMON, which the loop uses; `processors`: the caller's own. A
    request that sets any other field is refused. A strategy with Sample wants uses those of DRAWN."""

    def width(self, request: Request) -> int:
        """The most sequences the request may hold at once; slots and blocks are admitted for that many."""
        return 1

    def nodes(self, request: Request) -> int:
        """The most nodes of a required draft; budget and blocks are admitted for that many per sequence."""
        return 0

    def shares(self, request: Request) -> int:
        """How many known tokens may come from the prefix cache; all others are fed. Called once, when the request is queued; a
        later method may set `request.shares`."""
        return ALL

    def draft(self, request: Request, seq: Sequence) -> Draft | None:
        """The draft that the next step of `seq` must verify (`required`); None: no draft. Called again after a preemption.

        If all known tokens are computed, because the last ones were a path without a token, only the nodes are fed: such a step
        has no logits of the last known token.
        """
        return None

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        """What a feed must return. last: the feed reaches the last known token and the end of the required draft."""
        return ()

    def observe(self, request: Request, seq: Sequence, feed: Feed, answers: Answers) -> None:
        """A feed's answers, in the order of its wants; called for prompt chunks too."""

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        """The children of each sequence, in the given order: none drops it, one continues it, several fork it. Called when all
        sequences of the request have caught up."""
        return [[] for _ in outputs]

    def done(self, request: Request) -> bool:
        """Whether the request is finished although sequences are open; called after each commit."""
        return False

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        """The outputs of a request that does not stream, best first, with their ranking scores."""
        return []
