"""Steps of native attention made from plain feeds, and the same in float64, one row at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from headrace import core
from headrace.ops.context import tree

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass
class Feed:
    """One sequence's part of a step: `known` tokens from KV index `start` on, then the nodes of a draft tree."""

    start: int
    known: int
    parents: Sequence[int] = ()
    table: Sequence[int] = ()
    source: int = 0  # tokens of what its rows read where they read a source, and where that is
    source_table: Sequence[int] = ()

    @property
    def rows(self) -> int:
        return self.known + len(self.parents)

    @property
    def first_node(self) -> int:
        return self.start + self.known

    @property
    def positions(self) -> list[int]:
        return [*range(self.start, self.first_node), *(self.first_node + depth for depth in tree(self.parents)[0])]

    def line(self, row: int) -> list[int]:
        """Where what a row could see without a window is stored, as KV indices in the order of its own tokens."""
        if row < self.known:
            return list(range(self.start + row + 1))
        mask = tree(self.parents)[1][row - self.known]
        return [*range(self.first_node), *(self.first_node + i for i in range(64) if mask >> i & 1)]


@dataclass
class Shape:
    """What a layer's attention is made of, as Python values."""

    heads: int
    kv_heads: int
    dim: int
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    sinks: list[float] = field(default_factory=list)
    q_norm: list[float] = field(default_factory=list)
    k_norm: list[float] = field(default_factory=list)
    rope_dim: int = 0
    interleaved: bool = False
    source: bool = False
    bias: np.ndarray | None = None  # [heads, 2 d + 1] by distance from -d to d

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    def angles(self, positions: int) -> tuple[np.ndarray, np.ndarray]:
        phase = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(self.rope_dim // 2) * 2 / max(self.rope_dim, 1))
        return np.cos(phase).astype(np.float32), np.sin(phase).astype(np.float32)

    def options(self, positions: int):
        options = core.module().AttentionOptions()
        for name in ("heads", "window", "softcap", "causal", "source", "scale", "sinks", "q_norm", "k_norm"):
            setattr(options, name, getattr(self, name))
        if self.bias is not None:
            options.set_bias(self.bias)
        if self.rope_dim:
            options.set_rope(*self.angles(positions), self.interleaved)
        return options

    def split(self, x: np.ndarray) -> Arrays:
        """Rows [n, (heads + 2 kv_heads) * dim] -> q, k, v as columns."""
        q, kv = self.heads * self.dim, self.kv_heads * self.dim
        return x[:, :q], x[:, q : q + kv], x[:, q + kv :]

    def prepared(self, x: np.ndarray, norm: list[float], positions: Sequence[int]) -> torch.Tensor:
        """Heads [n, h, dim] in float64, normalised and turned."""
        y = torch.from_numpy(np.ascontiguousarray(x)).double().view(len(x), -1, self.dim)
        if norm:
            y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * torch.tensor(norm, dtype=torch.float64)
        if not self.rope_dim:
            return y
        cos, sin = (torch.from_numpy(a).double()[list(positions), None] for a in self.angles(max(positions) + 1))
        turned, rest = y[..., : self.rope_dim], y[..., self.rope_dim :]
        a, b = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, -1)
        a, b = a * cos - b * sin, b * cos + a * sin
        turned = torch.stack((a, b), -1).flatten(-2) if self.interleaved else torch.cat((a, b), -1)
        return torch.cat((turned, rest), -1)


def lined(tables: Sequence[Sequence[int]]) -> np.ndarray:
    width = max(map(len, tables))
    return np.array([[*table, *[-1] * (width - len(table))] for table in tables], dtype=np.int32)


class Stepper:
    """A pool of one layer and steps over it."""

    def __init__(self, shape: Shape, blocks: int, dtype: str, isa: str, threads, block_size: int = 16) -> None:
        module = core.module()
        self.shape = shape
        self.pool = module.KVPool(1, blocks, block_size, shape.kv_heads, shape.dim, dtype)
        self.step = module.AttentionStep(self.pool, threads, isa)

    def begin(self, feeds: Sequence[Feed]) -> None:
        starts = np.cumsum([0, *(feed.rows for feed in feeds)])
        masks = [mask for feed in feeds for mask in (*[0] * feed.known, *tree(feed.parents)[1])]
        self.step.begin(
            np.array([p for feed in feeds for p in feed.positions], dtype=np.int32),
            starts.astype(np.int32),
            np.array([feed.start for feed in feeds], dtype=np.int32),
            np.array([feed.known for feed in feeds], dtype=np.int32),
            lined([feed.table for feed in feeds]),
            np.array(masks, dtype=np.uint64),
            *([np.array([feed.source for feed in feeds], np.int32)] if self.shape.source else []),
            *([lined([feed.source_table for feed in feeds])] if self.shape.source else []),
        )

    def run(self, feeds: Sequence[Feed], x: np.ndarray, **also: np.ndarray) -> np.ndarray:
        """One step on rows x [n, (heads + 2 kv_heads) * dim] -> [n, heads * dim]; `also`: a8, bf16."""
        self.begin(feeds)
        out = np.full((len(x), self.shape.heads * self.shape.dim), np.nan, dtype=np.float32)
        positions = max([p for feed in feeds for p in feed.positions], default=0) + 1
        q, k, v = self.shape.split(x)
        stored = (None, None) if self.shape.source else (k, v)
        self.step.attend(0, q, *stored, self.shape.options(positions), out, **also)
        return out

    def stored(self, feed: Feed, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [count, kv_heads, dim] of a feed's first tokens, as the pool holds them."""
        size = self.pool.block_size
        at = np.array([feed.table[i // size] * size + i % size for i in range(count)], dtype=np.int32)
        k = np.empty((count, self.shape.kv_heads, self.shape.dim), dtype=np.float32)
        v = np.empty_like(k)
        self.pool.read(0, at, k, v)
        return torch.from_numpy(k).double(), torch.from_numpy(v).double()


def reference(stepper: Stepper, feeds: Sequence[Feed], x: np.ndarray, ignore_paths: bool = False) -> torch.Tensor:
    """The result of a step in float64, from what the pool holds after it. `ignore_paths`: wrong on purpose."""
    shape, out, first = stepper.shape, [], 0
    for feed in feeds:
        q = shape.prepared(shape.split(x[first : first + feed.rows])[0], shape.q_norm, feed.positions)
        read = Feed(0, 0, (), feed.source_table) if shape.source else feed
        k, v = stepper.stored(read, feed.source if shape.source else feed.start + feed.rows)
        k, v = (t.repeat_interleave(shape.heads // shape.kv_heads, 1) for t in (k, v))
        for row in range(feed.rows):
            line = list(range(feed.start + row + 1)) if ignore_paths else feed.line(row)
            end = len(line)
            if not shape.causal or shape.source:
                line = list(range(len(k)))
            if shape.window:
                line = line[max(0, end - shape.window) : end - 1 + shape.window]
            scores = torch.einsum("hd,thd->ht", q[row], k[line]) * shape.scale
            if shape.bias is not None:  # by places in the row's own line
                most = shape.bias.shape[1] // 2
                apart = np.clip(np.arange(len(line)) - feed.positions[row], -most, most) + most
                scores = scores + torch.from_numpy(shape.bias).double()[:, apart] * shape.scale
            if shape.softcap:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            if shape.sinks:
                scores = torch.cat((scores, torch.tensor(shape.sinks, dtype=torch.float64)[:, None]), 1)
            weights = scores.softmax(-1)[:, : len(line)]
            out.append(torch.einsum("ht,thd->hd", weights, v[line]).flatten())
        first += feed.rows
    return torch.stack(out)
