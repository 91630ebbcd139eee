"""Trained heads that draft from a target's hidden rows, through its lm_head. All kinds read rows after the target's last layer
(an exit: after its own layers), scaled to length, and end in their own norm and the target's lm_head, or the rows of it for the
tokens they may choose.

heads (Stern et al., "Blockwise Parallel Decoding", arXiv 1811.03115; Cai et al., "Medusa", arXiv 2401.10774): from the hidden
row at one position, head i predicts the token i + 1 positions ahead.

feature (Li et al., "EAGLE", arXiv 2401.15077): one decoder layer reads the embedding of a token and the hidden row before it,
and predicts the target's hidden row at that token; from that the next one, and so on.

exit (Elhoushi et al., "LayerSkip", arXiv 2404.16710; Belrose et al., the tuned lens, arXiv 2303.08112): an affine map of the
row after some layers predicts the row after all layers.
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
from headrace.runner.stored_rows import StoredRows
from headrace.weights.parts import plan
from headrace.weights.source import TensorInfo, WeightSource

HEADS, FEATURE, EXIT = "heads", "feature", "exit"
LAYER = "layers.0."
UNIT_EPS = 1e-6

Tensors = dict[str, torch.Tensor]
Product = Callable[[str, torch.Tensor], torch.Tensor]  # rows by the matrix of a name


@dataclass(frozen=True, slots=True)
class Heads:
    """Trained heads in memory.

    tensors: heads.{i}.up.weight and down.weight; or embed.weight, hidden.weight and a llama layer's; or exits.{i}.weight and
    bias, optionally sure.{i}.weight and bias; norm.weight; vocab, the token ids to choose from, ascending. count: tokens
    drafted at once (feature: as trained; exit: number of exits). layers: exit i is after `layers[i]` layers. drafts: layers
    before the exit that drafts. several: layers below each exit in use, ascending, if more than that one are.
    """

    kind: str
    count: int
    tensors: Tensors
    layers: tuple[int, ...] = ()
    drafts: int = 0
    several: tuple[int, ...] = ()

    @property
    def chains(self) -> bool:
        """Whether they continue from rows that they computed themselves."""
        return self.kind == FEATURE

    @property
    def features(self) -> bool:
        """Whether they read the target's stored rows; an exit reads rows of the same step."""
        return self.kind != EXIT

    @property
    def used(self) -> tuple[int, ...]:
        """Layers below each exit in use, ascending; empty for heads that are no exits."""
        return (self.several or (self.drafts,)) if self.kind == EXIT else ()

    @property
    def span(self) -> Span | None:
        """The target's layers below the first exit in use; None for heads that are no exits."""
        return Span(self.used[0]) if self.used else None

    @property
    def exit(self) -> int:
        """The number of the exit that drafts."""
        return self.layers.index(self.drafts)

    @property
    def judges(self) -> bool:
        """Whether each exit has a classifier of its own confidence."""
        return "sure.0.weight" in self.tensors

    @property
    def vocab(self) -> np.ndarray:
        ids: np.ndarray = self.tensors["vocab"].numpy()
        return ids


def heads_config(kind: str, target: ModelConfig) -> ModelConfig:
    """The model configuration of heads: a feature layer has one layer, shaped like the target's; the others have none."""
    like = target.full_layer
    rope = replace(like.rope or RopeConfig(), interleaved=False)
    return ModelConfig(
        architecture="llama",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        layers=(replace(like, window=None, rope=rope, kv_from=None),) if kind == FEATURE else (),
        max_position=target.max_position,
        norm_eps=target.norm_eps,
        tied_head=target.tied_head,
        head_bias=target.head_bias,
        never=target.never,
    )


