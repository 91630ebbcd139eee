"""Speculation by name: which drafters `LLM(speculate=...)` asks for."""

from headrace.drafting.base import Drafter
from headrace.drafting.draft_model import DraftModel
from headrace.drafting.heads import TrainedHeads
from headrace.drafting.lookahead import LENGTH, Jacobi, Lookahead
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.drafting.suffix import SuffixTree

METHODS = ("auto", "ngram", "suffix", "lookahead", "jacobi", "draft", "heads", "self")
OFF = (None, "off", "none")


def speculation(
    method: str | None,
    invariant: bool,
    max_model_len: int,
    draft_tokens: int | None = None,
    companion: bool = False,
    heads: tuple[str, int] | None = None,
) -> Speculation | None:
    """The speculation a method's name means; None: there is none. Raises ValueError for a name nobody has.

    `auto` is prompt lookup where kernels are row-invariant (`invariant`), so that no output can change, and nothing
    elsewhere; a draft model that was given (`companion`), or trained `heads` (kind, tokens at once), is asked too, everywhere.
    `draft_tokens` fixes how deep drafts are; None: what was measured decides, and 0 is a choice.
    """
    given = "heads" if heads is not None else "draft" if companion else ""
    what = "trained heads were" if heads is not None else "a draft model was"
    if method in OFF and given:
        raise ValueError(f"{what} given and speculation is off; leave one of the two out")
    if method in OFF or (method == "auto" and not invariant and not given):
        return None
    if method not in METHODS:
        raise ValueError(f"unknown speculation {method!r}; use {', '.join(METHODS)} or off")
    if draft_tokens is not None and not 1 <= draft_tokens <= 16:
        raise ValueError(f"draft_tokens must be between 1 and 16, not {draft_tokens}")
    if method == "draft" and not companion:
        raise ValueError("speculation by a draft model needs one; name it with draft (--draft)")
    if method == "heads" and heads is None:
        raise ValueError("speculation by heads needs trained ones; name their folder with draft (--draft)")
    if given and method not in ("auto", given):
        raise ValueError(f"{what} given and {method} does not use that; choose auto or {given}, or leave it out")
    return Speculation(_drafters(str(method), draft_tokens, companion, heads), max_model_len, draft_tokens)


def _drafters(method: str, most: int | None, companion: bool, heads: tuple[str, int] | None) -> list[Drafter]:
    match method:
        case "heads" | "auto" if heads is not None:
            kind, count = heads
            trained: Drafter = TrainedHeads(count) if kind == "heads" else DraftModel("feature", keeps=False)
            return [trained] if method == "heads" else [PromptLookup(), trained]
        case "draft":
            return [DraftModel()]
        case "self":  # a part of the target, as the back end has been told: it takes the draft's place
            return [DraftModel("self", group=None)]
        case "suffix":
            return [SuffixTree()]
        case "lookahead":
            return [Lookahead(length=LENGTH if most is None else min(LENGTH, most + 1))]  # no deeper, and one drawn behind it
        case "jacobi":
            return [Jacobi()]
        case "auto" if companion:
            return [PromptLookup(), DraftModel()]
        case _:
            return [PromptLookup()]
