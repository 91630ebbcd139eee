"""What drafts beside the target, as drafters need to know it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Companion:
    """A model (`draft`), trained `heads` (of a kind, `count` tokens at once), a part of the target (`self`), or all of
    it, which fills in its `mask` token (`blocks`). `model` is its number in plans, `group` that of its own KV group."""

    role: str
    model: int
    group: int | None = None
    kind: str = ""
    count: int = 0
    mask: int = -1

    @property
    def given(self) -> str:
        """What a caller said to have it; a part of the target is there by the method's name alone."""
        return {"draft": "a draft model was", "heads": "trained heads were"}.get(self.role, "")
