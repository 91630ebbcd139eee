"""Filling in blocks as the papers say it, without a cache, a loop or a batch: everything is computed anew in each pass."""

from collections.abc import Callable

import torch

from headrace.data.params import RefineParams
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from headrace.training.masked import Batch, TrainableModel, whole

Forward = Callable[[list[int], list[int]], torch.Tensor]  # logits [block, V] of an open block behind known tokens


def dense(model: Model, source: list[int] | None = None) -> Forward:
    """By a matrix that says who sees whom. `source`: what an encoder-decoder writes from."""
    played = TrainableModel.of(model)

    @torch.no_grad()
    def forward(known: list[int], block: list[int]) -> torch.Tensor:
        n = len(known) + len(block)
        seen = torch.ones(n, n).tril().bool()
        seen[len(known) :] = True
        read = None if source is None else whole(torch.tensor([source]))
        batch = Batch(torch.tensor([*known, *block]), torch.arange(n), torch.empty(0), 1, seen, read)
        return played.logits(batch, torch.arange(len(known), n))

    return forward


def paged(model: Model) -> Forward:
    """By a step of its own over a fresh pool."""

    @torch.no_grad()
    def forward(known: list[int], block: list[int]) -> torch.Tensor:
        pool = KVPool(model.config, 1, len(known) + len(block), next(model.parameters()).dtype)
        chain = list(range(-1, len(block) - 1))
        ctx = build(pool, [FeedRows(known, [0], nodes=block, parents=chain, full=True)])
        found: torch.Tensor = model(ctx)[len(known) :]
        return found

    return forward


def refined(
    forward: Forward, prompt: list[int], params: RefineParams, mask: int, tokens: int, *, surest: bool = False
) -> list[int]:
    """The answer of so many tokens. With `surest` the wrong ones are masked again: those that are most confident."""
    text = list(prompt)
    while len(text) < len(prompt) + tokens:
        left = params.length - len(text) + len(prompt) if params.length is not None else params.block
        size = min(params.block, left)
        text += filled(forward, text, params, mask, size, surest)
    return text[len(prompt) : len(prompt) + tokens]


def filled(forward: Forward, text: list[int], params: RefineParams, mask: int, size: int, surest: bool) -> list[int]:
    """One block."""
    block, sure = [mask] * size, [0.0] * size
    passes = min(params.passes, size)
    for left in reversed(range(passes)):
        open_ = [at for at in range(size) if block[at] == mask]
        rows = forward(text, block).double().log_softmax(-1)
        rows[:, mask] = -torch.inf
        for at in open_:
            sure[at], block[at] = float(rows[at].max()), int(rows[at].argmax())
        order = sorted(range(size) if params.remask == "any" else open_, key=lambda at: (sure[at], -at), reverse=surest)
        for at in order[: size * left // passes]:
            block[at] = mask
    return block
