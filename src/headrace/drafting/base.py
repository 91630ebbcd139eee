"""What a drafter is: it guesses the next tokens of a sequence; the target verifies them all in one step."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from headrace.data.plan import Answer, Answers, Feed
from headrace.data.types import Draft, Request, Sequence

Run = Callable[[int, list[Feed]], list[Answers]]  # carries out feeds of a model (StepPlan.model)
# Tokens of texts that a drafter reads in a step (some 4 microseconds each); and of each text where others have taken those.
READ, SHORT = 2048, 64
Filled = Callable[[Sequence, int, int], None]  # a KV group of a sequence is new from a KV index on


class Drafter(Protocol):
    """Proposes drafts. It can be wrong at no cost but time: what it proposes never changes what comes out.

    What it remembers of a sequence is in `seq.decode.memory[name]`; nothing is there where the sequence is new, or a fork.
    """

    name: str

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        """A chain or tree below the last known token of `seq`, no deeper than `most` and of at most MAX_NODES nodes: what is
        beyond is cut off. None: nothing to propose."""


def check_draft(draft: Draft, vocab_size: int) -> None:
    """Raises ValueError where no step could feed it."""
    if draft.tokens and not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab_size:
        raise ValueError(f"a drafted token is not in the vocabulary (0 to {vocab_size - 1})")
    if len(draft.parents) != len(draft.tokens) or not all(-1 <= up < at for at, up in enumerate(draft.parents)):
        raise ValueError("a draft names the parent of each node, -1 or an earlier node")


class Fed(Protocol):
    """A feed of the target's plan, and whose it is."""

    request: Request
    seq: Sequence
    feed: Feed


@runtime_checkable
class ModelDrafter(Protocol):
    """A drafter that runs a model: its drafts are room, and `fill` says of which tokens, for all sequences together."""

    def lag(self, seq: Sequence) -> int:
        """Known tokens of a sequence that the model has not seen: what it catches up with before it drafts."""

    def fill(self, works: list[Fed], run: Run, filled: Filled) -> None:
        """Put tokens into these works' drafts and feeds, as many as there is room for or fewer. Slots, tables and pools are
        as the target's step will find them."""


@runtime_checkable
class Observes(Protocol):
    """A drafter that learns from what the target answered: its drafts are `observed`."""

    def observe(self, request: Request, seq: Sequence, draft: Draft, path: tuple[int, ...], nodes: tuple[Answer, ...]) -> None:
        """A draft of its own was verified: `path` was accepted, `nodes` say what the target drew after each node (Drawn, or
        Failed where nothing may come there). A tree that was cut short has fewer nodes than `draft.memo` has notes."""


@runtime_checkable
class Reads(Protocol):
    """A drafter that reads texts: only so much of them in a step that no step waits for a long one."""

    def begin(self) -> None:
        """A step begins."""


@runtime_checkable
class Remembers(Protocol):
    """A drafter that learns from outputs that have ended."""

    def remember(self, request: Request, seq: Sequence) -> None: ...
