"""What a student learns from: windows of texts, what its teacher writes, or answers with the reasons for them."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.text.tokenizer import Tokenizer

TOGETHER = 16  # prompts that are answered at once
LABEL, REASON = "[label] ", "[rationale] "  # what a prompt begins with, by what is asked of it
FIELDS = ("prompt", "rationale", "answer")


@dataclass(frozen=True, slots=True)
class Example:
    """A text of which tokens from `first` (1 at least) on are learned, and those before are given: a mean over them, counted
    `weight` times."""

    tokens: list[int]
    first: int = 1
    weight: float = 1.0

    @property
    def given(self) -> list[int]:
        """What one may go on from: the prompt, or half of a text that has none."""
        return self.tokens[: self.first if self.first > 1 else len(self.tokens) // 2]


Item = tuple[Example, ...]  # what counts as one: a text, or an answer and the reason for it


def windows(texts: Sequence[list[int]]) -> list[Item]:
    """Texts of which everything is learned."""
    return [(Example(text),) for text in texts]


def answered(llm: LLM, prompts: Sequence[list[int]], most: int, tell: Callable[[int], None] = lambda count: None) -> list[Item]:
    """Prompts with what the model answers, greedily, as the one to learn from (sequence-level distillation, Kim & Rush 2016,
    who take the best of a beam). Raises RuntimeError where an answer failed."""
    items: list[Item] = []
    for at in range(0, len(prompts), TOGETHER):
        outputs = llm.generate(prompts[at : at + TOGETHER], SamplingParams(temperature=0.0, max_tokens=most))
        if failed := next((output.error for output in outputs if output.error), None):
            raise RuntimeError(f"an answer to learn from failed: {failed}")
        for output in outputs:
            items += example(output.prompt_token_ids, output.outputs[0].token_ids)
        tell(len(outputs))
    return items


def example(prompt: list[int], answer: list[int], weight: float = 1.0) -> list[Item]:
    """An answer to a prompt; none where it has no token."""
    return [(Example([*prompt, *answer], len(prompt), weight),)] if prompt and answer else []


def reasoned(path: Path, tokenizer: Tokenizer, ends: int | None, weight: float, most: int) -> list[Item]:
    """Of each line {"prompt", "rationale", "answer"} two texts of `most` tokens at most: the prompt after "[label] " with the
    answer, and after "[rationale] " with the reason, counted `weight` times (Distilling Step-by-Step, Hsieh et al. 2023).

    Raises ValueError, naming the line.
    """
    items: list[Item] = []
    start = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt, reason, answer = _fields(line, f"{path}, line {number}")
        both: list[Example] = []
        for task, text, counts in ((LABEL, answer, 1.0), (REASON, reason, weight)):
            asked = start + tokenizer.encode(task + prompt, add_special=False, parse_special=False)
            target = tokenizer.encode(f" {text.strip()}", add_special=False, parse_special=False)
            target += [] if ends is None else [ends]
            if len(asked) + len(target) > most:
                raise ValueError(f"{path}, line {number} has {len(asked) + len(target)} tokens; the most are {most} (--window)")
            both.append(Example([*asked, *target], len(asked), counts))
        items.append(tuple(both))
    if not items:
        raise ValueError(f"{path} has no line; write objects with {', '.join(FIELDS)}")
    return items


def _fields(line: str, where: str) -> list[str]:
    try:
        found = json.loads(line)
    except ValueError:
        raise ValueError(f"{where} is not JSON") from None
    values = [found.get(name) if isinstance(found, dict) else None for name in FIELDS]
    for name, value in zip(FIELDS, values, strict=True):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f'{where} has no text in "{name}"')
    return [str(value) for value in values]


def held_apart(items: Sequence[Item], count: int, seed: int) -> tuple[list[Item], list[Item]]:
    """Items to learn from and `count` others, a quarter at most. Raises ValueError where there are too few."""
    if len(items) < 2:
        raise ValueError("there are too few texts to learn from: some are held out to judge by; give more")
    order = random.Random(seed).sample(range(len(items)), len(items))
    cut = max(1, min(count, len(items) // 4))
    return [items[at] for at in order[cut:]], [items[at] for at in order[:cut]]


def batch_of(items: Sequence[Item], step: int, size: int, seed: int) -> list[Item]:
    """The items of a step, by its number alone: all of them once, in another order each time."""
    made: list[Item] = []
    for at in range(step * size, (step + 1) * size):
        turn, place = divmod(at, len(items))
        order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed + turn))
        made.append(items[int(order[place])])
    return made


def write_items(path: Path, items: Sequence[Item]) -> None:
    """As JSON."""
    path.write_text(json.dumps([[asdict(one) for one in item] for item in items]), "utf-8")


def read_items(path: Path) -> list[Item]:
    return [tuple(Example(**one) for one in item) for item in json.loads(path.read_text("utf-8"))]
