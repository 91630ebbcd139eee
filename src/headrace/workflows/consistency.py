"""Self-consistency: answer several times, and take the answer most outputs agree on (Wang et al., 2023)."""

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
    """The winning answer (None where no output has one), its votes, how many outputs had an answer, and the outputs."""

    answer: str | None
    votes: int
    answered: int
    output: RequestOutput


def last_number(text: str) -> str | None:
    """The last number of a text, or that after "####" where it is marked so: no commas, no trailing zeros."""
    _, mark, marked = text.rpartition("####")
    found = NUMBER.findall(marked if mark else text)
    if not found:
        return None
    number = (found[0] if mark else found[-1]).replace(",", "").lstrip("+")
    return number.rstrip("0").rstrip(".") if "." in number else number


def majority(answers: Iterable[str | None]) -> tuple[str | None, int]:
    """The commonest answer and its votes, of equals the one given first; abstentions (None) do not count."""
    counted = Counter(answer for answer in answers if answer is not None)
    return counted.most_common(1)[0] if counted else (None, 0)


def self_consistency(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, extract: Extractor = last_number
) -> list[Vote]:
    """One vote per prompt among its `params.n` outputs, which share the prompt's blocks.

    Raises ValueError where all outputs would be the same one: n of 1, or a greedy draw.
    """
    if params.n < 2 or params.greedy:
        raise ValueError("self-consistency needs several different outputs; set n to 2 or more, and a temperature above 0")
    votes = []
    for output in llm.generate(list(prompts), params):
        answers = [extract(one.text) for one in output.outputs]
        winner, count = majority(answers)
        votes.append(Vote(winner, count, sum(answer is not None for answer in answers), output))
    return votes
