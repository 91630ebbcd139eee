"""Multiple-choice accuracy: a model answers with the continuation that has the highest log-probability per byte."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from headrace.bench.questions import ChoiceQuestion
from headrace.llm import LLM

# Questions that are scored together.
BATCH = 16


def answer(
    llm: LLM, questions: Sequence[ChoiceQuestion], advance: Callable[[int], None] = lambda count: None
) -> list[bool | None]:
    """Whether the model answers each question right; None if a question exceeds the model's context.

    advance: called after each batch with its number of questions.
    """
    results: list[bool | None] = []
    for start in range(0, len(questions), BATCH):
        batch = questions[start : start + BATCH]
        results += _answer_batch(llm, batch)
        advance(len(batch))
    return results


def _answer_batch(llm: LLM, questions: Sequence[ChoiceQuestion]) -> list[bool | None]:
    limit = llm.memory_plan.max_model_len
    # For each question and choice: the tokens, and how many of them belong to the choice.
    encoded: list[list[tuple[list[int], int]]] = []
    for question in questions:
        start = len(llm.tokenizer.encode(question.context))
        texts = [llm.tokenizer.encode(question.context + choice) for choice in question.choices]
        encoded.append([(tokens, max(len(tokens) - start, 1)) for tokens in texts])
    fits = [all(len(tokens) < limit for tokens, _ in choices) for choices in encoded]
    scored = [choice for choices, fit in zip(encoded, fits, strict=True) if fit for choice in choices]
    starts = [len(tokens) - own for tokens, own in scored]
    scores = iter(llm.score([tokens for tokens, _ in scored], start=starts) if scored else ())
    results: list[bool | None] = []
    for question, choices, fit in zip(questions, encoded, fits, strict=True):
        if not fit:
            results.append(None)
            continue
        sums = [math.fsum(next(scores).logprobs[-own:]) for _, own in choices]
        likely = [total / len(choice.encode()) for total, choice in zip(sums, question.choices, strict=True)]
        results.append(likely.index(max(likely)) == question.right)
    return results


def compare_answers(results: Sequence[bool | None], first: Sequence[bool | None]) -> dict[str, Any]:
    """Share of right answers with its standard error, compared with the `first` model on the same questions.

    `lost`: share that only the first model answers right; `gained`: share that only this model answers right.
    Raises ValueError if no question fits the context.
    """
    pairs = [(mine, theirs) for mine, theirs in zip(results, first, strict=True) if mine is not None and theirs is not None]
    if not pairs:
        raise ValueError("no question fits the model's context; give shorter ones")
    count = len(pairs)
    right = sum(mine for mine, _ in pairs) / count
    return {
        "questions": count,
        "right": right,
        "error": math.sqrt(right * (1 - right) / count),
        "lost": sum(theirs and not mine for mine, theirs in pairs) / count,
        "gained": sum(mine and not theirs for mine, theirs in pairs) / count,
    }
