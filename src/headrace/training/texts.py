"""What heads learn from: texts that the model wrote itself, with its hidden rows along them.

Prompts come from the caller's files, or the model writes them too: its chat template is left open where the user speaks
(Magpie, Xu et al. 2024). Answers are drawn at several temperatures, so that heads know what follows unlikely words as well.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headrace.data.params import SamplingParams
from headrace.data.plan import Feed
from headrace.llm import LLM
from headrace.runner.runner import Runner
from headrace.startup.opening import Opened
from headrace.startup.recipe import BLOCK_SIZE
from headrace.text.chat import TemplateError
from headrace.training.selfdraft import SLOT, ScratchLive
from headrace.weights.atomic_file import atomic_write

TEMPERATURES = (0.0, 0.0, 0.4, 0.8)  # of answers, in turns
SHARD = 64  # texts of a file
CONTEXT = 1024
MARK = "~user~"
STARTS = (
    *("", "", "", "What", "How", "Why", "Explain", "Write", "List", "Summarize this text: ", "Rewrite this sentence: "),
    *("Write a Python function that", "Write a function in Python which", "Write a Python class for", "Write a program that"),
    *("Fix the bug in this Python code:\n```python\ndef ", "Add type hints and a docstring to this function:\n```python\ndef "),
    *(
        "Change this code so that",
        "What does this code do?\n```python\n",
        "Write an SQL query that",
        "Write a shell command that",
    ),
    *("Solve this problem step by step: ", "Translate", "Write a short story about", "Write an email to", "Give me advice on"),
)


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt and its answer as tokens; `answer` is where the answer begins. `hidden` [tokens, width] bfloat16: the rows
    after the target's last layer; for exits those that their layers left, and these, side by side. Of an encoder-decoder the
    prompt is `source`, and `tokens` are what it starts with and the answer."""

    tokens: torch.Tensor
    answer: int
    hidden: torch.Tensor
    source: torch.Tensor | None = None

    @property
    def prompt(self) -> list[int]:
        """What was asked."""
        asked: list[int] = (self.tokens[: self.answer] if self.source is None else self.source).tolist()
        return asked


def open_writer(opened: Opened, threads: int | None = None) -> LLM:
    """The model as it is needed here: nothing of its cache is kept, as its blocks are borrowed."""
    return LLM(opened.path, speculate=None, enable_prefix_caching=False, max_model_len=context_of(opened), threads=threads)


def context_of(opened: Opened) -> int:
    """Texts are no longer."""
    return min(CONTEXT, opened.config.max_position)


def own_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """`count` prompts that the model wrote, as tokens ready for the answer. Of a quarter more, those that came to an end by
    themselves are preferred."""
    asked_for, count = count, count + count // 4
    draw = random.Random(seed)
    opening, rendered = _opening(llm)
    starts = [draw.choice(STARTS) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=1.0, top_p=0.95, max_tokens=min(80, llm.memory_plan.max_model_len // 4), seed=draw.getrandbits(63)
        )
        for _ in starts
    ]
    asked = [llm.tokenizer.encode(opening + start, add_special=not rendered) for start in starts]
    outputs = llm.generate(asked, params)
    prompts: list[list[int]] = []
    others: list[list[int]] = []
    for start, tokens, output in zip(starts, asked, outputs, strict=True):
        written = output.outputs[0]
        if not rendered:
            prompts.append(tokens + written.token_ids[:8])
            continue
        whole = written.finish_reason == "stop" and len(written.token_ids) > 2
        (prompts if whole else others).append(llm.render([{"role": "user", "content": start + written.text.rstrip()}]))
    return [*prompts, *others][:asked_for]


def _opening(llm: LLM) -> tuple[str, bool]:
    """The chat template up to where the user speaks; without a template nothing, and False."""
    try:
        text = llm.opened.template.render([{"role": "user", "content": MARK}], add_generation_prompt=True)
    except TemplateError:
        return "", False
    return text.partition(MARK)[0], True


