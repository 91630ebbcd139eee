"""Question answering from an index of documents."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.workflows.grounding.documents import Passage
from headrace.workflows.grounding.packing import pack
from headrace.workflows.grounding.retrieval import Index
from headrace.workflows.grounding.tasks import document_qa

# Tokens of documents in a prompt.
BUDGET = 1024


@dataclass(frozen=True, slots=True)
class Answer:
    """A question, its passages in the order of their numbers, and the request's output, which grows with each step."""

    question: str
    passages: list[Passage]
    output: RequestOutput

    @property
    def text(self) -> str:
        """The answer so far."""
        return self.output.outputs[0].text

    @property
    def cited(self) -> list[Passage]:
        """The passages whose numbers the answer cites."""
        numbers = dict.fromkeys(int(number) for number in re.findall(r"\[(\d{1,4})\]", self.text))
        return [self.passages[number - 1] for number in numbers if 1 <= number <= len(self.passages)]


def ask(
    llm: LLM, index: Index, questions: Sequence[str], params: SamplingParams, *, budget: int = BUDGET, most: int = 8
) -> list[Answer]:
    """Answer each question from up to `most` passages of at most `budget` tokens together.

    Raises ValueError if a request fails, and TemplateError without a chat template.
    """
    answers = begin(llm, index, questions, params, budget=budget, most=most)
    for answer in answers:
        for _ in follow(llm, answer):
            pass
    return answers


def begin(
    llm: LLM,
    index: Index,
    questions: Sequence[str],
    params: SamplingParams,
    *,
    budget: int = BUDGET,
    most: int = 8,
    chat_template: str | None = None,
) -> list[Answer]:
    """Queue the requests of all questions. Returns answers that are still empty; `follow` runs them in one batch.

    chat_template: as in `LLM.render`.
    """

    def count(text: str) -> int:
        return len(llm.tokenizer.encode(text, parse_special=False))

    retrieved = [pack(index.search(question, most), budget, count) for question in questions]
    talks = [document_qa(passages, question) for question, passages in zip(questions, retrieved, strict=True)]
    outputs = [llm.add(llm.render(talk, chat_template=chat_template), params) for talk in talks]
    return [Answer(*parts) for parts in zip(questions, retrieved, outputs, strict=True)]


def follow(llm: LLM, answer: Answer) -> Iterator[str]:
    """Yield the text of an answer as it grows, to its end. Raises ValueError if its request fails."""
    shown = 0
    while True:
        finished, text = answer.output.finished, answer.text
        if len(text) > shown:
            yield text[shown:]
            shown = len(text)
        if finished:
            break
        llm.step()
    if answer.output.error is not None:
        raise ValueError(answer.output.error)


def hit_rate(answers: Sequence[Answer]) -> float:
    """Return the share of prompt tokens that came from the prefix cache."""
    prompts = sum(len(answer.output.prompt_token_ids) for answer in answers)
    return sum(answer.output.metrics.cached_tokens for answer in answers) / prompts if prompts else 0.0
