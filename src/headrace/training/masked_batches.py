"""Training batches of a model that fills in blocks: texts followed by masked copies of their answer's blocks.

Known tokens attend causally and learn the next token. Each block of the answer is copied behind them with some tokens masked,
at a rate drawn from U(0, 1); a copy attends to the known tokens before it and to itself, and learns its masked tokens.
For an encoder-decoder the prompts are sources, which every row reads in full.

Sources: masked diffusion, Sahoo et al., arXiv 2406.07524; block diffusion, Arriola et al., arXiv 2503.09573; Mask-Predict,
Ghazvininejad et al., arXiv 1904.09324.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.training.masked_tasks import END, MASK, Task


@dataclass(eq=False, slots=True)
class Batch:
    """`texts` texts of one length, whose rows follow each other.

    ids, positions: [texts * rows]. wanted: [texts * rows], the token to predict, −1 for none.
    seen: [rows, rows] bool, attention mask of each text. source: what an encoder reads.
    read: K and V of the source by decoder layer. taps, memo: storage of the ops that run on the batch.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    texts: int
    seen: torch.Tensor
    source: "Batch | None" = None
    read: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    taps: dict[str, Any] = field(default_factory=dict)
    memo: dict[Any, Any] = field(default_factory=dict)


def whole(ids: torch.Tensor) -> Batch:
    """Return the batch of an encoder: ids [texts, rows] with bidirectional attention and nothing to predict."""
    texts, rows = ids.shape
    none = torch.full((texts * rows,), -1)
    return Batch(ids.flatten(), torch.arange(rows).repeat(texts), none, texts, torch.ones(rows, rows, dtype=torch.bool))


def answer_tokens(task: Task, block: int) -> int:
    """Return the number of tokens of the longest answer with its end token, rounded up to whole blocks."""
    return -(-(task.longest + 1) // block) * block


def rows_of(task: Task, block: int) -> int:
    """Return the largest number of rows of a text: its prompt, its answer, and the copies of the answer's blocks."""
    return max(task.sizes) + 2 * answer_tokens(task, block)


def make_batch(
    task: Task, block: int, texts: int, rng: random.Random, generator: torch.Generator, *, sources: bool = False
) -> Batch:
    """Draw `texts` prompts of one length with their answers, and mask a copy of each block.

    sources: the prompts are an encoder's sources, and the answers begin with the end token.
    """
    mask, end = task.id_of(MASK), task.id_of(END)
    size, answers = rng.choice(task.sizes), answer_tokens(task, block)
    pairs = [task.pair(rng, size) for _ in range(texts)]
    prompts = torch.tensor([prompt for prompt, _ in pairs])
    given = torch.tensor([[*answer, *[end] * (answers - len(answer))] for _, answer in pairs])
    known = torch.cat((torch.full((texts, 1), end) if sources else prompts, given), 1)
    size = known.shape[1] - answers
    copy = known[:, size:].reshape(texts, -1, block)
    rate = torch.rand(copy.shape[:2], generator=generator)[..., None]
    noise = torch.rand(copy.shape, generator=generator)
    # Masks at least one token of each block.
    masked = (noise < rate) | (noise == noise.amin(-1, keepdim=True))
    guessed = torch.where(masked, copy, -1).flatten(1)
    following = torch.cat((torch.full((texts, size - 1), -1), known[:, size:], torch.full((texts, 1), -1)), 1)
    positions = torch.arange(size + answers)
    return Batch(
        ids=torch.cat((known, torch.where(masked, mask, copy).flatten(1)), 1).flatten(),
        positions=torch.cat((positions, positions[size:])).repeat(texts),
        wanted=torch.cat((following, guessed), 1).flatten(),
        texts=texts,
        seen=block_causal(size, answers, block),
        source=whole(prompts) if sources else None,
    )


def block_causal(prompt: int, answers: int, block: int) -> torch.Tensor:
    """Return the attention mask [rows, rows] bool of `prompt` + `answers` known tokens and the copied blocks."""
    known = prompt + answers
    # Position of a known token; of a copied token, the first position of its block.
    position = torch.cat((torch.arange(known), prompt + torch.arange(answers) // block * block))
    copy = torch.arange(known + answers) >= known
    causal = ~copy[None, :] & (position[None, :] <= position[:, None] - copy[:, None].long())
    same = copy[None, :] & copy[:, None] & (position[None, :] == position[:, None])
    return causal | same
