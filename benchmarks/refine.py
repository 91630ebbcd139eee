"""Block filling compared with decoding token by token, plain and with drafts: `python -m benchmarks.refine`."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from benchmarks.command import run
from headrace.bench.questions import Question, read_fields
from headrace.cli.opening import open_llm
from headrace.cli.options import ModelName, ModelOptions, writable
from headrace.cli.output import print_table, say
from headrace.data.outputs import RequestOutput
from headrace.data.params import ParamError, RefineParams, SamplingParams
from headrace.llm import LLM
from headrace.workflows.prompts import tokens_of

PLAIN = "token by token"


@dataclass(frozen=True, slots=True)
class RefineMethod:
    """One decoding method: an LLM and parameters, with `passes` over each `block` of tokens (0: token by token)."""

    name: str
    llm: LLM
    params: SamplingParams
    block: int = 1
    passes: int = 0


@dataclass(frozen=True, slots=True)
class RefineFigures:
    """Figures of one method.

    `right`: share of right answers, None if none is known. `agree`: share of tokens equal to those of as many passes as tokens.
    `steps`: mean steps per answer. `tokens_per_step`: in a text's own steps. `speed`: relative to decoding token by token.
    """

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
    """Questions of JSON lines with "prompt" (or "messages"), and perhaps "answers" or "answer". Raises ValueError."""
    questions = []
    for number, prompt, fields in read_fields(path, most):
        answers = fields.get("answers", [fields["answer"]] if "answer" in fields else [])
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise ValueError(f'question {number}: "answers" is a list of texts')
        questions.append(Question(prompt, tuple(answers)))
    return questions


def ways(
    llm: LLM, block: int, passes: Sequence[int], max_tokens: int, shorter: Sequence[int], drafting: Mapping[str, LLM]
) -> list[RefineMethod]:
    """Methods: token by token; each number of passes over a block; one pass over each of the `shorter` blocks
    (semi-autoregressive); token by token with the drafts of LLMs of the same model, by name. Raises ValueError for invalid
    passes."""
    if not passes or any(not 1 <= one <= block for one in passes):
        raise ParamError("passes", f"passes lie between 1 and the block's {block} tokens, not {', '.join(map(str, passes))}")
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    filled = [(block, number) for number in sorted({*passes})] + [(size, 1) for size in shorter if size < block]
    return [
        RefineMethod(PLAIN, llm, greedy),
        *(RefineMethod(f"{number} of {size}", llm, _params(size, number, max_tokens), size, number) for size, number in filled),
        *(RefineMethod(f"{name}, verified", drafts, greedy) for name, drafts in drafting.items()),
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
) -> list[RefineFigures]:
    """Run all methods in alternation, all prompts in one batch; the fastest round counts. Raises ValueError."""
    asked = ways(llm, block, passes, max_tokens, shorter, drafting)
    prompts = [tokens_of(llm, question.prompt, chat=False) for question in questions]
    every = llm.generate(prompts, _params(block, block, max_tokens))
    best = dict.fromkeys(asked, float("inf"))
    outputs: dict[RefineMethod, list[RequestOutput]] = {}
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
            RefineFigures(
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


def figures(measured: Sequence[RefineFigures]) -> list[dict[str, Any]]:
    """Figures for the JSON file."""
    return [asdict(one) for one in measured]


def _params(block: int, passes: int, max_tokens: int) -> SamplingParams:
    return SamplingParams(refine=RefineParams(block=block, passes=passes), max_tokens=max_tokens)


def _tokens(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def _agreement(mine: Sequence[RequestOutput], theirs: Sequence[RequestOutput]) -> float:
    """Share of the tokens of `theirs` that `mine` has at the same position."""
    pairs = [(a.outputs[0].token_ids, b.outputs[0].token_ids) for a, b in zip(mine, theirs, strict=True)]
    same = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    return same / max(1, sum(len(b) for _, b in pairs))


MOST_DRAFTED = 16
DRAFTERS: dict[str, tuple[str, ...]] = {
    "both": ("jacobi", "blocks"),
    "jacobi": ("jacobi",),
    "blocks": ("blocks",),
    "none": (),
}


def refine(
    model: ModelName,
    source: Annotated[
        Path,
        typer.Option(
            "--input", "-i", exists=True, dir_okay=False, help='JSON lines: "prompt", perhaps "answers" (or "answer").'
        ),
    ],
    block: Annotated[int, typer.Option(min=1, max=64, help="Tokens of a block.")] = 8,
    passes: Annotated[str, typer.Option(help="Passes over a block, as in 1,2,4,8.")] = "1,2,4,8",
    shorter: Annotated[str, typer.Option(help="Shorter blocks, filled in by one pass each: semi-autoregressive.")] = "4,2",
    drafts: Annotated[str, typer.Option(help="What drafts beside plain decoding: jacobi, blocks, both or none.")] = "both",
    most: Annotated[int | None, typer.Option(min=1, help="Only so many prompts.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens of an answer at most.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Of which the fastest counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Filling in blocks beside decoding token by token: tokens a step, right answers and time, by passes.

    A model with a mask token is needed: headrace train-masked makes small ones. Drafts are of the same model, by Jacobi's
    iteration and by open blocks, and verified: the answers are those of plain decoding.
    """
    numbers, sizes, drafters = _numbers("--passes", passes), _numbers("--shorter", shorter), _drafters(drafts)
    questions = read_questions(source, most)
    llm = open_llm(model, ModelOptions(threads=threads, speculate="off"))
    if llm.model_config.mask_id is None:
        raise ValueError(f"{model} has no mask token, so it fills in no blocks; headrace train-masked makes models that do")
    deep = min(block, MOST_DRAFTED)
    drafting = {
        name: open_llm(model, ModelOptions(threads=threads, speculate=name, draft_tokens=deep), quiet=True) for name in drafters
    }
    measured = measure(llm, questions, block, numbers, max_tokens, rounds, sizes, drafting)
    for each in (llm, *drafting.values()):
        each.close()
    if json_file is not None:
        json_file.write_text(json.dumps(figures(measured), indent=2) + "\n", "utf-8")
    rows = [
        (
            *(one.way, "-" if one.right is None else f"{one.right:.1%}", f"{one.agree:.1%}"),
            *(f"{one.steps:.1f}", f"{one.tokens_per_step:.2f}", f"{one.speed:.2f}"),
        )
        for one in measured
    ]
    print_table(("passes", "right", f"as {block} passes", "steps", "tokens a step", "speed"), rows)
    say(f"{len(questions)} prompts in one batch; a block's causal pass, which keeps its tokens, counts as a step")
    if "blocks" in drafters:
        say("blocks that are verified take an open pass beside each step, which does not count")


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",") if one.strip()]
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers, as in 1,2,4,8, not {text!r}") from None


def _drafters(name: str) -> tuple[str, ...]:
    if name not in DRAFTERS:
        raise typer.BadParameter(f"--drafts takes {', '.join(DRAFTERS)}, not {name!r}")
    return DRAFTERS[name]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    examples = (("numbers -i numbers/prompts.jsonl", "A model of headrace train-masked, by passes."),)
    return run(refine, "refine", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
