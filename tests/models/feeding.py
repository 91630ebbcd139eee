"""Feeds sequences through a model in steps, over a pool whose blocks are handed out in random order."""

import torch

from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from tests.models.zoo import steps_of

BLOCK = 4


def tables(lengths: list[int], num_blocks: int, seed: int = 0) -> list[list[int]]:
    """Block tables that hold `lengths` tokens each, from a shuffled pool."""
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
    made = []
    for length in lengths:
        count = -(-length // BLOCK)
        made.append(order[:count])
        order = order[count:]
    return made


@torch.no_grad()
def feed(model: Model, prompts: list[list[int]], mode: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Logits [tokens, vocabulary] of every prompt, all of them in one batch, fed whole, in chunks or token by token."""
    lengths = [len(prompt) for prompt in prompts]
    blocks = sum(-(-n // BLOCK) for n in lengths) + 5
    pool = KVPool(model.config, blocks, BLOCK, dtype)
    pool.data.fill_(torch.nan)  # whatever is read before it is written shows
    table = tables(lengths, blocks)
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in steps_of(mode, lengths):
        who = [i for i, (start, end) in enumerate(step) if end > start]
        feeds = [FeedRows(prompts[i][slice(*step[i])], table[i], step[i][0]) for i in who]
        logits = model(build(pool, feeds))
        for i, part in zip(who, logits.split([len(f.ids) for f in feeds]), strict=True):
            rows[i].append(part)
    return [torch.cat(parts) for parts in rows]


@torch.no_grad()
def greedy(model: Model, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The `count` most likely next tokens of every prompt, one batch, one token a step after the prompts."""
    tokens = [list(prompt) for prompt in prompts]
    lengths = [len(prompt) + count for prompt in prompts]
    blocks = sum(-(-n // BLOCK) for n in lengths)
    pool = KVPool(model.config, blocks, BLOCK)
    table = tables(lengths, blocks)
    done = [0] * len(prompts)
    for _ in range(count):
        context = build(pool, [FeedRows(seq[at:], blocks, at) for seq, blocks, at in zip(tokens, table, done, strict=True)])
        x = model.embed(context)
        for i in range(model.config.num_layers):
            x = model.layer(i, x, context)
        done = [len(seq) for seq in tokens]
        for seq, token in zip(tokens, model.head(x[context.row_start[1:] - 1]).argmax(-1).tolist(), strict=True):
            seq.append(token)
    return [seq[-count:] for seq in tokens]
