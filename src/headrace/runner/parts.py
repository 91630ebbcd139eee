"""Parts of a model: its first layers, or all but some sublayers."""

from dataclasses import dataclass
from typing import Any

import torch

from headrace.ops.context import Context
from headrace.ops.registry import OPS
from headrace.runner.record import Segment

ATTENTION, MLP = 1, 2  # sublayers, as bits


@dataclass(frozen=True, slots=True)
class Part:
    """What a step runs of a model: `layers` of them (0: all), without the sublayers whose bits `skips` has for a layer."""

    layers: int = 0
    skips: tuple[int, ...] = ()

    def skip(self, layer: int) -> int:
        """The bits of a layer's sublayers that are left out."""
        return self.skips[layer] if layer < len(self.skips) else 0


def sublayers(segment: Segment) -> list[int]:
    """Per node the sublayer that a step may skip: what leads to a residual that carries the rows on. 0: never skipped."""
    marks = [0] * len(segment.nodes)
    first, carried = 0, segment.entry
    for index, node in enumerate(segment.nodes):
        if node.op == "tap":
            first = index + 1
            carried = node.outputs[0] if node.inputs["x"] == carried else carried
        if node.op != "residual":
            continue
        group = segment.nodes[first : index + 1]
        made = {value for member in group for value in member.outputs}
        read = {value for member in group for value in member.inputs.values()}
        if node.inputs["x"] != carried or read - made != {carried}:
            return [0] * len(segment.nodes)
        mark = ATTENTION if any(member.op == "attention" for member in group) else MLP
        marks[first : index + 1] = [mark] * len(group)
        first, carried = index + 1, node.outputs[0]
    return marks


def run_layer(segment: Segment, marks: list[int], skip: int, x: torch.Tensor, ctx: Context) -> torch.Tensor:
    """A recorded layer without the sublayers whose bits `skip` has: hidden rows [n, hidden] -> [n, hidden].

    `marks` are those of `sublayers`. What leads to the residuals of these is not computed, nor are K and V written; a residual
    hands its rows on.
    """
    values: dict[int | None, Any] = {segment.entry: x}
    for node, mark in zip(segment.nodes, marks, strict=True):
        if mark & skip:
            if node.op == "residual":
                values[node.outputs[0]] = values[node.inputs["x"]]
            continue
        first, *others = (
            (name, values[node.inputs[name]] if name in node.inputs else node.settings.get(name, ctx))
            for name in OPS[node.op].parameters
        )
        result = OPS[node.op](first[1], **dict(others))
        values.update(zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    rows: torch.Tensor = values[segment.result]
    return rows
