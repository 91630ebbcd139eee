"""Questions with several answers of which one is right: whichever a model holds most likely counts as its own."""

import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from headrace.llm import LLM

BATCH = 16  # questions that are scored together
FORMS = (
    '{"question", "choices": {"text", "label"}, "answerKey"} (ARC), {"prompt", "choices", "answer"}, or a line an answer with '
    '{"doc_id", "label", "request": {"context", "continuation"}}'
)


@dataclass(frozen=True, slots=True)
class Question:
    """A text, how it may go on, and which of these is right."""

    context: str
    choices: tuple[str, ...]
    right: int


def read_questions(path: Path, most: int | None = None) -> list[Question]:
    """Of a file of JSON lines, perhaps with gzip, in one of FORMS; `most` at most. Raises ValueError, naming the line."""
    found: list[Question] = []
    for number, lines in _grouped(path):
        if most is not None and len(found) == most:
            break
        try:
            found.append(_question(lines))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise ValueError(f"{path}: line {number} is no question; give JSON lines like {FORMS}") from None
    if not found:
        raise ValueError(f"{path} has no question; give JSON lines like {FORMS}")
    return found


def _grouped(path: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The lines of each question, and the number of the first."""

    def parsed() -> Iterator[tuple[int, dict[str, Any]]]:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    found = json.loads(line)
                except ValueError:
                    found = None
                if not isinstance(found, dict):
                    raise ValueError(f"{path}: line {number} is no question; give JSON lines like {FORMS}")
                yield number, found

    for _, group in groupby(parsed(), key=lambda one: one[1].get("doc_id", one[0])):
        lines = list(group)
        yield lines[0][0], [fields for _, fields in lines]


def _question(lines: Sequence[dict[str, Any]]) -> Question:
    first = lines[0]
    if "request" in first:
        choices = tuple(str(one["request"]["continuation"]) for one in lines)
        return _checked(Question(str(first["request"]["context"]), choices, int(first["label"])))
    if "question" in first:
        texts, labels = first["choices"]["text"], first["choices"]["label"]
        choices, right = tuple(f" {text}" for text in texts), labels.index(first["answerKey"])
        return _checked(Question(f"Question: {first['question']}\nAnswer:", choices, right))
    choices = tuple(f" {text}" for text in first["choices"])
    return _checked(Question(str(first["prompt"]), choices, first["choices"].index(first["answer"])))


def _checked(question: Question) -> Question:
    if len(question.choices) < 2 or not 0 <= question.right < len(question.choices) or not all(question.choices):
        raise ValueError("one answer is none to choose")
    return question


def answered(llm: LLM, questions: Sequence[Question], advance: Callable[[int], None] = lambda count: None) -> list[bool | None]:
    """Whether each is answered right: by the choice with the greatest log-probability for each of its bytes. None where the
    model's context does not hold it. `advance` hears of every batch how many there were."""
    made: list[bool | None] = []
    for at in range(0, len(questions), BATCH):
        some = questions[at : at + BATCH]
        made += _answered(llm, some)
        advance(len(some))
    return made


def _answered(llm: LLM, questions: Sequence[Question]) -> list[bool | None]:
    most = llm.memory_plan.max_model_len
    asked: list[list[tuple[list[int], int]]] = []  # of each choice the tokens, and how many of them are its own
    for question in questions:
        start = len(llm.tokenizer.encode(question.context))
        whole = [llm.tokenizer.encode(question.context + choice) for choice in question.choices]
        asked.append([(tokens, max(len(tokens) - start, 1)) for tokens in whole])
    fits = [all(len(tokens) < most for tokens, _ in each) for each in asked]
    batch = [one for each, fit in zip(asked, fits, strict=True) if fit for one in each]
    starts = [len(tokens) - own for tokens, own in batch]
    scores = iter(llm.score([tokens for tokens, _ in batch], start=starts) if batch else ())
    made: list[bool | None] = []
    for question, each, fit in zip(questions, asked, fits, strict=True):
        if not fit:
            made.append(None)
            continue
        sums = [math.fsum(next(scores).logprobs[-own:]) for _, own in each]
        likely = [total / len(choice.encode()) for total, choice in zip(sums, question.choices, strict=True)]
        made.append(likely.index(max(likely)) == question.right)
    return made


def beside(found: Sequence[bool | None], first: Sequence[bool | None]) -> dict[str, Any]:
    """The share that is right with its standard error, and, of the same questions, what the first model has right and this one
    wrong (`lost`), and the other way round (`gained`). Raises ValueError where the context holds no question."""
    pairs = [(mine, theirs) for mine, theirs in zip(found, first, strict=True) if mine is not None and theirs is not None]
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
