"""Fewer K/V heads: MHA to GQA or MQA (Ainslie et al. 2023, arXiv 2305.13245).

Neighbouring heads are merged into one: their mean after alignment, the plain mean, or the first. Then `out` is fitted by least
squares. Alignment keeps the model's outputs: values are rotated freely and `out` undoes it; keys and queries are rotated by one
angle for each rotary pair, which commutes with the rotary embedding.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from headrace.compress.base import CHOSEN, FITTED, REPORTED, InputObserver, Matrix, Visit
from headrace.compress.cutting import consumer, part_fields, producers
from headrace.compress.least_squares import SINGULAR, Residual, error_record
from headrace.compress.structure import ALIGNED, FIRST
from headrace.data.config import LayerConfig, RopeConfig
from headrace.models.layers import Linear

ROUNDS = 3
Turn = Callable[[Tensor], Tensor]  # products [d, d] of target rows with the rows to rotate -> rotation [d, d]


class KVHeads:
    """Merge K/V heads. layers: config of each layer afterwards. pool: aligned, mean or first."""

    def __init__(self, layers: Sequence[LayerConfig], pool: str) -> None:
        self._layers, self._pool = layers, pool

    def visit(self, visit: Visit) -> None:
        (qkv,), out = producers(visit, "heads"), consumer(visit, "heads")
        before, w = list(captured_inputs(visit, out.linear)), out.linear.weight.clone()
        if self._pool == ALIGNED:
            align(visit.layer, qkv, out, self._layers[visit.number].kv_heads)
        kept = self._merge(visit.layer, qkv, self._layers[visit.number].kv_heads)
        by_part = {part: Residual.empty(w) for part in (FITTED, REPORTED, CHOSEN)}
        for (x, part), (inputs, _) in zip(before, captured_inputs(visit, out.linear), strict=True):
            wanted = linear(x, w)
            by_part[part].add(inputs, wanted, wanted - linear(inputs, out.linear.weight))
        for residual in by_part.values():
            residual.finish()
        measured, held, choice = by_part.values()
        change = measured.repair(choice if choice.count else None)
        visit.extra |= error_record(measured, held if held.count else None, change)
        if change is None:
            visit.notes.append(f"{out.path}: {SINGULAR}")
        else:
            out.linear.weight += change
        queries = {qkv.target("q", field): values["q"] for field, values in part_fields(qkv).items() if self._pool == ALIGNED}
        visit.cut = kept | queries | {out.target(""): out.linear.weight.clone()}

    def _merge(self, layer: LayerConfig, qkv: Matrix, count: int) -> dict[str, Tensor]:
        """Replace the heads of each group by one in the layer; returns the merged tensors by target."""
        kept = {}
        for field, values in part_fields(qkv).items():
            for part in ("k", "v"):
                groups = values[part].view(count, layer.kv_heads // count, layer.head_dim, -1)
                merged = groups[:, :1] if self._pool == FIRST else groups.mean(1, keepdim=True)
                merged = merged.clone()
                groups.copy_(merged.expand_as(groups))
                kept[qkv.target(part, field)] = merged.reshape(count * layer.head_dim, *values[part].shape[1:])
        return kept


def align(layer: LayerConfig, qkv: Matrix, out: Matrix, count: int) -> None:
    """Rotate the K/V heads of each of `count` groups towards their mean, and undo it in the queries and `out`.

    The layer's outputs are unchanged.
    """
    moment = _moment(qkv)
    share, d = layer.heads // layer.kv_heads, layer.head_dim
    heads = {part: _heads(qkv, part, d) for part in ("q", "k", "v")}
    for part, turn in (("k", pair_turns(layer.rope, d)), ("v", procrustes)):
        grouped = heads[part].view(count, -1, d, heads[part].shape[-1])
        turns = torch.cat([rotations_to_mean(group, moment, turn) for group in grouped])
        heads[part] = turns @ heads[part]
        rotations = turns.repeat_interleave(share, 0)  # query head h has the rotation of K/V head h // share
        if part == "k":
            heads["q"] = rotations @ heads["q"]
        else:
            columns = out.linear.weight.view(-1, layer.heads, d).double()
            out.linear.weight.copy_(torch.einsum("nhd,hed->nhe", columns, rotations).flatten(1))
    for part, rows in heads.items():
        for at, values in enumerate(part_fields(qkv).values()):  # the bias is the last input
            flat = rows.flatten(0, 1)
            values[part].copy_(flat[:, -1] if at else flat[:, : qkv.linear.n_in])


def rotations_to_mean(heads: Tensor, moment: Tensor, turn: Turn) -> Tensor:
    """Rotations [m, d, d] of heads [m, d, k] towards their mean: generalized Procrustes analysis, weighted by the inputs'
    second moment [k, k].
    """
    mean, turns = heads[0], torch.empty(0)
    for _ in range(ROUNDS):
        turns = torch.stack([turn(mean @ moment @ head.t()) for head in heads])
        mean = (turns @ heads).mean(0)
    return turns


def procrustes(products: Tensor) -> Tensor:
    """The orthogonal R [d, d] that maximizes the sum of R * products."""
    u, _, v = torch.linalg.svd(products)
    return u @ v


def pair_turns(rope: RopeConfig | None, head_dim: int) -> Turn:
    """As `procrustes`, with one angle for each rotary pair; dimensions without rotary embedding are free."""
    dim = 0 if rope is None else rope.dim or head_dim
    index = torch.arange(dim)
    neighbours = rope is not None and rope.interleaved
    first, second = index.view(dim // 2, 2).t() if neighbours else index.view(2, dim // 2)

    def turn(products: Tensor) -> Tensor:
        cos = products[first, first] + products[second, second]
        sin = products[second, first] - products[first, second]
        angle = torch.atan2(sin, cos)
        rotation = torch.zeros_like(products)
        rotation[first, first] = rotation[second, second] = angle.cos()
        rotation[second, first], rotation[first, second] = angle.sin(), -angle.sin()
        if dim < head_dim:
            rotation[dim:, dim:] = procrustes(products[dim:, dim:])
        return rotation

    return turn


def _moment(qkv: Matrix) -> Tensor:
    """Second moment of the inputs in float64; a bias adds an input that is always 1 (the mean of the others is taken as 0)."""
    moment = qkv.inputs.hessian.double()
    return moment if qkv.linear.bias is None else torch.block_diag(moment, torch.ones(1, 1, dtype=torch.float64))


def _heads(qkv: Matrix, part: str, head_dim: int) -> Tensor:
    """Heads of a part [heads, head_dim, inputs] in float64; a bias is the last input."""
    columns = [values[part].view(len(values[part]), -1).double() for values in part_fields(qkv).values()]
    whole = torch.cat(columns, 1)
    return whole.view(-1, head_dim, whole.shape[1])


def captured_inputs(visit: Visit, matrix: Linear) -> Iterator[tuple[Tensor, int]]:
    """Inputs of a matrix for the layer's current weights, chunk by chunk, and their part of the texts."""
    inputs: list[Tensor] = []
    matrix.method = InputObserver(inputs.append)
    try:
        for _, _, part in visit.run():
            yield inputs.pop(), part
    finally:
        matrix.method = None
