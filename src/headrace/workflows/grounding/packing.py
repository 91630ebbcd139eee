"""What of the found passages fits the budget, in an order in which the prefix cache hits."""

from collections.abc import Callable, Sequence

from headrace.workflows.grounding.documents import Passage

Count = Callable[[str], int]


def pack(found: Sequence[Passage], budget: int, count: Count) -> list[Passage]:
    """Of passages, best first, the best that fit `budget` tokens together, in the order of the documents.

    The order does not depend on the question: two questions that are answered from the same passages have the same prompt up
    to the question, whose K and V the prefix cache then has. A passage that does not fit is left out, and smaller ones after
    it may come. `count`: tokens of a passage as it is shown.
    """
    kept: list[Passage] = []
    for passage in dict.fromkeys(found):
        cost = count(shown(len(found), passage))  # the longest its number can make it
        if cost <= budget:
            kept.append(passage)
            budget -= cost
    return sorted(kept)


def shown(number: int, passage: Passage) -> str:
    """A passage as the model sees it."""
    return f"[{number}] {passage.source}:{passage.line}\n{passage.text}\n\n"
