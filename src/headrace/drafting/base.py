"""Interfaces of drafters. A drafter proposes the next tokens of a sequence; the target verifies them all in one step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headrace.data.plan import Answer, Answers, Feed
from headrace.data.types import Draft, Request, Sequence

# Runs feeds of one model (StepPlan.model) and returns the answers of each.
RunModel = Callable[[int, list[Feed]], list[Answers]]
# Reports that a KV group of a sequence has new K/V from a KV index on: (sequence, group, index).
MarkFilled = Callable[[Sequence, int, int], None]
# Tokens of texts that a drafter reads in one step (about 4 microseconds each), and of each text once these are used up.
READ_TOKENS, READ_EACH = 2048, 64


class Drafter(Protocol):
    """Proposes drafts. A wrong draft costs time and never changes an output.

    A drafter keeps what it knows of a sequence in `seq.decode.memory[name]`, which is empty for a new sequence and for a fork.
    """

    name: str

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        """A chain or tree below the last known token of `seq`; None: no proposal. Nodes deeper than `most`, or beyond
        MAX_NODES, are cut off."""


def check_draft(draft: Draft, vocab_size: int) -> None:
    """Raise ValueError for a draft that no step can feed."""
    if draft.tokens and not 0 <= min(draft.tokens) <= max(draft.tokens) < vocab_size:
        raise ValueError(f"a drafted token is not in the vocabulary (0 to {vocab_size - 1})")
    if len(draft.parents) != len(draft.tokens) or not all(-1 <= up < at for at, up in enumerate(draft.parents)):
        raise ValueError("a draft names the parent of each node, -1 or an earlier node")


class TargetFeed(Protocol):
    """One feed of the target's plan, with its request and sequence."""

    request: Request
    seq: Sequence
    feed: Feed


@runtime_checkable
class ModelDrafter(Protocol):
    """A drafter that runs a model. Its `draft` only reserves room; `propose_tokens` replaces the tokens of all sequences
    together, once the scheduler has found blocks for them."""

    def lag(self, seq: Sequence) -> int:
        """Known tokens of a sequence that the model reads before it drafts, at least 1."""

    def propose_tokens(self, targets: list[TargetFeed], run: RunModel, mark_filled: MarkFilled) -> None:
        """Replace the tokens of these targets' drafts and feeds, by as many as there is room for or fewer. Slots, block tables
        and pools are as the target's step will see them."""


@runtime_checkable
class Observes(Protocol):
    """A drafter that learns from the target's answers to its drafts; it marks them `observed`."""

    def observe(self, request: Request, seq: Sequence, draft: Draft, path: tuple[int, ...], nodes: tuple[Answer, ...]) -> None:
        """A draft of this drafter was verified. path: the accepted nodes. nodes: the target's token after each node (Drawn, or
        Failed if the grammar allows none). A tree that was cut has fewer nodes than `draft.memo` has entries."""


@runtime_checkable
class Reads(Protocol):
    """A drafter that reads texts, bounded by READ_TOKENS a step so that no step waits for a long text."""

    def begin(self) -> None:
        """Begin a step."""


@runtime_checkable
class Remembers(Protocol):
    """A drafter that learns from finished outputs."""

    def remember(self, request: Request, seq: Sequence) -> None: ...


@dataclass(frozen=True, slots=True)
class DraftSource:
    """The source of drafts for a target: a draft model (role `draft`), trained heads (`heads`), a part of the target (`self`),
    or the full target, which fills in masks (`blocks`).

    model: its number in plans (StepPlan.model). group: its own KV group, if it has one. kind, count: of trained heads, and how
    many tokens they draft at once. mask: id of the mask token (`blocks`).
    """

    role: str
    model: int
    group: int | None = None
    kind: str = ""
    count: int = 0
    mask: int = -1

    @property
    def given(self) -> str:
        """The start of an error message about an argument that the caller gave; empty for a part of the target."""
        return {"draft": "a draft model was", "heads": "trained heads were"}.get(self.role, "")
