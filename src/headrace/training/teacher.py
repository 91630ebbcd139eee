"""The target as the teacher of draft heads, batches of its texts, and the heads' feature layer with gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softmax

from headrace.data.config import ModelConfig, RopeConfig
from headrace.models.layers import frequencies
from headrace.models.registry import describe
from headrace.runner.heads import LAYER, Tensors, unit
from headrace.startup.opening import Opened
from headrace.training.texts import Text
from headrace.weights.loader import read_part
from headrace.weights.parts import plan


class FeatureLayer:
    """The feature layer over texts [b, t], unrolled along the draft.

    Pass 0 reads the target's rows; pass d reads the rows of pass d − 1, as a draft chain does.
    """

    def __init__(self, tensors: Tensors, config: ModelConfig, length: int) -> None:
        self.tensors = tensors
        self.config = config
        (self.layer,) = config.layers
        rope = self.layer.rope or RopeConfig()
        angular = torch.from_numpy(frequencies(rope, rope.dim or self.layer.head_dim))
        phase = torch.arange(length, dtype=torch.float64)[:, None] * angular
        self.cos, self.sin = phase.cos().float(), phase.sin().float()
        # K and V [b, heads, t, head_dim] of each pass.
        self.passes: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, x: torch.Tensor) -> torch.Tensor:
        """Run the next pass over rows x [b, t, hidden]. Returns rows of the same shape."""
        w, eps = self.tensors, self.config.norm_eps
        normed = norm(x, w[LAYER + "input_layernorm.weight"], eps)
        q, k, v = (self._heads(normed @ w[f"{LAYER}self_attn.{name}_proj.weight"].t()) for name in "qkv")
        x = x + self._attend(self._rotate(q), self._rotate(k), v) @ w[LAYER + "self_attn.o_proj.weight"].t()
        normed = norm(x, w[LAYER + "post_attention_layernorm.weight"], eps)
        gate, up = (normed @ w[f"{LAYER}mlp.{name}_proj.weight"].t() for name in ("gate", "up"))
        return x + (silu(gate) * up) @ w[LAYER + "mlp.down_proj.weight"].t()

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.layer.head_dim)).transpose(1, 2)

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Apply rotary positions to the pairs (i, i + dim / 2)."""
        dim = 2 * self.cos.shape[-1]
        a, b = x[..., :dim].chunk(2, -1)
        rotated = torch.cat((a * self.cos - b * self.sin, b * self.cos + a * self.sin, x[..., dim:]), -1)
        return rotated.to(x.dtype)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention in which row p of pass d sees rows 0 … p − d of pass 0, and one row of each later pass: its own chain's."""
        groups = self.layer.heads // self.layer.kv_heads
        k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
        self.passes.append((k, v))
        depth, length = len(self.passes) - 1, q.shape[2]
        scale = self.layer.head_dim**-0.5
        first = (q @ self.passes[0][0].transpose(2, 3)).float() * scale
        mask = torch.ones(length, length, dtype=torch.bool).tril(-depth)
        chain = [(_delayed(k, depth - d), _delayed(v, depth - d)) for d, (k, v) in enumerate(self.passes) if d > 0]
        scores = [first.masked_fill(~mask, -torch.inf), *((q * k).sum(-1, keepdim=True).float() * scale for k, _ in chain)]
        weights = softmax(torch.cat(scores, -1), -1).to(v.dtype)
        out = weights[..., :length] @ self.passes[0][1]
        for index, (_, value) in enumerate(chain):
            out = out + weights[..., length + index : length + index + 1] * value
        return out.transpose(1, 2).flatten(2)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of rows x [..., width], float32."""
    return unit(x, eps) * weight


def _delayed(x: torch.Tensor, count: int) -> torch.Tensor:
    """Shift x [b, heads, t, dim] by `count` rows to later positions; zeros fill the first rows."""
    return x if count == 0 else torch.cat((torch.zeros_like(x[:, :, :count]), x[:, :, :-count]), 2)


def shifted(x: torch.Tensor) -> torch.Tensor:
    """Shift rows x [b, t, width] by one position to later ones; zeros fill the first row."""
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


@dataclass(frozen=True, slots=True)
class Teacher:
    """The parts of the target that training of heads needs.

    embeddings: [vocabulary, hidden] bfloat16. norm: [hidden], weight of the last norm.
    head, bias: lm_head restricted to the heads' vocabulary, [n, hidden] bfloat16 and [n].
    normed: the last layer ends in a norm, so the lm_head reads its rows directly; `norm` then holds their length.
    """

    config: ModelConfig
    embeddings: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    bias: torch.Tensor | None = None
    normed: bool = False

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits [..., n] float32 over the heads' vocabulary, of rows [..., hidden] after the last norm."""
        logits = (rows.to(torch.bfloat16) @ self.head.t()).float()
        return logits if self.bias is None else logits + self.bias

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows [..., hidden] after the last layer from concatenated rows [..., width]."""
        return hidden[..., -self.config.hidden_size :]

    def probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's probabilities over the heads' vocabulary, of rows [n, hidden] after its last layer."""
        return softmax(self.logits(hidden if self.normed else norm(hidden, self.norm, self.config.norm_eps)), -1)


def read_teacher(opened: Opened, vocab: torch.Tensor) -> Teacher:
    """Read the needed tensors from the target's file. vocab: token ids of the heads. Raises WeightError, ValueError."""
    model, source = describe(opened.config), opened.source
    plans = plan(model, source)

    def read(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.cat([read_part(part, source, dtype) for part in plans[name]])

    normed = model.norm is None and model.encoder is not None
    if not normed and (model.norm is None or model.norm.kind != "rms" or "tokens.weight" not in plans):
        raise ValueError(f"heads need a decoder that ends in an RMSNorm, and {opened.name} is not one")
    embeddings = read("tokens.weight", torch.bfloat16)
    head = read("output.weight", torch.bfloat16) if "output.weight" in plans else embeddings
    bias = read("output.bias").flatten()[vocab] if "output.bias" in plans else None
    weight = _normed_length(read, opened.config) if normed else read("norm.weight") * opened.config.head_scale
    return Teacher(opened.config, embeddings, weight, head[vocab], bias, normed)


def _normed_length(read: Callable[[str], torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """Return [hidden], all equal: the root mean square of a row after the last layer's norm."""
    weight, bias = (read(f"layers.{config.num_layers - 1}.mlp_norm.{name}") for name in ("weight", "bias"))
    return torch.full_like(weight, float((weight**2 + bias**2).mean().sqrt()))


@dataclass(frozen=True, slots=True)
class Batch:
    """Padded texts: tokens [b, t], hidden rows [b, t, width], and a mask [b, t] of the rows that predict an answer's token."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def of(texts: Sequence[Text]) -> "Batch":
        length, width = max(len(text.tokens) for text in texts), texts[0].hidden.shape[1]
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        hidden = torch.zeros(len(texts), length, width, dtype=torch.bfloat16)
        rows = torch.zeros(len(texts), length, dtype=torch.bool)
        for index, text in enumerate(texts):
            end = len(text.tokens)
            tokens[index, :end], hidden[index, :end], rows[index, text.answer - 1 : end] = text.tokens, text.hidden, True
        return Batch(tokens, hidden, rows)
