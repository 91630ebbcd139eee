"""Speculation by name: the drafters of `LLM(speculate=...)`."""

from headrace.drafting.base import Drafter, DraftSource
from headrace.drafting.blocks import Blocks
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.heads import TrainedHeads
from headrace.drafting.lookahead import LENGTH, Jacobi, Lookahead
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.drafting.suffix import SuffixTree

METHODS = ("auto", "ngram", "suffix", "lookahead", "jacobi", "draft", "heads", "self", "blocks")
OFF = (None, "off", "none")


def check_speculation(method: str | None, draft_tokens: int | None) -> None:
    """Raises ValueError for an unknown method or a depth out of range."""
    if method not in METHODS and method not in OFF:
        raise ValueError(f"unknown speculation {method!r}; use {', '.join(METHODS)} or off")
    if draft_tokens is not None and not 1 <= draft_tokens <= 16:
        raise ValueError(f"draft_tokens must be between 1 and 16, not {draft_tokens}")


def speculation(
    method: str | None,
    invariant: bool,
    max_model_len: int,
    draft_tokens: int | None = None,
    source: DraftSource | None = None,
) -> Speculation | None:
    """Build the speculation of a method; None: no drafts. Raises ValueError for a method that is unknown or lacks its model.

    invariant: a row's result does not depend on the other rows of a step, so drafts cannot change an output. `auto` uses prompt
    lookup then, and no drafts otherwise; it uses a given draft model or trained heads (`source`) in any case.
    draft_tokens: the fixed depth of drafts; None: the drafting policy decides.
    """
    what = "" if source is None else source.given
    given = source.role if source is not None and what else ""
    if method in OFF and given:
        raise ValueError(f"{what} given and speculation is off; leave one of the two out")
    if method in OFF or (method == "auto" and not invariant and not given):
        return None
    check_speculation(method, draft_tokens)
    if given and method not in ("auto", given):
        raise ValueError(f"{what} given and {method} does not use that; choose auto or {given}, or leave it out")
    if method == "draft" and not given:
        raise ValueError("speculation by a draft model needs one; name it with draft (--draft)")
    if method == "heads" and not given:
        raise ValueError("speculation by heads needs trained ones; name their folder with draft (--draft)")
    return Speculation(_drafters(str(method), draft_tokens, source), max_model_len, draft_tokens)


def _drafters(method: str, most: int | None, source: DraftSource | None) -> list[Drafter]:
    match method:
        case "draft" | "heads" | "self" | "blocks" if source is not None:
            return [_model_drafter(source)]
        case "suffix":
            return [SuffixTree()]
        case "lookahead":
            # An n-gram's first token is known and its last one is drawn by the target, so drafts are no deeper than `most`.
            return [Lookahead(length=LENGTH if most is None else min(LENGTH, most + 1))]
        case "jacobi":
            return [Jacobi()]
        case "auto" if source is not None:
            return [PromptLookup(), _model_drafter(source)]
        case _:
            return [PromptLookup()]


def _model_drafter(source: DraftSource) -> Drafter:
    if source.role == "blocks":
        return Blocks(source.mask, model=source.model)
    if source.kind == "heads":
        return TrainedHeads(source.count, model=source.model)
    return DraftModel(source.role, model=source.model, group=source.group, keeps=source.role != "heads")
