"""Filling in blocks beside decoding token by token, plain and with drafts: right answers, tokens a step and time."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.data.outputs import RequestOutput
from headrace.data.params import ParamError, RefineParams, SamplingParams
from headrace.llm import LLM
from headrace.workflows.prompts import Prompt, lines_of, read_prompts, tokens_of

PLAIN = "token by token"


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt, and the answers that are right, where these are known."""

    prompt: Prompt
    answers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Way:
    """One way of decoding, by an LLM and its settings: `passes` over each `block` of tokens, 0: token by token."""

    name: str
    llm: LLM
    params: SamplingParams
    block: int = 1
    passes: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a way. `right`: the share of answers that are, None where none is known; `agree`: the share of tokens that
    are what as many passes as tokens give; `steps`: of an answer, on average; `tokens_per_step`: of a text's own steps;
    `speed`: beside decoding token by token."""

    way: str
    block: int
    passes: int
    right: float | None
    agree: float
    steps: float
    tokens_per_step: float
    tokens: int
    seconds: float
    speed: float = 1.0


def read_questions(path: Path, most: int | None = None) -> list[Question]:
    """JSON lines with "prompt" (or "messages"), and perhaps "answers" or "answer". Raises ValueError."""
    prompts = read_prompts(path, most)
    lines = [line for line in lines_of(path) if line.strip()]
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


def ways(
    llm: LLM, block: int, passes: Sequence[int], max_tokens: int, shorter: Sequence[int], drafting: Mapping[str, LLM]
) -> list[Way]:
    """Token by token; each number of passes over a block; one pass over each of the `shorter` blocks (semi-autoregressive); and
    token by token with the drafts of LLMs of the same model, by name. Raises ValueError for what cannot be meant."""
    if not passes or any(not 1 <= one <= block for one in passes):
        raise ParamError(f"passes lie between 1 and the block's {block} tokens, not {', '.join(map(str, passes))}")
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    filled = [(block, number) for number in sorted({*passes})] + [(size, 1) for size in shorter if size < block]
    return [
        Way(PLAIN, llm, greedy),
        *(Way(f"{number} of {size}", llm, _params(size, number, max_tokens), size, number) for size, number in filled),
        *(Way(f"{name}, verified", drafts, greedy) for name, drafts in drafting.items()),
    ]


def measure(
    llm: LLM,
    questions: Sequence[Question],
    block: int,
    passes: Sequence[int],
    max_tokens: int,
    rounds: int = 3,
    shorter: Sequence[int] = (),
    drafting: Mapping[str, LLM] = MappingProxyType({}),
) -> list[Measured]:
    """All `ways`, all prompts in one batch; in turns, the fastest of the rounds. Raises ValueError for what cannot be meant."""
    asked = ways(llm, block, passes, max_tokens, shorter, drafting)
    prompts = [tokens_of(llm, question.prompt, chat=False) for question in questions]
    every = llm.generate(prompts, _params(block, block, max_tokens))
    best = dict.fromkeys(asked, float("inf"))
    outputs: dict[Way, list[RequestOutput]] = {}
    for _ in range(rounds):
        for way in asked:
            began = time.perf_counter()
            outputs[way] = way.llm.generate(prompts, way.params)
            best[way] = min(best[way], time.perf_counter() - began)
    rate = _tokens(outputs[asked[0]]) / best[asked[0]]
    made = []
    for way in asked:
        tokens, steps = _tokens(outputs[way]), sum(output.metrics.steps for output in outputs[way])
        right = [one.outputs[0].text.strip() in q.answers for one, q in zip(outputs[way], questions, strict=True) if q.answers]
        made.append(
            Measured(
                way.name,
                way.block,
                way.passes,
                sum(right) / len(right) if right else None,
                _agreement(outputs[way], every),
                steps / len(questions),
                tokens / max(1, steps),
                tokens,
                best[way],
                tokens / best[way] / rate,
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
