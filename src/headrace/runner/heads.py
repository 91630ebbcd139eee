"""Trained heads beside the target: they draft from its hidden rows, through its own lm_head.

heads (blockwise parallel decoding, Stern et al. 2018; Medusa, Cai et al. 2024): from the target's hidden row at one place,
head i says what comes i + 1 tokens later. feature (EAGLE, Li et al. 2024): one decoder layer reads the embedding of a token
and the hidden row before it, and gives what the target's hidden row at that token would be; from that the next, and so on.
Both read rows after the target's last layer, scaled to length, and end in a norm of their own and the target's lm_head, of
which they may have a part: the tokens they choose from. exit (LayerSkip, Elhoushi et al. 2024; the tuned lens, Belrose et al.
2023): from the row that some of the target's layers left, an affine map says what the row after all of them would be; it ends
as the others do.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.nn.functional import rms_norm, silu

from headrace.data.config import ModelConfig, RopeConfig
from headrace.data.plan import Feed
from headrace.models.registry import describe
from headrace.runner.program import AnyLive
from headrace.runner.span import Span
from headrace.runner.stored_rows import Kept
from headrace.weights.parts import plan
from headrace.weights.source import TensorInfo, WeightSource

HEADS, FEATURE, EXIT = "heads", "feature", "exit"
LAYER = "layers.0."
UNIT_EPS = 1e-6

Tensors = dict[str, torch.Tensor]
Product = Callable[[str, torch.Tensor], torch.Tensor]  # rows by the matrix of a name


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads in memory. `tensors`: heads.{i}.up.weight and down.weight, or embed.weight, hidden.weight and those of a llama
    layer, or exits.{i}.weight and bias, and may be sure.{i}.weight and bias; norm.weight; and vocab, the tokens to choose
    from, ascending. `count`: tokens they draft at once (feature: as many as it was trained for; exit: how many exits). Exit i
    stands after `layers[i]` layers; after `drafts` of them a draft is drawn."""

    kind: str
    count: int
    tensors: Tensors
    layers: tuple[int, ...] = ()
    drafts: int = 0

    @property
    def chains(self) -> bool:
        """Whether they go on from rows that they left themselves."""
        return self.kind == FEATURE

    @property
    def features(self) -> bool:
        """Whether they read rows that the target has left for known tokens; an exit reads those of the step it is in."""
        return self.kind != EXIT

    @property
    def span(self) -> Span | None:
        """What of the target runs for them in a step of theirs."""
        return Span(self.drafts) if self.kind == EXIT else None

    @property
    def exit(self) -> int:
        """The number of the exit that drafts."""
        return self.layers.index(self.drafts)

    @property
    def judges(self) -> bool:
        """Whether each exit has a classifier, which says if it is right."""
        return "sure.0.weight" in self.tensors

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
        head_bias=target.head_bias,
        never=target.never,
    )


