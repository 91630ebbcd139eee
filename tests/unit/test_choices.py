"""Questions with several answers: read in three forms, answered by what a model holds most likely."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.questions import ChoiceQuestion, answer, compare_answers, read_choice_questions
from headrace.llm import LLM
from tests.tiny_files import write_tiny_gguf

ARC = {"question": "Which is wet?", "choices": {"text": ["fire", "water"], "label": ["A", "B"]}, "answerKey": "B"}
PLAIN = {"prompt": "The water is", "choices": ["dry", "wet", "old"], "answer": "wet"}


def request(question: int, continuation: str) -> dict[str, Any]:
    return {"doc_id": question, "label": 1, "request": {"context": f"{question}?", "continuation": continuation}}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_three_forms_are_read(tmp_path: Path) -> None:
    assert read_choice_questions(write(tmp_path / "a.jsonl", ARC, PLAIN)) == [
        ChoiceQuestion("Question: Which is wet?\nAnswer:", (" fire", " water"), 1),
        ChoiceQuestion("The water is", (" dry", " wet", " old"), 1),
    ]
    lines = [request(number, text) for number in (4, 5) for text in (" A", " B", " C")]
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(write(tmp_path / "b", *lines).read_bytes()))
    assert read_choice_questions(packed) == [ChoiceQuestion(f"{number}?", (" A", " B", " C"), 1) for number in (4, 5)]
    assert len(read_choice_questions(packed, 1)) == 1


@pytest.mark.parametrize(
    "line",
    [
        *({}, [], "text", {**ARC, "answerKey": "C"}, {**PLAIN, "answer": "cold"}, {**PLAIN, "choices": ["wet"]}),
        {"doc_id": 0, "label": 1, "request": {"context": "?", "continuation": " A"}},
    ],
)
def test_an_invalid_question_is_a_one_line_error(line: object, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ARC, line)
    with pytest.raises(ValueError, match=re.escape(f"{path}: line 2 is not a question; give JSON lines like")) as found:
        read_choice_questions(path)
    assert "\n" not in str(found.value)
    with pytest.raises(ValueError, match="has no question"):
        read_choice_questions(write(tmp_path / "empty.jsonl"))


def test_the_likeliest_choice_counts(tmp_path: Path) -> None:
    """By each byte, as by hand; a text that no context holds is no answer. The control: sums that are not divided."""
    llm = LLM(write_tiny_gguf(tmp_path / "tiny.gguf"), backend="torch", dtype="float32", max_model_len=64, threads=1)
    context, choices = "the water of", (" a", " the river that runs by the house", " x y")

    def total(choice: str) -> float:
        return llm.score(context + choice)[0].total - llm.score(context)[0].total

    each = [total(choice) / len(choice) for choice in choices]
    best = each.index(max(each))
    questions = [ChoiceQuestion(context, choices, right) for right in range(3)]
    found = answer(llm, [*questions, ChoiceQuestion("word " * 80, choices, 0)])
    assert found == [*(right == best for right in range(3)), None]
    sums = [total(choice) for choice in choices]
    assert sums.index(max(sums)) != best


def test_shares_are_of_questions_that_both_answered() -> None:
    told = compare_answers([True, True, False, None, False], [True, False, True, True, False])
    assert (told["questions"], told["right"], told["lost"], told["gained"]) == (4, 0.5, 0.25, 0.25)
    assert told["error"] == pytest.approx(0.25)
    with pytest.raises(ValueError, match="no question fits the model's context"):
        compare_answers([None], [None])
