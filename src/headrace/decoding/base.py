"""What a decoding method is: it says beforehand what it needs from a step, and turns what comes back into children."""

from headrace.data.params import COMMON, DRAWN
from headrace.data.plan import Answers, AnyWant, Feed
from headrace.data.types import ALL, Child, Draft, Request, Sequence

__all__ = ["COMMON", "DRAWN", "Outputs", "Strategy"]

Outputs = list[tuple[Sequence, Answers]]  # of sequences that have caught up


class Strategy:
    """A decoding method inside the one loop. It sees sequences and compact answers, never a tensor, block or slot.

    A method of a user's own inherits from it, and with it what is said here for those that say nothing. One object may serve
    many requests: what it remembers belongs in `request.state` and `seq.decode.state`. A hook that raises fails its request.
    """

    streams: bool = True
    """Whether an output's tokens may be shown as they come; if not, `results` has them at the end."""

    speculates: bool = False
    """Whether sequences may carry optional drafts: `want` then asks to verify `seq.decode.draft`, `select` returns paths."""

    drops_failed: bool = False
    """Whether a sequence whose grammar fails is dropped while others go on; if not, it fails the request."""

    generates: bool = True
    """Whether it writes tokens; if not, no room is kept for any."""

    honours: frozenset[str] = frozenset()
    """The fields of SamplingParams it heeds beside those of COMMON, which the loop does; `processors` stands for the caller's
    own. A request that sets any other is refused. What draws by wants of kind Sample heeds those of DRAWN."""

    def width(self, request: Request) -> int:
        """The most sequences the request may hold at once; slots and blocks are admitted for that many."""
        return 1

    def nodes(self, request: Request) -> int:
        """The most nodes a draft of its own has; budget and blocks are admitted for that many in each sequence."""
        return 0

    def shares(self, request: Request) -> int:
        """How many known tokens may be taken from what the cache has; all others are fed. Asked once, when the request is
        queued; a hook that learns better sets `request.shares`."""
        return ALL

    def draft(self, request: Request, seq: Sequence) -> Draft | None:
        """What the next step of `seq` must verify (`required`); None: nothing. Asked again after a preemption.

        A sequence whose known tokens are all computed, because its last ones were a path without a token, is fed the nodes
        alone: such a step has no logits of the last known token.
        """
        return None

    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        """What a feed must bring back; `last`: it reaches the last known token, and what the draft must have."""
        return ()

    def observe(self, request: Request, seq: Sequence, feed: Feed, answers: Answers) -> None:
        """What a feed brought, chunks of a prompt included, in the order of its wants."""

    def select(self, request: Request, outputs: Outputs) -> list[list[Child]]:
        """Children of each sequence, in the order given: none = dropped, one = goes on, several = fork.

        Called when all sequences of the request have caught up.
        """
        return [[] for _ in outputs]

    def done(self, request: Request) -> bool:
        """Whether the request is finished although sequences are still open; called after each commit."""
        return False

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        """The outputs of a request that does not stream, best first, with what they were ranked by."""
        return []
