"""Filling in blocks beside decoding token by token: tokens a step, right answers and time, by passes."""

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.bench.prompts import Prompt, read_prompts, tokens_of
from headrace.data.outputs import RequestOutput
from headrace.data.params import ParamError, RefineParams, SamplingParams
from headrace.llm import LLM

PLAIN = "token by token"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the answers that are right, where these are known."""

    prompt: Prompt
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Measured:
    """One way of decoding. `right`: the share of answers that are, None where none is known; `agree`: the share of tokens that
    are what as many passes as tokens give; `tokens_per_step`: of a text's own steps; `speed`: beside decoding token by
    token."""

    way: str
    passes: int
    right: float | None
    agree: float
    tokens_per_step: float
    tokens: int
    seconds: float
    speed: float = 1.0


def read_questions(path: Path, most: int | None = None) -> list[Question]:
    """JSON lines with "prompt" (or "messages"), and perhaps "answers" or "answer". Raises ValueError."""
    prompts = read_prompts(path, most)
    lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    found = []
    for number, (prompt, line) in enumerate(zip(prompts, lines, strict=False), 1):
        try:
            fields = json.loads(line)
        except ValueError:
            fields = {}
        fields = fields if isinstance(fields, dict) else {}
        answers = fields.get("answers", [fields["answer"]] if "answer" in fields else [])
        if not isinstance(answers, list) or not all(isinstance(one, str) for one in answers):
            raise ValueError(f'question {number}: "answers" is a list of texts')
        found.append(Question(prompt, tuple(answers)))
    return found


def measure(
    llm: LLM, questions: Sequence[Question], block: int, passes: Sequence[int], max_tokens: int, rounds: int = 3
) -> list[Measured]:
    """Each number of passes, and decoding token by token, all prompts in one batch; in turns, the fastest of the rounds. Raises
    ValueError for what cannot be meant."""
    if not passes or any(not 1 <= one <= block for one in passes):
        raise ParamError(f"passes lie between 1 and the block's {block} tokens, not {', '.join(map(str, passes))}")
    ways = {number: _params(block, number, max_tokens) for number in sorted({*passes, block})}
    ways[0] = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    prompts = [tokens_of(llm, question.prompt, chat=False) for question in questions]
    best: dict[int, float] = {}
    outputs: dict[int, list[RequestOutput]] = {}
    for _ in range(rounds):
        for number, params in ways.items():
            began = time.perf_counter()
            outputs[number] = llm.generate(prompts, params)
            best[number] = min(best.get(number, float("inf")), time.perf_counter() - began)
    rate = _tokens(outputs[0]) / best[0]
    made = []
    for number in (0, *sorted({*passes})):
        tokens, steps = _tokens(outputs[number]), sum(output.metrics.steps for output in outputs[number])
        right = [
            one.outputs[0].text.strip() in q.answers for one, q in zip(outputs[number], questions, strict=True) if q.answers
        ]
        made.append(
            Measured(
                PLAIN if number == 0 else f"{number} of {block}",
                number,
                sum(right) / len(right) if right else None,
                _agreement(outputs[number], outputs[block]),
                tokens / max(1, steps),
                tokens,
                best[number],
                tokens / best[number] / rate,
            )
        )
    return made


def figures(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """The same as plain data."""
    return [asdict(one) for one in measured]


def _params(block: int, passes: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(refine=RefineParams(block=block, passes=passes), max_tokens=max_tokens)


def _tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _agreement(mine: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> float:
    """The share of tokens of `theirs` that stand in the same place of `mine`."""
    pairs = [(a.outputs[0].token_ids, b.outputs[0].token_ids) for a, b in zip(mine, theirs, strict=True)]
    same = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    return same / max(1, sum(len(b) for _, b in pairs))
