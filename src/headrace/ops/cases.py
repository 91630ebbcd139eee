"""Generated calls of every op, on which implementations are tested. Values are drawn once and rounded to bfloat16, so that a
call can be made in any dtype and compared with float64."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

from headrace.data.config import LayerConfig, ModelConfig
from headrace.kv.pool import KVPool
from headrace.ops.context import Context, FeedRows, build
from headrace.ops.dtypes import accumulator
from headrace.ops.registry import Case


class Draw:
    """Seeded values for the cases of one op."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.dtype, self.device = dtype, device
        self._rng = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self._rng, dtype=torch.float64) * scale
        return drawn.bfloat16().to(self.device, dtype or self.dtype)

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._rng).to(self.device)

    def permutation(self, n: int) -> list[int]:
        order: list[int] = torch.randperm(n, generator=self._rng).tolist()
        return order

    def norm(self, width: int, kind: str = "rms", bias: bool = False) -> SimpleNamespace:
        acc = accumulator(self.dtype)
        weight = 1 + self.normal(width, scale=0.25, dtype=acc)
        return SimpleNamespace(kind=kind, eps=1e-5, weight=weight, bias=self.normal(width, dtype=acc) if bias else None)

    def linear(self, n_in: int, sizes: tuple[int, ...], bias: bool = False, split: bool = False) -> SimpleNamespace:
        weight = self.normal(sum(sizes), n_in, scale=n_in**-0.5)
        method = SimpleNamespace(apply=lambda layer, x, b: functional.linear(x, layer.weight, b))
        return SimpleNamespace(
            weight=weight, bias=self.normal(sum(sizes)) if bias else None, sizes=sizes, split=split, method=method
        )

    def rope(self, dim: int, interleaved: bool = False, amplitude: float = 1.0, growth: float = 0.0) -> SimpleNamespace:
        steps = torch.arange(0, dim, 2, dtype=torch.float64, device=self.device)
        inv_freq = 10000.0 ** -(steps / dim)
        more = {"amplitude": amplitude, "growth": growth, "length": 4}
        return SimpleNamespace(dim=dim, interleaved=interleaved, inv_freq=inv_freq, **more)


def activation_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(dtype, device)
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        yield Case(kind, (draw.normal(5, 24, scale=3.0), kind))


def gated_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(dtype, device)
    for kind in ("silu", "gelu_tanh"):
        for rows, width in ((1, 4), (7, 172)):
            yield Case(f"{kind} {rows}x{width}", (draw.normal(rows, 2 * width), kind))


def norm_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(dtype, device)
    for kind, bias in (("rms", False), ("layer", False), ("layer", True)):
        for rows, width in ((1, 64), (9, 36)):
            yield Case(f"{kind} {rows}x{width}", (draw.normal(rows, width, scale=4.0), draw.norm(width, kind, bias)))


def residual_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(dtype, device)
    yield Case("plain", (draw.normal(3, 32), draw.normal(3, 32)))
    yield Case("post-norm", (draw.normal(3, 32), draw.normal(3, 32)), {"post_norm": draw.norm(32)})


def embed_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(dtype, device)
    table, learned = SimpleNamespace(weight=draw.normal(50, 16)), SimpleNamespace(weight=draw.normal(20, 16))
    ids = draw.ids(50, 6)
    yield Case("plain", (ids, table))
    yield Case("scaled", (ids, table), {"scale": 4.0})
    yield Case("scaled exactly", (ids, table), {"scale": 4.1, "exact": True})
    yield Case("learned positions", (ids, table), {"pos": learned, "positions": draw.ids(20, 6)})
    types = SimpleNamespace(weight=draw.normal(2, 16), separator=None)
    yield Case("token types", (ids, table), {"types": types, "pos": learned, "positions": draw.ids(20, 6)})
    pair = torch.tensor([3, 7, 4, 7, 5, 7, 6, 7], device=device), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3], device=device)
    types = SimpleNamespace(weight=types.weight, separator=7)
    yield Case("two types", (pair[0], table), {"types": types, "pos": learned, "positions": pair[1]})


def linear_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(dtype, device)
    for rows in (1, 2, 7, 33):
        yield Case(f"{rows} rows", (draw.normal(rows, 40), draw.linear(40, (24,), bias=True), None))
    yield Case("parts", (draw.normal(3, 40), draw.linear(40, (16, 8, 8), bias=True, split=True), None))
    yield Case("fused parts", (draw.normal(3, 40), draw.linear(40, (20, 20)), None))


