"""Attention as the textbook has it: one query at a time, float64, over plain lists. The oracle of the paged op."""

import math
from dataclasses import dataclass, field

import torch


@dataclass
class Stored:
    """What one sequence has stored: keys and values [t, kv_heads, d] and the position of each."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: list[int] = field(default_factory=list)


def turned(x: torch.Tensor, position: int, theta: float = 10000.0) -> torch.Tensor:
    """Rotary by complex multiplication: x [heads, d], pairs (i, i + d/2)."""
    half = x.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(x[..., :half].double(), x[..., half:].double()) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag), -1)


def attend_one(
    q: torch.Tensor,
    position: int,
    stored: Stored,
    seen: list[int],
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One query q [heads, d] over the stored tokens `seen` -> [heads, d]."""
    heads, dim = q.shape
    share = heads // stored.keys.shape[1]
    if window is not None:
        seen = [t for t in seen if abs(position - stored.positions[t]) < window]
    rows = []
    for head in range(heads):
        scores = []
        for t in seen:
            score = float(q[head].double() @ stored.keys[t, head // share].double()) * (dim**-0.5 if scale is None else scale)
            scores.append(score if softcap is None else softcap * math.tanh(score / softcap))
        extra = [] if sinks is None else [float(sinks[head])]
        weights = torch.tensor([*scores, *extra], dtype=torch.float64).softmax(0)
        row = torch.zeros(dim, dtype=torch.float64)
        for weight, t in zip(weights.tolist(), seen, strict=False):
            row += weight * stored.values[t, head // share].double()
        rows.append(row)
    return torch.stack(rows)
