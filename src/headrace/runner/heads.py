"""Trained heads as companions of the target: they draft from its hidden rows, through its own lm_head.

heads (blockwise parallel decoding, Stern et al. 2018; Medusa, Cai et al. 2024): from the target's hidden row at one place,
head i says what comes i + 1 tokens later. feature (EAGLE, Li et al. 2024): one decoder layer reads the embedding of a token
and the hidden row before it, and gives what the target's hidden row at that token would be; from that the next, and so on.
Both read rows after the target's last layer, scaled to length, and end in a norm of their own and the target's lm_head, of
which they may have a part: the tokens they choose from.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import rms_norm, silu

from headrace.data.config import ModelConfig, RopeConfig
from headrace.data.plan import StepPlan
from headrace.kv.pool import KVPool
from headrace.models.base import Value
from headrace.models.llama import Llama
from headrace.models.registry import describe
from headrace.ops.context import Context
from headrace.runner.hidden import Features
from headrace.runner.runner import TorchRunner
from headrace.runner.slots import Slots
from headrace.weights.loader import load_model, plan
from headrace.weights.source import TensorInfo, WeightSource

HEADS, FEATURE = "heads", "feature"
LAYER = "layers.0."
UNIT_EPS = 1e-6

Tensors = dict[str, torch.Tensor]
Product = Callable[[str, torch.Tensor], torch.Tensor]  # rows by the matrix of a name


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads in memory. `tensors`: heads.{i}.up.weight and down.weight, or embed.weight, hidden.weight and those of a llama
    layer; norm.weight; and vocab, the tokens to choose from, ascending. `count`: tokens they draft at once (feature: as many
    as it was trained for)."""

    kind: str
    count: int
    tensors: Tensors

    @property
    def vocab(self) -> np.ndarray:
        ids: np.ndarray = self.tensors["vocab"].numpy()
        return ids


def heads_config(kind: str, target: ModelConfig) -> ModelConfig:
    """Heads as a model: a feature layer is one layer, shaped like one of the target's; the others have none."""
    like = next((layer for layer in target.layers if layer.window is None), target.layers[0])
    rope = replace(like.rope or RopeConfig(), interleaved=False)
    return ModelConfig(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        layers=(replace(like, window=None, rope=rope),) if kind == FEATURE else (),
        max_position=target.max_position,
        norm_eps=target.norm_eps,
        tied_head=target.tied_head,
    )


