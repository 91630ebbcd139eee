"""What a drafter is: it guesses the next tokens of a sequence; the target verifies them all in one step."""

from typing import Protocol

from headrace.types import Draft, Request, Sequence


class Drafter(Protocol):
    """Proposes drafts. It can be wrong at no cost but time: what it proposes never changes what comes out.

    What it remembers of a sequence is in `seq.drafting`; None where the sequence is new, a fork, or nobody drafted yet.
    """

    name: str

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        """A chain or tree below the last known token of `seq`, no deeper than `most`; None: nothing to propose."""
