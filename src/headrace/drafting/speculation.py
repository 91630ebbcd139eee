"""Speculation as the engine sees it: who drafts for which sequence, and how far."""

from headrace.drafting.base import Drafter, Fed, Filled, Fills, Run
from headrace.types import MAX_NODES, Draft, Request, Sequence


class Speculation:
    """Asks a drafter for each sequence that may carry a draft."""

    def __init__(self, drafter: Drafter, max_model_len: int, gamma: int = 8) -> None:
        self.drafter = drafter
        self.max_model_len = max_model_len
        self.gamma = gamma

    def serves(self, request: Request) -> bool:
        """Whether a request's sequences may carry drafts: its strategy can verify them, and no processor must see every
        token in order."""
        return bool(request.strategy.speculates) and all(processor.scope != "stateful" for processor in request.processors)

    def draft(self, request: Request, seq: Sequence) -> Draft | None:
        """What the next step verifies. The step adds a token of its own, so a draft ends one before the output must."""
        drawn = len(seq.tokens) - seq.prompt_len
        if drawn == 0 and request.width > 1:  # the prompt's sequence becomes several: none can follow a draft
            return None
        left = self.max_model_len - len(seq.tokens)
        if request.params.max_tokens is not None:
            left = min(left, request.params.max_tokens - drawn)
        most = min(self.gamma, left - 1, MAX_NODES)
        draft = self.drafter.draft(request, seq, most) if most > 0 else None
        if draft is not None and seq.constraint is not None:
            draft = prune(draft, seq.constraint.fitting(draft.tokens, draft.parents))
        return draft

    def fill(self, works: list[Fed], run: Run, filled: Filled) -> None:
        """The drafts of these works have their room: a drafter that runs a model now fills them."""
        if works and isinstance(self.drafter, Fills):
            self.drafter.fill(works, run, filled)


def prune(draft: Draft, fits: list[bool]) -> Draft | None:
    """The nodes that fit; where one does not, nothing below it does. None: nothing is left."""
    kept = [node for node, fit in enumerate(fits) if fit]
    place = {node: at for at, node in enumerate(kept)} | {-1: -1}
    tokens, parents = [draft.tokens[node] for node in kept], [place[draft.parents[node]] for node in kept]
    q = None if draft.q is None else [draft.q[node] for node in kept]
    return Draft(tokens, parents, draft.required, q) if kept else None