def write_texts(
    llm: LLM,
    prompts: Sequence[list[int]],
    max_tokens: int,
    seed: int,
    layers: Sequence[int] = (),
    temperatures: Sequence[float] = TEMPERATURES,
) -> list[Text]:
    """Have the model answer, and read its hidden rows along prompt and answer. Prompts that leave no room are left out.

    Raises RuntimeError where an answer failed.
    """
    max_tokens = min(max_tokens, llm.memory_plan.max_model_len // 2)
    room = llm.memory_plan.max_model_len - max_tokens
    kept = [prompt for prompt in prompts if len(prompt) <= room]
    params = [
        SamplingParams(temperature=temperatures[at % len(temperatures)], max_tokens=max_tokens, seed=seed + at)
        for at in range(len(kept))
    ]
    outputs = llm.generate(kept, params)
    if failed := next((output.error for output in outputs if output.error), None):
        raise RuntimeError(f"an answer to learn from failed: {failed}")
    config, made = llm.model_config, []
    for output in outputs:
        asked, answer = output.prompt_token_ids, output.outputs[0].token_ids
        before, source = (asked, []) if config.source is None else ([config.start], asked)
        if len(answer) > 2:
            hidden = hidden_rows(llm.runner, before + answer, layers, source)
            made.append(Text(torch.tensor(before + answer), len(before), hidden, torch.tensor(source) if source else None))
    return made


def hidden_rows(runner: Runner, tokens: list[int], layers: Sequence[int] = (), source: Sequence[int] = ()) -> torch.Tensor:
    """The rows [tokens, width] after each of `layers` of the target, side by side, and after its last, bfloat16. Nothing else
    may be in its pool, which is written."""
    return torch.cat([rows.to(torch.bfloat16) for rows in rows_after(runner, tokens, layers, source)], 1)


def rows_after(runner: Runner, tokens: list[int], layers: Sequence[int] = (), source: Sequence[int] = ()) -> list[torch.Tensor]:
    """The rows [tokens, hidden] after the first `layers` (ascending numbers of layers), and after all, as the back end has
    them. Nothing else may be in its pool, which is written."""
    with ScratchLive(runner, tokens, BLOCK_SIZE, source):
        return [torch.as_tensor(rows) for rows in runner.rows_after(Feed(SLOT, 0, len(tokens)), layers)]


class Shards:
    """Texts in a folder, 64 a file; what is there need not be written again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        return self.folder / f"{number:04}.safetensors"

    def have(self, number: int) -> bool:
        return self.path(number).is_file()

    def write(self, number: int, texts: Sequence[Text]) -> None:
        """Put texts into a file, which is there when it is whole."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            "tokens": torch.cat([text.tokens for text in texts]).to(torch.int32),
            "hidden": torch.cat([text.hidden for text in texts]),
            "lengths": torch.tensor([len(text.tokens) for text in texts], dtype=torch.int32),
            "answers": torch.tensor([text.answer for text in texts], dtype=torch.int32),
        }
        if sources := [text.source for text in texts if text.source is not None]:
            tensors["sources"] = torch.cat(sources).to(torch.int32)
            tensors["asked"] = torch.tensor([len(source) for source in sources], dtype=torch.int32)
        with atomic_write(self.path(number)) as part:
            save_file(tensors, part)

    def read(self) -> list[Text]:
        """All texts, in the order they were written."""
        return [text for path in sorted(self.folder.glob("*.safetensors")) for text in _texts(path)]


def _texts(path: Path) -> Iterator[Text]:
    tensors = load_file(path)
    lengths = tensors["lengths"].tolist()
    sources: Sequence[torch.Tensor | None] = [None] * len(lengths)
    if "sources" in tensors:
        sources = tensors["sources"].long().split(tensors["asked"].tolist())
    parts = zip(tensors["tokens"].long().split(lengths), tensors["hidden"].split(lengths), sources, strict=True)
    for (tokens, hidden, source), answer in zip(parts, tensors["answers"].tolist(), strict=True):
        yield Text(tokens, answer, hidden, source)
