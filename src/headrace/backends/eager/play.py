"""Execution of a recorded layer, operation by operation, in torch: for steps that skip a part of it, and for training."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from headrace.ops.context import Context
from headrace.ops.registry import OPS
from headrace.runner.record import Segment


def play(
    segment: Segment,
    marks: list[int],
    skip: int,
    x: torch.Tensor,
    ctx: Context,
    instead: Mapping[str, Callable[..., Any]] = MappingProxyType({}),
) -> torch.Tensor:
    """A recorded layer without the sublayers whose bits `skip` has: hidden rows [n, hidden] -> [n, hidden].

    `marks` are those of `sublayers`. What leads to the residuals of these is not computed, nor are K and V written; a residual
    hands its rows on. `instead`: what some ops are carried out by.
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
        result = instead.get(node.op, OPS[node.op])(first[1], **dict(others))
        values.update(zip(node.outputs, result if isinstance(result, tuple) else (result,), strict=True))
    rows: torch.Tensor = values[segment.result]
    return rows
