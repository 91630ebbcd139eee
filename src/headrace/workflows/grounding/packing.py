"""Selection of passages within a token budget, in an order that the prefix cache can reuse."""

from collections.abc import Callable, Sequence

from headrace.workflows.grounding.documents import Passage

Count = Callable[[str], int]


def pack(found: Sequence[Passage], budget: int, count: Count) -> list[Passage]:
    """Choose the best passages that fit `budget` tokens together. Returns them in the order of the documents.

    found: passages, the best first; a passage that does not fit is skipped. count: returns the tokens of a shown passage.
    The order does not depend on the question, so prompts with the same passages share their prefix in the cache.
    """
    kept: list[Passage] = []
    for passage in dict.fromkeys(found):
        # Counts with the longest number that the passage can get.
        cost = count(shown(len(found), passage))
        if cost <= budget:
            kept.append(passage)
            budget -= cost
    return sorted(kept)


def shown(number: int, passage: Passage) -> str:
    """Return a passage as the prompt shows it."""
    return f"[{number}] {passage.source}:{passage.line}\n{passage.text}\n\n"
