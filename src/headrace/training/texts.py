"""Training texts of draft heads: answers that the model writes, with its hidden rows along them.

Prompts come from the caller, or the model writes them too, as the continuation of its chat template up to the user's turn.
Answers are sampled at several temperatures, so heads also learn what follows unlikely tokens.

Source of the prompts: Magpie, Xu et al., arXiv 2406.08464.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from headrace.backends.recipe import BLOCK_SIZE
from headrace.data.params import SamplingParams
from headrace.data.plan import Feed
from headrace.llm import LLM
from headrace.runner.runner import Runner
from headrace.startup.opening import Opened
from headrace.text.chat import TemplateError
from headrace.training.selfdraft import SLOT, scratch_slot
from headrace.weights.atomic_file import atomic_write

# Temperatures of the answers, in rotation.
TEMPERATURES = (0.0, 0.0, 0.4, 0.8)
# Texts of one file.
SHARD = 64
# Longest text, in tokens.
CONTEXT = 1024
# Stands for the user's text in a rendered chat template.
MARK = "~user~"
# Openings of the prompts that the model writes.
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
    """One prompt with its answer.

    tokens: token ids of both; the answer begins at index `answer`.
    hidden: [tokens, width] bfloat16, rows after the last layer; for exits, the rows after each exit's layers come first.
    source: prompt of an encoder-decoder; `tokens` is then the start token and the answer.
    """

    tokens: torch.Tensor
    answer: int
    hidden: torch.Tensor
    source: torch.Tensor | None = None

    @property
    def prompt(self) -> list[int]:
        prompt: list[int] = (self.tokens[: self.answer] if self.source is None else self.source).tolist()
        return prompt


def open_writer(opened: Opened, threads: int | None = None) -> LLM:
    """Open the model without a prefix cache, whose blocks `rows_after` would overwrite, and without drafts."""
    return LLM(opened.path, speculate=None, enable_prefix_caching=False, max_model_len=context_of(opened), threads=threads)


def context_of(opened: Opened) -> int:
    """Return the longest text of a model in tokens."""
    return min(CONTEXT, opened.config.max_position)


def own_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Have the model write `count` prompts. Returns their token ids, ready for an answer.

    The model writes a quarter more; prompts that ended by themselves come first.
    """
    wanted, count = count, count + count // 4
    rng = random.Random(seed)
    opening, rendered = _template_opening(llm)
    starts = [rng.choice(STARTS) for _ in range(count)]
    params = [
        SamplingParams(
            temperature=1.0, top_p=0.95, max_tokens=min(80, llm.memory_plan.max_model_len // 4), seed=rng.getrandbits(63)
        )
        for _ in starts
    ]
    openings = [llm.tokenizer.encode(opening + start, add_special=not rendered) for start in starts]
    outputs = llm.generate(openings, params)
    prompts: list[list[int]] = []
    others: list[list[int]] = []
    for start, tokens, output in zip(starts, openings, outputs, strict=True):
        written = output.outputs[0]
        if not rendered:
            prompts.append(tokens + written.token_ids[:8])
            continue
        complete = written.finish_reason == "stop" and len(written.token_ids) > 2
        (prompts if complete else others).append(llm.render([{"role": "user", "content": start + written.text.rstrip()}]))
    return [*prompts, *others][:wanted]


def _template_opening(llm: LLM) -> tuple[str, bool]:
    """Return the chat template's text before the user's message, and whether there is a template."""
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
    """Have the model answer prompts, and read its hidden rows along prompt and answer.

    Drops prompts that leave no room for `max_tokens`. layers: numbers of layers whose rows are read besides the last one's.
    Raises RuntimeError if an answer failed.
    """
    max_tokens = min(max_tokens, llm.memory_plan.max_model_len // 2)
    room = llm.memory_plan.max_model_len - max_tokens
    kept = [prompt for prompt in prompts if len(prompt) <= room]
    params = [
        SamplingParams(temperature=temperatures[index % len(temperatures)], max_tokens=max_tokens, seed=seed + index)
        for index in range(len(kept))
    ]
    outputs = llm.generate(kept, params)
    if failed := next((output.error for output in outputs if output.error), None):
        raise RuntimeError(f"an answer to learn from failed: {failed}")
    config, texts = llm.model_config, []
    for output in outputs:
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        before, source = (prompt, []) if config.source is None else ([config.start], prompt)
        if len(answer) > 2:
            hidden = hidden_rows(llm.runner, before + answer, layers, source)
            texts.append(Text(torch.tensor(before + answer), len(before), hidden, torch.tensor(source) if source else None))
    return texts


def hidden_rows(runner: Runner, tokens: list[int], layers: Sequence[int] = (), source: Sequence[int] = ()) -> torch.Tensor:
    """Return the concatenated rows [tokens, width] bfloat16 of `rows_after`."""
    return torch.cat([rows.to(torch.bfloat16) for rows in rows_after(runner, tokens, layers, source)], 1)


def rows_after(runner: Runner, tokens: list[int], layers: Sequence[int] = (), source: Sequence[int] = ()) -> list[torch.Tensor]:
    """Run one sequence. Returns its rows [tokens, hidden] after the first `layers` layers (ascending), and after all.

    source: of an encoder-decoder. Overwrites the K/V pool, so the engine must be idle.
    """
    with scratch_slot(runner, tokens, BLOCK_SIZE, source):
        return [torch.as_tensor(rows) for rows in runner.rows_after(Feed(SLOT, 0, len(tokens)), layers)]


class Shards:
    """Stored texts in a folder, SHARD texts a file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, number: int) -> Path:
        return self.folder / f"{number:04}.safetensors"

    def have(self, number: int) -> bool:
        return self.path(number).is_file()

    def write(self, number: int, texts: Sequence[Text]) -> None:
        """Write the texts of one file atomically."""
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
        """Return all texts in the order of the files."""
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
