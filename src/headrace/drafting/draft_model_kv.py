"""The model that drafts for a target, as drafters address it: its number in plans and its KV group."""

from dataclasses import dataclass


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
