"""What heads learn from: the target's own numbers, and its texts side by side."""

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
    """What heads need of the target: its embeddings, its last norm, and its lm_head over the heads' vocabulary. `normed`: its
    last layer ends in a norm, so that its rows go to the lm_head as they are; `norm` then is how long they are."""

    config: ModelConfig
    embeddings: torch.Tensor  # [vocabulary, hidden] bfloat16
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [heads' vocabulary, hidden] bfloat16
    bias: torch.Tensor | None = None  # [heads' vocabulary], of the lm_head
    normed: bool = False

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [..., hidden] after the last norm -> [..., heads' vocabulary], float32."""
        made = (rows.to(torch.bfloat16) @ self.head.t()).float()
        return made if self.bias is None else made + self.bias

    def last(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of rows side by side those after the last layer: [..., width] -> [..., hidden]."""
        return hidden[..., -self.config.hidden_size :]

    def probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's own distribution at rows [n, hidden] after its last layer."""
        return softmax(self.logits(hidden if self.normed else norm(hidden, self.norm, self.config.norm_eps)), -1)


def read_teacher(opened: Opened, vocab: torch.Tensor) -> Teacher:
    """Read from the target's file what is needed, and no more. Raises WeightError, ValueError."""
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
    weight = _length(read, opened.config) if normed else read("norm.weight") * opened.config.head_scale
    return Teacher(opened.config, embeddings, weight, head[vocab], bias, normed)


def _length(read: Callable[[str], torch.Tensor], config: ModelConfig) -> torch.Tensor:
    """[hidden], by which a row of length 1 is as long as what the last layer's norm leaves."""
    weight, bias = (read(f"layers.{config.num_layers - 1}.mlp_norm.{name}") for name in ("weight", "bias"))
    return torch.full_like(weight, float((weight**2 + bias**2).mean().sqrt()))


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side: tokens [b, t], hidden [b, t, width], and the rows after which answers' tokens come."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def of(texts: Sequence[Text]) -> "Batch":
        length, width = max(len(text.tokens) for text in texts), texts[0].hidden.shape[1]
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        hidden = torch.zeros(len(texts), length, width, dtype=torch.bfloat16)
        rows = torch.zeros(len(texts), length, dtype=torch.bool)
        for at, text in enumerate(texts):
            end = len(text.tokens)
            tokens[at, :end], hidden[at, :end], rows[at, text.answer - 1 : end] = text.tokens, text.hidden, True
        return Batch(tokens, hidden, rows)