def shapes(kind: str, count: int, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of such heads, without the vocabulary."""
    width = target.hidden_size
    result: dict[str, tuple[int, ...]] = {"norm.weight": (width,)}
    if kind == HEADS:
        return result | {f"heads.{i}.{name}.weight": (width, width) for i in range(count) for name in ("up", "down")}
    if kind == EXIT:
        weights: dict[str, tuple[int, ...]] = {f"exits.{i}.weight": (width, width) for i in range(count)}
        return result | weights | {f"exits.{i}.bias": (width,) for i in range(count)}
    (layer,) = heads_config(kind, target).layers
    attention = {name: (rows, width) for name, rows in layer.qkv.items()} | {"o": (width, layer.q_size)}
    mlp = {"gate": (layer.ffn, width), "up": (layer.ffn, width), "down": (width, layer.ffn)}
    result |= {"embed.weight": (width,), "hidden.weight": (width, width)}
    result |= {f"{LAYER}{name}_layernorm.weight": (width,) for name in ("input", "post_attention")}
    result |= {f"{LAYER}self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    return result | {f"{LAYER}mlp.{name}_proj.weight": shape for name, shape in mlp.items()}


def classifier_shapes(count: int, target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the exit classifiers' tensors."""
    result: dict[str, tuple[int, ...]] = {f"sure.{i}.weight": (target.hidden_size,) for i in range(count)}
    return result | {f"sure.{i}.bias": (1,) for i in range(count)}


def unit(x: torch.Tensor, eps: float = UNIT_EPS) -> torch.Tensor:
    """Rows x [..., width] scaled to a mean square of 1, float32."""
    return rms_norm(x.float(), x.shape[-1:], eps=eps)


def predict(tensors: Tensors, head: int, hidden: torch.Tensor, product: Product | None = None) -> torch.Tensor:
    """The input of norm and lm_head for head `head`, [..., hidden], from the target's rows of that shape."""
    x, by = unit(hidden), product or (lambda name, x: x @ tensors[name].t())
    return x + by(f"heads.{head}.down.weight", silu(by(f"heads.{head}.up.weight", x)))


def affine(tensors: Tensors, exit: int, hidden: torch.Tensor, product: Product | None = None) -> torch.Tensor:
    """The input of norm and lm_head at exit `exit`, [..., hidden], from the rows after its layers."""
    by = product or (lambda name, x: x @ tensors[name].t())
    return by(f"exits.{exit}.weight", unit(hidden)) + tensors[f"exits.{exit}.bias"]


def enter(tensors: Tensors, embedded: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """The input of the feature layer: from tokens' embeddings and the hidden rows before them, [..., hidden] each."""
    return tensors["embed.weight"] * unit(embedded) + unit(before) @ tensors["hidden.weight"].t()


class HeadsSource:
    """The heads' tensors together with the target's embedding and lm_head, as the file of a llama model."""

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
        """Does nothing: the target's file belongs to the target."""


class HeadInputs:
    """The input rows of heads: from the target's stored rows, or in a chain from the heads' own last rows."""

    def __init__(self, heads: Heads) -> None:
        self.chains = heads.chains
        self.tensors = {name: x.float() for name, x in heads.tensors.items() if not name.startswith(LAYER)}
        self._tips: dict[int, torch.Tensor] = {}  # by slot: the feature layer's last row

    def rows(self, feeds: Sequence[Feed], slots: Mapping[int, AnyLive], features: StoredRows) -> Any:
        """Rows [n, hidden] for the feeds: the rows before their tokens, or each head's map of the last of these."""
        if self.chains:
            rows = [self._before(slots[feed.slot], feed, feed.count, features) for feed in feeds]
            return rows[0] if len(rows) == 1 else torch.cat(rows)
        counts = [1 + len(feed.nodes) for feed in feeds]
        hidden = torch.cat([self._before(slots[feed.slot], feed, 1, features) for feed in feeds])
        predictions = [predict(self.tensors, head, hidden, self.product) for head in range(max(counts))]
        return torch.cat([torch.stack([predictions[head][at] for head in range(count)]) for at, count in enumerate(counts)])

    def at_exit(self, exit: int, hidden: Any) -> Any:
        """Rows [n, hidden] of an exit, from the rows after its layers."""
        return affine(self.tensors, exit, torch.as_tensor(hidden), self.product)

    def confidence(self, exit: int, row: np.ndarray) -> float:
        """The exit classifier's probability that the exit equals the full model, of its row [hidden] float64."""
        weight, bias = (self.tensors[f"sure.{exit}.{name}"].numpy().astype(np.float64) for name in ("weight", "bias"))
        logit = float((row * weight).sum() / np.sqrt((row**2).mean() + UNIT_EPS) + bias[0])
        return float(1 / (1 + np.exp(-logit)))

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Rows x [n, hidden] times one of the heads' matrices."""
        return x @ self.tensors[name].t()

    def store_tips(self, feeds: Sequence[Feed], hidden: torch.Tensor | np.ndarray) -> None:
        """Store the last row of each feed, of the feature layer's rows [n, hidden]: its chain goes on from there."""
        hidden, end = torch.as_tensor(hidden), 0
        for feed in feeds:
            end += feed.count
            self._tips[feed.slot] = hidden[end - 1 : end]

    def _before(self, live: AnyLive, feed: Feed, count: int, features: StoredRows) -> torch.Tensor:
        """Hidden rows of the `count` KV indices before a feed's."""
        start = feed.start
        if start >= len(live):
            return self._tips[feed.slot]
        if start > 0:
            return torch.as_tensor(features.read(live.table, start - 1, start + count - 1))
        rows = torch.as_tensor(features.read(live.table, 0, count - 1))
        return torch.cat((rows.new_zeros(1, rows.shape[1]), rows))
