"""Texts with masked copies of their blocks, as the rows of one step: what a model that fills in blocks learns from.

Known tokens are seen causally. Behind them stand copies of the answer's blocks with some tokens masked, at a rate drawn from
U(0, 1) for each (as masked diffusion models have it: Sahoo et al. 2024); a block sees the known tokens before it and all of
itself (block diffusion: Arriola et al. 2025). What is learnt is the masked tokens, and, at known tokens, the next one.

Of an encoder-decoder the prompts are sources, which every row sees whole, and the known tokens are an output's (Ghazvininejad
et al. 2019).
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.training.masked_tasks import END, MASK, Task


@dataclass(eq=False, slots=True)
class Batch:
    """Texts of one length as the rows of one step: `texts` of them, one after the other, whose rows see each other by `seen`.
    `wanted`: the token that each row is to give, -1: none. `source`: what an encoder reads; `read`: K and V of it, by layer of
    the decoder."""

    ids: torch.Tensor  # [texts * rows]
    positions: torch.Tensor  # [texts * rows]
    wanted: torch.Tensor  # [texts * rows]
    texts: int
    seen: torch.Tensor  # [rows, rows] bool
    source: "Batch | None" = None
    read: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    taps: dict[str, Any] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)


def whole(ids: torch.Tensor) -> Batch:
    """Texts [texts, rows] that are read in both directions, and of which nothing is wanted."""
    texts, rows = ids.shape
    none = torch.full((texts * rows,), -1)
    return Batch(ids.flatten(), torch.arange(rows).repeat(texts), none, texts, torch.ones(rows, rows, dtype=torch.bool))


def answered_by(task: Task, block: int) -> int:
    """Tokens of the blocks that an answer with its end takes."""
    return -(-(task.longest + 1) // block) * block


def rows_of(task: Task, block: int) -> int:
    """The rows of a text at the most: its prompt, its answer, and the copies of that."""
    return max(task.sizes) + 2 * answered_by(task, block)


def make_batch(
    task: Task, block: int, texts: int, rng: random.Random, generator: torch.Generator, *, sources: bool = False
) -> Batch:
    """Prompts of one length with their answers, known, and a masked copy of each of the answers' blocks. With `sources` the
    prompts are an encoder's, and an answer begins with the end token."""
    mask, end = task.id_of(MASK), task.id_of(END)
    size, answers = rng.choice(task.sizes), answered_by(task, block)
    pairs = [task.pair(rng, size) for _ in range(texts)]
    prompts = torch.tensor([prompt for prompt, _ in pairs])
    given = torch.tensor([[*answer, *[end] * (answers - len(answer))] for _, answer in pairs])
    known = torch.cat((torch.full((texts, 1), end) if sources else prompts, given), 1)
    size = known.shape[1] - answers
    copy = known[:, size:].reshape(texts, -1, block)
    rate = torch.rand(copy.shape[:2], generator=generator)[..., None]
    noise = torch.rand(copy.shape, generator=generator)
    masked = (noise < rate) | (noise == noise.amin(-1, keepdim=True))  # one of each block at least
    guessed = torch.where(masked, copy, -1).flatten(1)
    following = torch.cat((torch.full((texts, size - 1), -1), known[:, size:], torch.full((texts, 1), -1)), 1)
    places = torch.arange(size + answers)
    return Batch(
        ids=torch.cat((known, torch.where(masked, mask, copy).flatten(1)), 1).flatten(),
        positions=torch.cat((places, places[size:])).repeat(texts),
        wanted=torch.cat((following, guessed), 1).flatten(),
        texts=texts,
        seen=block_causal(size, answers, block),
        source=whole(prompts) if sources else None,
    )


def block_causal(prompt: int, answers: int, block: int) -> torch.Tensor:
    """[rows, rows] bool: who sees whom among prompt and answers, known, and the masked copies of the answers' blocks."""
    known = prompt + answers
    place = torch.cat((torch.arange(known), prompt + torch.arange(answers) // block * block))  # of a copy: its block's begin
    copy = torch.arange(known + answers) >= known
    causal = ~copy[None, :] & (place[None, :] <= place[:, None] - copy[:, None].long())
    same = copy[None, :] & copy[:, None] & (place[None, :] == place[:, None])
    return causal | same
