"""Self-consistency: sample several answers and return the most frequent one.

Source: Wang et al., arXiv 2203.11171.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.data.outputs import RequestOutput
from headrace.data.params import SamplingParams
from headrace.llm import LLM, Prompt

Extractor = Callable[[str], str | None]

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Vote:
    """The winning answer (None if no output has one), its votes, the number of outputs with an answer, and all outputs."""

    answer: str | None
    votes: int
    answered: int
    output: RequestOutput


def last_number(text: str) -> str | None:
    """Return the number after "####" if there is such a mark, otherwise the last number; without commas or trailing zeros."""
    _, mark, marked = text.rpartition("####")
    numbers = NUMBER.findall(marked if mark else text)
    if not numbers:
        return None
    number = (numbers[0] if mark else numbers[-1]).replace(",", "").lstrip("+")
    return number.rstrip("0").rstrip(".") if "." in number else number


def majority(answers: Iterable[str | None]) -> tuple[str | None, int]:
    """Return the most frequent answer and its votes; ties go to the first. None is an abstention."""
    counted = Counter(answer for answer in answers if answer is not None)
    return counted.most_common(1)[0] if counted else (None, 0)


def self_consistency(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, extract: Extractor = last_number
) -> list[Vote]:
    """Return one vote per prompt among its `params.n` outputs, which share the prompt's K/V blocks.

    Raises ValueError if all outputs would be the same: n of 1, or greedy decoding.
    """
    if params.n < 2 or params.greedy:
        raise ValueError("self-consistency needs several different outputs; set n to 2 or more, and a temperature above 0")
    votes = []
    for output in llm.generate(list(prompts), params):
        answers = [extract(choice.text) for choice in output.outputs]
        winner, count = majority(answers)
        votes.append(Vote(winner, count, sum(answer is not None for answer in answers), output))
    return votes
