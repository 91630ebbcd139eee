"""A model that does not fit into memory in float32: all texts go through a layer before the next layer's weights are read."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from headrace.kv.pool import KVPool
from headrace.layers.embedding import Embedding
from headrace.layers.holder import Holder
from headrace.layers.linear import Linear
from headrace.models.base import Model
from headrace.models.registry import describe, read_config
from headrace.native.weights import PackedWeights
from headrace.ops.context import Context, FeedRows, build
from headrace.weights.loader import Allocator, fill
from headrace.weights.parts import plan
from headrace.weights.source import WeightSource
from tests.native_reference import centre, narrow

BLOCK = 16
TABLE = "tokens"  # the holder of the embedding


class OneLayer(KVPool):
    """K and V of whichever layer runs, for texts that are fed whole."""

    def __init__(self, model: Model, tokens: int, dtype: torch.dtype) -> None:
        super().__init__(replace(model.config, layers=model.config.layers[:1]), -(-tokens // BLOCK), BLOCK, dtype)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().kv(0)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().write(0, slots, k, v)

    def context(self, text: Sequence[int]) -> Context:
        return build(self, [FeedRows(list(text), list(range(-(-len(text) // BLOCK))), 0)])


class Streamed:
    """The dequantised weights of an open file in torch: of the table of tokens, a layer or the head while it is held."""

    def __init__(self, source: WeightSource, dtype: torch.dtype = torch.float32) -> None:
        self.model = describe(read_config(source))
        self.dtype = dtype
        self._source = source
        self._plans = plan(self.model, source)
        self._holders = dict(self.model.holders())
        self.head = "output" if "output" in self._holders else TABLE
        self._make(path for path in self._holders if path not in (TABLE, self.head) and not path.startswith("layers."))

    @contextmanager
    def holding(self, name: str) -> Iterator[None]:
        """While open, what `name` says has its weights: "tokens", "layers.3", or `head`."""
        paths = [path for path in self._holders if f"{path}.".startswith(f"{name}.")]
        self._make(paths)
        yield
        for path in paths:
            for field in self._holders[path].params():
                setattr(self._holders[path], field, None)

    def contexts(self, texts: Sequence[Sequence[int]]) -> list[Context]:
        pool = OneLayer(self.model, max(map(len, texts)), self.dtype)
        return [pool.context(text) for text in texts]

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]], count: int) -> Iterator[np.ndarray]:
        """Logits [count, vocabulary] that foretell the last `count` tokens of each text, one text after the other."""
        contexts = self.contexts(texts)
        with self.holding(TABLE):
            rows = [self.model.embed(context) for context in contexts]
        for number in range(self.model.config.num_layers):
            with self.holding(f"layers.{number}"):
                rows = [self.model.layer(number, x, context) for x, context in zip(rows, contexts, strict=True)]
        with self.holding(self.head):
            for x in rows:
                yield np.asarray(self.model.head(x[-count - 1 : -1]).numpy())

    def _make(self, paths: Iterable[str]) -> None:
        for path in paths:
            holder = self._holders[path]
            holder.create(Allocator(self.dtype))
            for field in holder.params():
                self._read(path, holder, field)
            holder.finish()

    def _read(self, path: str, holder: Holder, field: str) -> None:
        fill(getattr(holder, field), self._plans[f"{path}.{field}"], self._source)


class Narrowed(Streamed):
    """The core's own arithmetic said in torch (tests.native_reference), with the weights packed for `model`."""

    def __init__(self, source: WeightSource, dtype: torch.dtype, model: Model, weights: PackedWeights) -> None:
        self._packed = dict(model.holders())
        self._weights = weights
        super().__init__(source, dtype)

    def _make(self, paths: Iterable[str]) -> None:
        for path in paths:
            holder = self._holders[path]
            for field, spec in holder.params().items():
                if field != "weight" or not isinstance(holder, Linear | Embedding):
                    setattr(holder, field, Allocator(self.dtype).empty(spec.shape, spec.exact))
                    self._read(path, holder, field)
            narrow(holder, self._packed[path], self._weights, self.dtype)
            if not holder.params():
                holder.create(Allocator(self.dtype))
            if path.endswith(".qkv"):
                centre(self.model, int(path.split(".")[1]))
