"""Prompts of six input-grounded tasks, whose answer is mainly in the prompt.

The constant part of each prompt comes first, so the prefix cache can reuse it.
"""

from collections.abc import Sequence
from typing import Any

from headrace.workflows.grounding.documents import Passage
from headrace.workflows.grounding.packing import shown

Messages = list[dict[str, Any]]

NO_ANSWER = "The documents do not say."


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
