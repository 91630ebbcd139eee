"""Tensor and sequence parallelism in torch: the conjugate operators f, g and ḡ as autograd functions over `torch.distributed`.

They are the oracle of the native core's exchanges, not a way to serve faster. Ranks hold equal shares, and every process of the
group calls the operators in the same order.

| operator | forward | backward |
|---|---|---|
| f: `enter` | identity | sum over ranks |
| g: `total` | sum over ranks | identity |
| g of sequence parallelism: `gather_rows` | rows of all ranks | sum over ranks, own rows |
| ḡ: `scatter_rows` | sum over ranks, own rows | rows of all ranks |
| `own_rows` | own rows | rows of all ranks |
| `whole_rows` | rows of all ranks | own rows |
| `whole_columns` | columns of all ranks | own columns |

Sources: Shoeybi et al., "Megatron-LM", arXiv 1909.08053 (f and g); Korthikanti et al., "Reducing Activation Recomputation in
Large Transformer Models", arXiv 2205.05198 (g and ḡ of sequence parallelism).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

Collective = Callable[[torch.Tensor], torch.Tensor]


def enter(x: torch.Tensor) -> torch.Tensor:
    """f: the input of column-parallel layers, the same on every rank. Its gradient is the sum of the ranks' gradients."""
    return _conjugate(x, _same, _sum)


def total(part: torch.Tensor) -> torch.Tensor:
    """g: the sum of the ranks' results of a row-parallel layer, the same on every rank."""
    return _conjugate(part, _sum, _same)


def gather_rows(x: torch.Tensor) -> torch.Tensor:
    """g of sequence parallelism: rows [n / world, width] of each rank become rows [n, width] on every rank."""
    return _conjugate(x, _gather, _sum_own)


def scatter_rows(part: torch.Tensor) -> torch.Tensor:
    """ḡ: the sum of the ranks' results [n, width], of which each rank keeps its own rows [n / world, width]."""
    return _conjugate(part, _sum_own, _gather)


def own_rows(x: torch.Tensor) -> torch.Tensor:
    """This rank's rows [n / world, width] of rows [n, width] that are the same on every rank."""
    return _conjugate(x, _own, _gather)


def whole_rows(x: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, for a result that every rank uses in the same way: its gradient is cut, not summed."""
    return _conjugate(x, _gather, _own)


def whole_columns(x: torch.Tensor) -> torch.Tensor:
    """The columns of all ranks: logits [n, vocabulary] of a head that is cut by tokens."""
    return _conjugate(x, partial(_gather, axis=-1), partial(_own, axis=-1))


def column_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Column-parallel linear layer without communication. weight: the rank's outputs, [n_out / world, n_in]."""
    return functional.linear(x, weight, bias)


def row_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Row-parallel linear layer. x, weight: the rank's inputs, [n_out, n_in / world]. bias: [n_out], added once."""
    y = total(functional.linear(x, weight))
    return y if bias is None else y + bias


def embedding(ids: torch.Tensor, weight: torch.Tensor, vocab: range) -> torch.Tensor:
    """Vocabulary-parallel embedding. weight: the rank's rows `vocab` of the table; a token's other ranks add zeros."""
    held = (ids >= vocab.start) & (ids < vocab.stop)
    rows = functional.embedding((ids - vocab.start).where(held, 0), weight)
    return total(rows * held[..., None].to(rows.dtype))


class RowParallel:
    """LinearMethod of a layer that is cut along its inputs (`Linear.columns`)."""

    def create(self, layer: Any, n_in: int, n_out: int, allocator: Any) -> None:
        layer.weight = allocator.empty((n_out, n_in))

    def finish(self, layer: Any) -> None:
        pass

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return row_linear(x, layer.weight, bias)


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors, joined in pairs, so that its order does not depend on the backend of `torch.distributed`."""
    while len(parts) > 1:
        parts = [sum(parts[at + 1 : at + 2], parts[at]) for at in range(0, len(parts), 2)]
    return parts[0]


class _Conjugate(torch.autograd.Function):
    """A collective operation with the collective operation that computes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Collective, backward: Collective) -> torch.Tensor:
        ctx.of_gradient = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.of_gradient(gradient), None, None


def _conjugate(x: torch.Tensor, forward: Collective, backward: Collective) -> torch.Tensor:
    result: torch.Tensor = _Conjugate.apply(x, forward, backward)
    return result


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _all(x: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, which have one shape."""
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def _gather(x: torch.Tensor, axis: int = 0) -> torch.Tensor:
    return torch.cat(_all(x), axis)


def _sum(x: torch.Tensor) -> torch.Tensor:
    return tree_sum(_all(x))


def _own(x: torch.Tensor, axis: int = 0) -> torch.Tensor:
    world = dist.get_world_size()
    if x.shape[axis] % world:
        raise ValueError(f"{x.shape[axis]} rows or columns are not equal shares of {world} ranks; pad them")
    return x.chunk(world, axis)[dist.get_rank()].clone()


def _sum_own(x: torch.Tensor) -> torch.Tensor:
    return _own(_sum(x))
