"""What a decoding method is: it says beforehand what it needs from a step, and turns what comes back into children."""

from typing import Protocol, runtime_checkable

from headrace.data.param_checks import COMMON, DRAWN
from headrace.data.plan import FeedOutput, Want
from headrace.data.types import Child, Draft, Request, Sequence

__all__ = ["COMMON", "DRAWN", "Drafting", "Strategy"]


class Strategy(Protocol):
    """A decoding method inside the one loop. It sees sequences and compact outputs, never a tensor, block or slot.

    A method of a user's own inherits from it, and with it what is said here for those that say nothing.
    """

    streams: bool
    """Whether an output's tokens may be shown as they come; if not, `results` has them at the end."""

    speculates: bool = False
    """Whether sequences may carry optional drafts: `want` then asks to verify `seq.decode.draft`, and `select` returns paths."""

    drops_failed: bool = False
    """Whether a sequence whose grammar fails is dropped while others go on; if not, it fails the request."""

    honours: frozenset[str] = frozenset()
    """The fields of SamplingParams it heeds beside those of COMMON, which the loop does; `processors` stands for the caller's
    own. A request that sets any other is refused. What draws by wants of kind `sample` heeds those of DRAWN."""

    def width(self, request: Request) -> int:
        """The most sequences the request may hold at once; slots and blocks are admitted for that many."""

    def want(self, request: Request, seq: Sequence) -> Want | None:
        """What a feed that reaches the last known token of `seq` must bring back; None: nothing."""

    def select(self, request: Request, outputs: list[tuple[Sequence, FeedOutput]]) -> list[list[Child]]:
        """Children of each sequence, in the order given: none = dropped, one = goes on, several = fork.

        Called when all sequences of the request have caught up. An exception fails this request alone.
        """

    def done(self, request: Request) -> bool:
        """Whether the request is finished although sequences are still open; called after each commit."""

    def results(self, request: Request) -> list[tuple[Sequence, float]]:
        """The outputs of a request that does not stream, best first, with what they were ranked by."""


@runtime_checkable
class Drafting(Protocol):
    """A strategy whose steps verify drafts of its own, such as the candidates of contrastive search."""

    def nodes(self, request: Request) -> int:
        """The most nodes a draft has; budget and blocks are admitted for that many in each sequence."""

    def draft(self, request: Request, seq: Sequence) -> Draft | None:
        """What the next step of `seq` must verify (`required`); None: nothing. Asked again after a preemption.

        A sequence whose known tokens are all computed, because its last ones were a path without a token, is fed the nodes
        alone: such a step has no logits of the last known token.
        """