def shapes(kind: str, count: int, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that such heads have, but for the vocabulary."""
    width = target.hidden_size
    made: dict[str, tuple[int, ...]] = {"norm.weight": (width,)}
    if kind == HEADS:
        return made | {f"heads.{i}.{name}.weight": (width, width) for i in range(count) for name in ("up", "down")}
    (layer,) = heads_config(kind, target).layers
    attention = {name: (rows, width) for name, rows in layer.qkv.items()} | {"o": (width, layer.q_size)}
    mlp = {"gate": (layer.ffn, width), "up": (layer.ffn, width), "down": (width, layer.ffn)}
    made |= {"embed.weight": (width,), "hidden.weight": (width, width)}
    made |= {f"{LAYER}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    made |= {f"{LAYER}self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    return made | {f"{LAYER}mlp.{name}_proj.weight": shape for name, shape in mlp.items()}


def unit(x: torch.Tensor, eps: float = UNIT_EPS) -> torch.Tensor:
    """Rows x [..., width] scaled to a mean square of 1, float32."""
    return rms_norm(x.float(), x.shape[-1:], eps=eps)


def predict(tensors: Tensors, head: int, hidden: torch.Tensor, product: Product | None = None) -> torch.Tensor:
    """What the norm and the lm_head take of head `head`: [..., hidden], from the target's rows of the same shape."""
    x, by = unit(hidden), product or (lambda name, x: x @ tensors[name].t())
    return x + by(f"heads.{head}.down.weight", silu(by(f"heads.{head}.up.weight", x)))


def enter(tensors: Tensors, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """What the feature layer takes: of tokens' embeddings and the hidden rows before them, [..., hidden] each."""
    return tensors["embed.weight"] * unit(embedded) + unit(before) @ tensors["hidden.weight"].t()


class HeadsSource:
    """The heads' own tensors beside the target's embeddings and lm_head, as a file of a llama."""

    format: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, heads: Heads, target: ModelConfig, source: WeightSource) -> None:
        self.path: Path = source.path
        self._source = source
        layers = heads.tensors.items() if heads.kind == FEATURE else ()
        self._own = {name: x.contiguous() for name, x in layers if name.startswith("layers.")}
        self._own["norm.weight"] = heads.tensors["norm.weight"]
        plans = plan(describe(target), source)
        self._shared = {"embed_tokens.weight": plans["tokens.weight"][0].source}
        if not target.tied_head:
            self._shared["lm_head.weight"] = plans["output.weight"][0].source

    def names(self) -> list[str]:
        return [*self._own, *self._shared]

    def info(self, name: str) -> TensorInfo:
        if name in self._shared:
            return replace(self._source.info(self._shared[name]), name=name)
        x = self._own[name]
        return TensorInfo(name, tuple(x.shape), {torch.bfloat16: "BF16", torch.float32: "F32"}[x.dtype], x.nbytes)

    def raw(self, name: str) -> np.ndarray:
        if name in self._shared:
            return self._source.raw(self._shared[name])
        x = self._own[name]
        stored: np.ndarray = x.view(torch.uint8).reshape(self.info(name).rows, -1).numpy()
        return stored

    def mapped(self, name: str) -> bool:
        return name in self._shared and self._source.mapped(self._shared[name])

    def release(self, name: str) -> None:
        if name in self._shared:
            self._source.release(self._shared[name])

    def close(self) -> None:
        """The target's file is the target's."""


class Entrance:
    """The rows that heads begin with, from those that the target left or, in a chain, that they left themselves."""

    def __init__(self, heads: Heads, features: Features, slots: Mapping[int, Any]) -> None:
        self.heads = heads
        self.tensors = {name: x.float() for name, x in heads.tensors.items() if not name.startswith(LAYER)}
        self.features = features
        self.slots = slots
        self._tips: dict[int, torch.Tensor] = {}  # by slot: the row that the feature layer left last

    def rows(self, plan: StepPlan, embedded: torch.Tensor | None) -> torch.Tensor:
        """Rows [n, hidden] for a plan's feeds; `embedded`: their tokens' embeddings, which the feature layer needs."""
        if embedded is not None:
            return enter(self.tensors, embedded, self.before(plan))
        counts = [1 + len(feed.nodes) for feed in plan.feeds]
        hidden = torch.cat([self._before(feed.slot, feed.start, 1) for feed in plan.feeds])
        made = [predict(self.tensors, head, hidden, self.product) for head in range(max(counts))]
        return torch.cat([torch.stack([made[head][at] for head in range(count)]) for at, count in enumerate(counts)])

    def before(self, plan: StepPlan) -> torch.Tensor:
        """The hidden rows [n, hidden] before the tokens of a plan's feeds."""
        rows = [self._before(feed.slot, feed.start, feed.count) for feed in plan.feeds]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Rows x [n, hidden] by one of the heads' matrices."""
        return x @ self.tensors[name].t()

    def left(self, plan: StepPlan, x: torch.Tensor) -> None:
        """The feature layer has left rows x [n, hidden]; the last of each feed is where its chain goes on."""
        end = 0
        for feed in plan.feeds:
            end += feed.count
            self._tips[feed.slot] = x[end - 1 : end]

    def _before(self, slot: int, start: int, count: int) -> torch.Tensor:
        """Hidden rows of the KV indices before [start, start + count)."""
        known = self.slots[slot]
        if start >= len(known):
            return self._tips[slot]
        if start > 0:
            return self.features.read(known.table, start - 1, start + count - 1)
        rows = self.features.read(known.table, 0, count - 1)
        return torch.cat((rows.new_zeros(1, rows.shape[1]), rows))


class Narrow(Llama):
    """A llama whose head chooses from a part of the vocabulary."""

    barred: torch.Tensor  # [vocabulary] bool

    def head(self, x: Value) -> Value:
        return super().head(x).masked_fill(self.barred, -torch.inf)


class TorchHeads(TorchRunner):
    """Heads in torch, on the target's slots and block ids."""

    def __init__(self, heads: Heads, target: TorchRunner, source: WeightSource) -> None:
        config, weight = heads_config(heads.kind, target.model.config), next(target.model.parameters())
        model = load_model(HeadsSource(heads, target.model.config, source), weight.dtype, weight.device, config)
        model.__class__ = Narrow
        barred = torch.ones(config.vocab_size, dtype=torch.bool)
        barred[torch.from_numpy(heads.vocab).long()] = False
        model.barred = barred.to(weight.device)
        pool = KVPool(config, target.pool.num_blocks, target.pool.block_size, target.pool.dtype, weight.device)
        super().__init__(model, pool, target.threads, target.slots)
        self.target = target
        self.entrance = Entrance(heads, target.features, target.slots)
        target.features.reserve()

    def _enter(self, plan: StepPlan, slots: Slots, ctx: Context) -> torch.Tensor:
        embedded = self.target.model.embed(ctx) if self.entrance.heads.kind == FEATURE else None
        rows = self.entrance.rows(plan, embedded)
        return rows.to(next(self.model.parameters()).dtype)

    def _leave(self, plan: StepPlan, slots: Slots, x: torch.Tensor) -> None:
        if self.entrance.heads.kind == FEATURE:
            self.entrance.left(plan, x)
