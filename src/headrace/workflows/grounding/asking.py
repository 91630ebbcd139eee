"""Question answering from an index of documents, and prompts of six input-grounded tasks.

The constant part of each prompt comes first, so the prefix cache can reuse it.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.workflows.grounding.documents import Passage, pack, shown
from headrace.workflows.grounding.retrieval import Index

# Tokens of documents in a prompt.
BUDGET = 1024
Messages = list[dict[str, Any]]

NO_ANSWER = "The documents do not say."


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


def translation(text: str, language: str) -> Messages:
    """Translate a text."""
    return _task(f"Translate the user's text into {language}. Answer with the translation alone.", text)


def summary(text: str, sentences: int = 3) -> Messages:
    """Summarize a text."""
    return _task(f"Summarise the user's text in at most {sentences} sentences. Add nothing that it does not say.", text)


def document_qa(passages: Sequence[Passage], question: str) -> Messages:
    """Answer a question from passages, numbered from 1; the answer cites them as [1]."""
    rules = f'Answer from these documents alone, and cite them as [1]. Where they do not say it, answer "{NO_ANSWER}"'
    documents = "".join(shown(number, passage) for number, passage in enumerate(passages, 1))
    if not documents:
        return _task(rules, question)
    parts = [{"type": "text", "text": f"{rules}\n"}, {"type": "quoted", "text": documents.rstrip()}]
    return [{"role": "system", "content": parts}, {"role": "user", "content": question}]


def chat(turns: Sequence[tuple[str, str]], question: str, system: str = "") -> Messages:
    """Continue a conversation of (user, assistant) pairs with the next question."""
    past = [{"role": role, "content": text} for pair in turns for role, text in zip(("user", "assistant"), pair, strict=True)]
    first = [{"role": "system", "content": system}] if system else []
    return [*first, *past, {"role": "user", "content": question}]


def code_edit(code: str, instruction: str) -> Messages:
    """Edit code by an instruction."""
    rules = "Change the user's code as asked. Answer with the whole changed code alone, and leave the rest as it is."
    return _task(rules, f"```\n{code.rstrip()}\n```\n\n{instruction}")


def transcript(text: str) -> Messages:
    """Clean up the output of a speech recognizer."""
    rules = "Clean up this transcript: punctuation, capitals, paragraphs; leave out fillers and false starts. Change no facts."
    return _task(rules, text)


def _task(rules: str, content: str) -> Messages:
    return [{"role": "system", "content": rules}, {"role": "user", "content": content}]
