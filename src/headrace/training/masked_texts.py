"""Texts with masked copies of their blocks, as the rows of one step: what a model that fills in blocks learns from.

Known tokens are seen causally. Behind them stand copies of the answer's blocks with some tokens masked, at a rate drawn from
U(0, 1) for each (as masked diffusion models have it: Sahoo et al. 2024); a block sees the known tokens before it and all of
itself (block diffusion: Arriola et al. 2025). What is learnt is the masked tokens, and, at known tokens, the next one.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.training.tasks import END, MASK, Task


@dataclass(eq=False, slots=True)
class Batch:
    """Texts of one length as the rows of one step: `texts` of them, one after the other, whose rows see each other by `seen`.
    `wanted`: the token that each row is to give, -1: none."""

    ids: torch.Tensor  # [texts * rows]
    positions: torch.Tensor  # [texts * rows]
    wanted: torch.Tensor  # [texts * rows]
    texts: int
    seen: torch.Tensor  # [rows, rows] bool
    taps: dict[str, Any] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)


def make_batch(task: Task, block: int, texts: int, rng: random.Random, generator: torch.Generator) -> Batch:
    """Prompts of one length with their answers, known, and a masked copy of each of the answers' blocks."""
    mask, end = task.id_of(MASK), task.id_of(END)
    size = rng.choice(task.sizes)
    answers = -(-(task.longest + 1) // block) * block
    lines = []
    for _ in range(texts):
        prompt, answer = task.pair(rng, size)
        lines.append([*prompt, *answer, *[end] * (answers - len(answer))])
    known = torch.tensor(lines)
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
    )


def block_causal(prompt: int, answers: int, block: int) -> torch.Tensor:
    """[rows, rows] bool: who sees whom among prompt and answers, known, and the masked copies of the answers' blocks."""
    known = prompt + answers
    place = torch.cat((torch.arange(known), prompt + torch.arange(answers) // block * block))  # of a copy: its block's begin
    copy = torch.arange(known + answers) >= known
    causal = ~copy[None, :] & (place[None, :] <= place[:, None] - copy[:, None].long())
    same = copy[None, :] & copy[:, None] & (place[None, :] == place[:, None])
    return causal | same
