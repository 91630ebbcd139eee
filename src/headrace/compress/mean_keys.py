"""Mean of the keys of each layer over texts. The K/V pool stores keys less this mean, so that rounding them loses less."""

from collections.abc import Sequence

import numpy as np
import torch

from headrace.data.progress import Progress, Silent
from headrace.kv.layout import kv_shape
from headrace.models.base import Model
from headrace.runner.last_use import by_softmax_alone
from headrace.runner.record import record
from headrace.runner.streamed import OneLayer, Streamed
from headrace.weights.source import WeightSource

TOKENS = 4096  # enough for stable means


class KeySums(OneLayer):
    """One-layer K/V pool that also sums the keys that layers store."""

    def __init__(self, model: Model, tokens: int, dtype: torch.dtype) -> None:
        super().__init__(model, tokens, dtype)
        layers, heads, head_dim = kv_shape(model.config)
        self.sums = torch.zeros(layers, heads, head_dim, dtype=torch.float64)
        self.counts = torch.zeros(layers, 1, 1, dtype=torch.float64)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.sums[layer] += k.double().sum(0)
        self.counts[layer] += len(k)
        super().write(layer, slots, k, v)


def mean_keys(source: WeightSource, texts: Sequence[Sequence[int]], progress: Progress | None = None) -> np.ndarray:
    """Mean of each layer's keys after norm and rotary embedding: float32 [layers, KV heads * head size].

    0 for layers whose scores are used by more than softmax, which a constant would change. Computed layer by layer in float32.
    """
    pools: list[KeySums] = []

    def pool(model: Model, tokens: int, dtype: torch.dtype) -> OneLayer:
        pools.append(KeySums(model, tokens, dtype))
        return pools[-1]

    progress = progress or Silent()
    progress.start("the mean of keys", len(texts), unit="texts")
    streamed = Streamed(source, pool=pool)
    for _ in streamed.logits(texts, 1):
        progress.advance(1)
    progress.finish()
    (means,) = pools
    centre = means.sums / means.counts.clamp_min(1)
    for segment in record(streamed.model, embeds=False).layers:
        for node in segment.nodes:
            if node.op == "attention" and not by_softmax_alone(node):
                centre[node.settings["layer"]] = 0
    rows: np.ndarray = centre.flatten(1).float().numpy()
    return rows
