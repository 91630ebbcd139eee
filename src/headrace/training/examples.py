"""Training examples of a student: windows of texts, the teacher's answers, or answers with rationales."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.text.tokenizer import Tokenizer

# Prompts of one `LLM.generate` call.
BATCH = 16
# Prefixes of a prompt that ask for the answer, or for the rationale.
LABEL, REASON = "[label] ", "[rationale] "
FIELDS = ("prompt", "rationale", "answer")


@dataclass(frozen=True, slots=True)
class Example:
    """A text whose tokens from index `first` (≥ 1) on are learned.

    weight: factor of the mean loss of its learned tokens.
    """

    tokens: list[int]
    first: int = 1
    weight: float = 1.0

    @property
    def given(self) -> list[int]:
        """The prompt to continue: the tokens before `first`, or half of a text without a prompt."""
        return self.tokens[: self.first if self.first > 1 else len(self.tokens) // 2]


# One training item: a text, or an answer together with its rationale.
Item = tuple[Example, ...]


def windows(texts: Sequence[list[int]]) -> list[Item]:
    """Return items in which every token but the first is learned."""
    return [(Example(text),) for text in texts]


def answered(
    llm: LLM, prompts: Sequence[list[int]], max_tokens: int, advance: Callable[[int], None] = lambda count: None
) -> list[Item]:
    """Return prompts with the model's greedy answers to learn. advance: receives the number of answers of each batch.

    Raises RuntimeError if an answer failed.

    Source: sequence-level distillation, Kim & Rush, arXiv 1606.07947 (which takes the best of a beam).
    """
    items: list[Item] = []
    for start in range(0, len(prompts), BATCH):
        outputs = llm.generate(prompts[start : start + BATCH], SamplingParams(temperature=0.0, max_tokens=max_tokens))
        if failed := next((output.error for output in outputs if output.error), None):
            raise RuntimeError(f"an answer to learn from failed: {failed}")
        for output in outputs:
            items += example(output.prompt_token_ids, output.outputs[0].token_ids)
        advance(len(outputs))
    return items


def example(prompt: list[int], answer: list[int], weight: float = 1.0) -> list[Item]:
    """Return an item that learns the answer to a prompt; none if either is empty."""
    return [(Example([*prompt, *answer], len(prompt), weight),)] if prompt and answer else []


def reasoned(path: Path, tokenizer: Tokenizer, eos: int | None, weight: float, longest: int) -> list[Item]:
    """Read JSON lines {"prompt", "rationale", "answer"}, two texts of at most `longest` tokens each.

    The prompt after "[label] " learns the answer, and after "[rationale] " the rationale, with `weight`.
    Raises ValueError, naming the line.

    Source: Distilling Step-by-Step, Hsieh et al., arXiv 2305.02301.
    """
    items: list[Item] = []
    start = [token for token in tokenizer.encode("")[:1] if token == tokenizer.bos_id]
    try:
        # JSON strings may contain other line separators, such as U+2028.
        lines = path.read_text("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt, reason, answer = _fields(line, f"{path}, line {number}")
        both: list[Example] = []
        for task, text, factor in ((LABEL, answer, 1.0), (REASON, reason, weight)):
            given = start + tokenizer.encode(task + prompt, add_special=False, parse_special=False)
            target = tokenizer.encode(f" {text.strip()}", add_special=False, parse_special=False)
            target += [] if eos is None else [eos]
            if len(given) + len(target) > longest:
                raise ValueError(
                    f"{path}, line {number} has {len(given) + len(target)} tokens; the most are {longest} (--window)"
                )
            both.append(Example([*given, *target], len(given), factor))
        items.append(tuple(both))
    if not items:
        raise ValueError(f"{path} has no line; write objects with {', '.join(FIELDS)}")
    return items


def _fields(line: str, where: str) -> list[str]:
    try:
        record = json.loads(line)
    except ValueError:
        raise ValueError(f"{where} is not JSON") from None
    values = [record.get(name) if isinstance(record, dict) else None for name in FIELDS]
    for name, value in zip(FIELDS, values, strict=True):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f'{where} has no text in "{name}"')
    return [str(value) for value in values]


def held_apart(items: Sequence[Item], count: int, seed: int) -> tuple[list[Item], list[Item]]:
    """Split items at random into items to learn and `count` held-out ones, a quarter at most. Raises ValueError if too few."""
    if len(items) < 2:
        raise ValueError("there are too few texts to learn from: some are held out to judge by; give more")
    order = random.Random(seed).sample(range(len(items)), len(items))
    cut = max(1, min(count, len(items) // 4))
    return [items[index] for index in order[cut:]], [items[index] for index in order[:cut]]


def batch_of(items: Sequence[Item], step: int, size: int, seed: int) -> list[Item]:
    """Return the items of a step. Depends on nothing but the step, so a resumed training sees the same batches.

    Each epoch goes through all items once, in its own order.
    """
    batch: list[Item] = []
    for number in range(step * size, (step + 1) * size):
        epoch, index = divmod(number, len(items))
        order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed + epoch))
        batch.append(items[int(order[index])])
    return batch


def write_items(path: Path, items: Sequence[Item]) -> None:
    """Write items as JSON."""
    path.write_text(json.dumps([[asdict(example) for example in item] for item in items]), "utf-8")


def read_items(path: Path) -> list[Item]:
    return [tuple(Example(**example) for example in item) for item in json.loads(path.read_text("utf-8"))]