def shapes(kind: str, count: int, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that such heads have, but for the vocabulary."""
    width = target.hidden_size
    made: dict[str, tuple[int, ...]] = {"norm.weight": (width,)}
    if kind == HEADS:
        return made | {f"heads.{i}.{name}.weight": (width, width) for i in range(count) for name in ("up", "down")}
    if kind == EXIT:
        weights: dict[str, tuple[int, ...]] = {f"exits.{i}.weight": (width, width) for i in range(count)}
        return made | weights | {f"exits.{i}.bias": (width,) for i in range(count)}
    (layer,) = heads_config(kind, target).layers
    attention = {name: (rows, width) for name, rows in layer.qkv.items()} | {"o": (width, layer.q_size)}
    mlp = {"gate": (layer.ffn, width), "up": (layer.ffn, width), "down": (width, layer.ffn)}
    made |= {"embed.weight": (width,), "hidden.weight": (width, width)}
    made |= {f"{LAYER}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    made |= {f"{LAYER}self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    return made | {f"{LAYER}mlp.{name}_proj.weight": shape for name, shape in mlp.items()}


def sure_shapes(count: int, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of the exits' classifiers."""
    made: dict[str, tuple[int, ...]] = {f"sure.{i}.weight": (target.hidden_size,) for i in range(count)}
    return made | {f"sure.{i}.bias": (1,) for i in range(count)}


def unit(x: torch.Tensor, eps: float = UNIT_EPS) -> torch.Tensor:
    """Rows x [..., width] scaled to a mean square of 1, float32."""
    return rms_norm(x.float(), x.shape[-1:], eps=eps)


def predict(tensors: Tensors, head: int, hidden: torch.Tensor, product: Product | None = None) -> torch.Tensor:
    """What the norm and the lm_head take of head `head`: [..., hidden], from the target's rows of the same shape."""
    x, by = unit(hidden), product or (lambda name, x: x @ tensors[name].t())
    return x + by(f"heads.{head}.down.weight", silu(by(f"heads.{head}.up.weight", x)))


def affine(tensors: Tensors, exit: int, hidden: torch.Tensor, product: Product | None = None) -> torch.Tensor:
    """What the norm and the lm_head take at exit `exit`: [..., hidden], from the rows of that shape that its layers left."""
    by = product or (lambda name, x: x @ tensors[name].t())
    return by(f"exits.{exit}.weight", unit(hidden)) + tensors[f"exits.{exit}.bias"]


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
        fields = [name for name, there in (("weight", not target.tied_head), ("bias", target.head_bias)) if there]
        self._shared |= {f"lm_head.{field}": plans[f"output.{field}"][0].source for field in fields}

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

    def columns(self, name: str) -> np.ndarray | None:
        return self._source.columns(self._shared[name]) if name in self._shared else None

    def mapped(self, name: str) -> bool:
        return name in self._shared and self._source.mapped(self._shared[name])

    def release(self, name: str) -> None:
        if name in self._shared:
            self._source.release(self._shared[name])

    def close(self) -> None:
        """The target's file is the target's."""


class HeadInputs:
    """The rows that heads begin with, from those that the target left or, in a chain, that they left themselves."""

    def __init__(self, heads: Heads) -> None:
        self.chains = heads.chains
        self.tensors = {name: x.float() for name, x in heads.tensors.items() if not name.startswith(LAYER)}
        self._tips: dict[int, torch.Tensor] = {}  # by slot: the row that the feature layer left last

    def rows(self, feeds: Sequence[Feed], slots: Mapping[int, AnyLive], features: Kept) -> Any:
        """Rows [n, hidden] for the feeds: those before their tokens, or what each head makes of the last of these."""
        if self.chains:
            rows = [self._before(slots[feed.slot], feed, feed.count, features) for feed in feeds]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        counts = [1 + len(feed.nodes) for feed in feeds]
        hidden = torch.cat([self._before(slots[feed.slot], feed, 1, features) for feed in feeds])
        made = [predict(self.tensors, head, hidden, self.product) for head in range(max(counts))]
        return torch.cat([torch.stack([made[head][at] for head in range(count)]) for at, count in enumerate(counts)])

    def at_exit(self, exit: int, hidden: Any) -> Any:
        """Rows [n, hidden] of an exit, from those that its layers left."""
        return affine(self.tensors, exit, torch.as_tensor(hidden), self.product)

    def sure(self, exit: int, row: np.ndarray) -> float:
        """By the classifier of an exit how likely it says what the whole model does, of its row [hidden], float64."""
        weight, bias = (self.tensors[f"sure.{exit}.{name}"].numpy().astype(np.float64) for name in ("weight", "bias"))
        logit = float((row * weight).sum() / np.sqrt((row**2).mean() + UNIT_EPS) + bias[0])
        return float(1 / (1 + np.exp(-logit)))

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Rows x [n, hidden] by one of the heads' matrices."""
        return x @ self.tensors[name].t()

    def left(self, feeds: Sequence[Feed], hidden: torch.Tensor | np.ndarray) -> None:
        """The feature layer has left rows [n, hidden]; the last of each feed is where its chain goes on."""
        hidden, end = torch.as_tensor(hidden), 0
        for feed in feeds:
            end += feed.count
            self._tips[feed.slot] = hidden[end - 1 : end]

    def _before(self, live: AnyLive, feed: Feed, count: int, features: Kept) -> torch.Tensor:
        """Hidden rows of the `count` KV indices before a feed's."""
        start = feed.start
        if start >= len(live):
            return self._tips[feed.slot]
        if start > 0:
            return torch.as_tensor(features.read(live.table, start - 1, start + count - 1))
        rows = torch.as_tensor(features.read(live.table, 0, count - 1))
        return torch.cat((rows.new_zeros(1, rows.shape[1]), rows))
