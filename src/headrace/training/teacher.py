"""The target as the teacher of draft heads, and batches of its texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import softmax

from headrace.data.config import ModelConfig
from headrace.models.registry import describe
from headrace.startup.opening import Opened
from headrace.training.feature_layer import norm
from headrace.training.texts import Text
from headrace.weights.loader import read_part
from headrace.weights.parts import plan


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
        raise ValueError(f"heads need a decoder that ends in an RMSNorm, and {opened.name} is none")
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
