"""Structured pruning of neurons, heads and layers. Units are masked for the rest of the pass and left out of the stored
tensors.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headrace.compress.base import FITTED, Matrix, Visit
from headrace.compress.least_squares import SINGULAR, Residual, error_record
from headrace.data.config import LayerConfig


class Neurons:
    """Keeps the neurons with the largest mean |activation| times norm of their column of `down`. layers: each layer's config
    after it.
    """

    def __init__(self, layers: Sequence[LayerConfig]) -> None:
        self._layers = layers

    def visit(self, visit: Visit) -> None:
        down = consumer(visit, "ffn")
        scores = down.inputs.mean * down.linear.weight.norm(dim=0)
        kept = top_indices(scores, self._layers[visit.number].ffn)
        rows = {part: kept for matrix in producers(visit, "ffn") for part in matrix.parts}
        remove_units(visit, "ffn", rows, kept)


class Heads:
    """Keeps the K/V heads, with their query heads, that contribute the largest mean square to the output of `out`."""

    def __init__(self, layers: Sequence[LayerConfig]) -> None:
        self._layers = layers

    def visit(self, visit: Visit) -> None:
        out, layer = consumer(visit, "heads"), visit.layer
        given = (out.linear.weight.t() @ out.linear.weight) * out.inputs.hessian  # [q_size, q_size], by pairs of inputs
        group = layer.q_size // layer.kv_heads
        scores = torch.stack([given[at : at + group, at : at + group].sum() for at in range(0, layer.q_size, group)])
        kept = top_indices(scores, self._layers[visit.number].kv_heads)
        q, kv = rows_of(kept, group), rows_of(kept, layer.head_dim)
        remove_units(visit, "heads", {"q": q, "k": kv, "v": kv}, q)


class Distances:
    """Measures how far each layer moves its rows: mean of 1 - cos(input, output). Changes nothing."""

    def visit(self, visit: Visit) -> None:
        total, count = 0.0, 0
        for x, y, part in visit.run():
            if part == FITTED:
                total += float((1 - torch.cosine_similarity(x.double(), y.double(), dim=-1)).sum())
                count += len(x)
        visit.cut = {}
        visit.extra["distance"] = total / max(count, 1)


def least_moving_layers(distances: Sequence[float], count: int) -> list[int]:
    """The `count` layers that move their rows least; of equal ones the later."""
    order = sorted(range(len(distances)), key=lambda at: (distances[at], -at))
    return sorted(order[:count])


def producers(visit: Visit, role: str) -> list[Matrix]:
    """Matrices whose outputs are `role`: ffn or heads."""
    return [matrix for matrix in visit.matrices.values() if matrix.linear.rows == role]


def consumer(visit: Visit, role: str) -> Matrix:
    """The matrix whose inputs are `role`."""
    return next(matrix for matrix in visit.matrices.values() if matrix.linear.columns == role)


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest scores, ascending; of equal scores the first."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def rows_of(groups: Tensor, width: int) -> Tensor:
    """Rows of groups that have `width` rows each."""
    return (groups[:, None] * width + torch.arange(width)).flatten()


def remove_units(visit: Visit, role: str, rows: Mapping[str, Tensor], columns: Tensor) -> None:
    """Keep `columns` of the matrix that reads `role`, corrected by least squares, and `rows` of each part of the matrices that
    make it.

    In the layer the other columns become 0; `visit.cut` gets the smaller tensors.
    """
    matrix = consumer(visit, role)
    w, inputs = matrix.linear.weight, matrix.inputs
    measured = Residual.of_kept(w, inputs.hessian, columns)
    held = Residual.of_kept(w, inputs.held, columns) if inputs.held_count else None
    choice = Residual.of_kept(w, inputs.choice, columns) if inputs.choice is not None and inputs.choice_count else None
    change = measured.repair(choice)
    if change is None:
        visit.notes.append(f"{matrix.path}: {SINGULAR}")
    visit.extra |= error_record(measured, held, change)
    kept = w[:, columns] if change is None else w[:, columns] + change
    w.zero_()
    w[:, columns] = kept
    cut = {matrix.target(""): kept}
    for maker in producers(visit, role):
        for field, values in part_fields(maker).items():
            for part, value in values.items():
                cut[maker.target(part, field)] = value[rows[part]]
    visit.cut = cut


def part_fields(matrix: Matrix) -> dict[str, dict[str, Tensor]]:
    """Views of a matrix's weight, and bias if it has one, by part."""
    views = {"weight": matrix.parts}
    if matrix.linear.bias is not None:
        views["bias"] = dict(zip(matrix.parts, matrix.linear.bias.split(matrix.linear.sizes), strict=True))
    return views