def head_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(dtype, device)
    yield Case("plain", (draw.normal(2, 32), draw.linear(32, (100,))))
    yield Case("scale and softcap", (draw.normal(2, 32), draw.linear(32, (100,))), {"scale": 0.5, "softcap": 3.0})


def tap_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(dtype, device)
    yield Case("tap", (draw.normal(4, 16), "layer.0", _context(draw, _config(2, 1, 16))))


def attention_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    """One step of a decode row, a chunk over two blocks, a whole prompt and a tree; each option alone and all together."""
    draw = Draw(dtype, device)
    options: dict[str, dict[str, Any]] = {
        "plain": {},
        "rope": {"rope": draw.rope(16)},
        "partial interleaved rope": {"rope": draw.rope(8, interleaved=True)},
        "amplitude": {"rope": draw.rope(8, amplitude=1.25)},
        "growing queries": {"rope": draw.rope(16, growth=0.5)},
        "q and k norm": {"q_norm": draw.norm(16), "k_norm": draw.norm(16), "rope": draw.rope(16)},
        "window": {"window": 5},
        "scale and softcap": {"scale": 0.125, "softcap": 2.0},
        "sinks": {"sinks": SimpleNamespace(weight=draw.normal(6))},
        "bidirectional": {"causal": False},
        "relative": {"bias": SimpleNamespace(weight=draw.normal(8, 6), distance=6, both=False)},
        "relative, both ways": {"bias": SimpleNamespace(weight=draw.normal(8, 6), distance=6, both=True), "causal": False},
        "everything": {
            "rope": draw.rope(16),
            "q_norm": draw.norm(16),
            "k_norm": draw.norm(16),
            "window": 7,
            "scale": 0.25,
            "softcap": 4.0,
            "sinks": SimpleNamespace(weight=draw.normal(6)),
        },
    }
    for kv_heads in (6, 2, 1):
        for name, kwargs in options.items():
            ctx = _context(draw, _config(6, kv_heads, 16))
            n = len(ctx.ids)
            q, k, v = draw.normal(n, 96), draw.normal(n, kv_heads * 16), draw.normal(n, kv_heads * 16)
            yield Case(f"{name}, {kv_heads} KV heads", (q, k, v, ctx, 1), kwargs)
        ctx = _context(draw, _config(6, kv_heads, 16))
        yield Case(f"source, {kv_heads} KV heads", (draw.normal(len(ctx.ids), 96), None, None, ctx, 1), {"source": True})


def store_cases(dtype: torch.dtype, device: torch.device) -> Iterator[Case]:
    draw = Draw(dtype, device)
    ctx = _context(draw, _config(6, 2, 16))
    n = len(ctx.ids)
    yield Case("store", (draw.normal(n, 32), draw.normal(n, 32), ctx, 1))
    turned = {"rope": draw.rope(16), "k_norm": draw.norm(16)}
    yield Case("store what attention does", (draw.normal(n, 32), draw.normal(n, 32), ctx, 1), turned)


def _config(heads: int, kv_heads: int, head_dim: int) -> ModelConfig:
    return ModelConfig(
        architecture="case",
        vocab_size=10,
        hidden_size=heads * head_dim,
        layers=(LayerConfig(heads, kv_heads, head_dim, ffn=1),) * 2,
        max_position=64,
    )


def _context(draw: Draw, config: ModelConfig) -> Context:
    pool = KVPool(config, num_blocks=16, block_size=4, dtype=draw.dtype, device=draw.device)
    pool.data.copy_(draw.normal(*pool.data.shape))
    order = draw.permutation(16)
    feeds = [
        FeedRows([1], order[:3], start=9, source=5, source_table=order[11:13]),
        FeedRows([1, 2, 3, 4, 5, 6], order[3:6], start=3, source=8, source_table=order[13:15]),
        FeedRows([7, 8, 9], order[6:7], source=1, source_table=order[15:]),
        FeedRows([4], order[7:11], 8, [1, 2, 3, 4, 5], [-1, 0, 0, 1, -1], source=5, source_table=order[11:13]),
    ]
    return build(pool, feeds)
