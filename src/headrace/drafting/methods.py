"""Speculation by name: which drafters `LLM(speculate=...)` asks for."""

from headrace.drafting.base import Drafter
from headrace.drafting.blocks import Blocks
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.draft_model_kv import Companion
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
    companion: Companion | None = None,
) -> Speculation | None:
    """The speculation a method's name means; None: there is none. Raises ValueError for a name nobody has.

    `auto` is prompt lookup where kernels are row-invariant (`invariant`), so that no output can change, and nothing
    elsewhere; a draft model or trained heads that were given (`companion`) are asked too, everywhere. `draft_tokens` fixes how
    deep drafts are; None: what was measured decides, and 0 is a choice.
    """
    what = "" if companion is None else companion.given
    given = companion.role if companion is not None and what else ""
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
    return Speculation(_drafters(str(method), draft_tokens, companion), max_model_len, draft_tokens)


def _drafters(method: str, most: int | None, companion: Companion | None) -> list[Drafter]:
    match method:
        case "draft" | "heads" | "self" | "blocks" if companion is not None:
            return [_by(companion)]
        case "suffix":
            return [SuffixTree()]
        case "lookahead":
            return [Lookahead(length=LENGTH if most is None else min(LENGTH, most + 1))]  # no deeper, and one drawn behind it
        case "jacobi":
            return [Jacobi()]
        case "auto" if companion is not None:
            return [PromptLookup(), _by(companion)]
        case _:
            return [PromptLookup()]


def _by(companion: Companion) -> Drafter:
    if companion.role == "blocks":
        return Blocks(companion.mask, model=companion.model)
    if companion.kind == "heads":
        return TrainedHeads(companion.count, model=companion.model)
    name, keeps = companion.kind or companion.role, companion.role != "heads"
    return DraftModel(name, model=companion.model, group=companion.group, keeps=keeps)
