"""Questions with known answers, read from files of JSON lines: free answers, and multiple choice."""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from headrace.workflows.prompts import Prompt, lines_of, read_prompts

CHOICE_FORMS = (
    '{"question", "choices": {"text", "label"}, "answerKey"} (ARC), {"prompt", "choices", "answer"}, or a line an answer with '
    '{"doc_id", "label", "request": {"context", "continuation"}}'
)


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
        raise ValueError("one answer is none to choose")
    return question
