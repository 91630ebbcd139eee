"""Questions with known answers, from files of JSON lines: free answers, and multiple choice with its accuracy.

In multiple choice, a model answers with the continuation that has the highest log-probability per byte.
"""

import gzip
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from headrace.llm import LLM
from headrace.stats.paired_ratio import mcnemar
from headrace.workflows.prompts import Prompt, lines_of, read_prompts

CHOICE_FORMS = (
    '{"question", "choices": {"text", "label"}, "answerKey"} (ARC), {"prompt", "choices", "answer"}, or a line an answer with '
    '{"doc_id", "label", "request": {"context", "continuation"}}'
)
# Questions that are scored together.
BATCH = 16


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt with its accepted answers (none if unknown), and the texts to choose the answer from, if any."""

    prompt: Prompt
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceQuestion:
    """A context, its possible continuations, and the index of the right one."""

    context: str
    choices: tuple[str, ...]
    right: int


def read_fields(path: Path, most: int | None = None) -> Iterator[tuple[int, Prompt, dict[str, Any]]]:
    """Number, prompt and JSON fields of each question of a file; a line of plain text has no fields. Raises ValueError."""
    prompts = read_prompts(path, most)
    lines = [line for line in lines_of(path) if line.strip()]
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=False), 1):
        try:
            fields = json.loads(line)
        except ValueError:
            fields = {}
        yield number, prompt, fields if isinstance(fields, dict) else {}


def read_questions(path: Path, most: int | None = None) -> list[Question]:
    """Questions of JSON lines with "prompt" (or "messages"), "answer", and perhaps "choices". Raises ValueError."""
    questions = []
    for number, prompt, fields in read_fields(path, most):
        answer, choices = fields.get("answer"), fields.get("choices") or ()
        if not isinstance(answer, str | int) or (choices and str(answer) not in choices):
            raise ValueError(f'question {number} has no "answer" that is a text' + (", one of its choices" if choices else ""))
        questions.append(Question(prompt, (str(answer),), tuple(choices)))
    return questions


def read_choice_questions(path: Path, most: int | None = None) -> list[ChoiceQuestion]:
    """Questions of a file of JSON lines, perhaps gzip, in one of CHOICE_FORMS. Raises ValueError with the line's number."""
    questions: list[ChoiceQuestion] = []
    for number, lines in _grouped(path):
        if most is not None and len(questions) == most:
            break
        try:
            questions.append(_choice_question(lines))
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            raise ValueError(f"{path}: line {number} is not a question; give JSON lines like {CHOICE_FORMS}") from None
    if not questions:
        raise ValueError(f"{path} has no question; give JSON lines like {CHOICE_FORMS}")
    return questions


def _grouped(path: Path) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Number of the first line, and all lines, of each question; lines with the same `doc_id` are one question."""
    for _, group in groupby(_parsed(path), key=lambda line: line[1].get("doc_id", line[0])):
        lines = list(group)
        yield lines[0][0], [fields for _, fields in lines]


def _parsed(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
            except ValueError:
                fields = None
            if not isinstance(fields, dict):
                raise ValueError(f"{path}: line {number} is not a question; give JSON lines like {CHOICE_FORMS}")
            yield number, fields


def _choice_question(lines: Sequence[dict[str, Any]]) -> ChoiceQuestion:
    first = lines[0]
    if "request" in first:
        choices = tuple(str(line["request"]["continuation"]) for line in lines)
        question = ChoiceQuestion(str(first["request"]["context"]), choices, int(first["label"]))
    elif "question" in first:
        texts, labels = first["choices"]["text"], first["choices"]["label"]
        choices, right = tuple(f" {text}" for text in texts), labels.index(first["answerKey"])
        question = ChoiceQuestion(f"Question: {first['question']}\nAnswer:", choices, right)
    else:
        choices = tuple(f" {text}" for text in first["choices"])
        question = ChoiceQuestion(str(first["prompt"]), choices, first["choices"].index(first["answer"]))
    if len(choices) < 2 or not 0 <= question.right < len(choices) or not all(choices):
        raise ValueError("choosing needs at least two answers")
    return question


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

    `lost`: share that only the first model answers right; `gained`: share that only this model answers right; `p`: p-value of
    equal chances of both.
    Raises ValueError if no question fits the context.
    """
    pairs = [(mine, theirs) for mine, theirs in zip(results, first, strict=True) if mine is not None and theirs is not None]
    if not pairs:
        raise ValueError("no question fits the model's context; give shorter ones")
    count = len(pairs)
    right = sum(mine for mine, _ in pairs) / count
    lost, gained = (sum(one and not other for one, other in some) for some in ([pair[::-1] for pair in pairs], pairs))
    return {
        "questions": count,
        "right": right,
        "error": math.sqrt(right * (1 - right) / count),
        "lost": lost / count,
        "gained": gained / count,
        "p": mcnemar(lost, gained),
    }
