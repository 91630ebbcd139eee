"""Runs a model that need not fit into memory: all texts go through a layer before the next layer's weights are read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.models.layers import Holder
from headrace.models.registry import describe, read_config
from headrace.ops.context import Context, FeedRows, build
from headrace.weights.loader import Allocator, fill, read_part
from headrace.weights.parts import plan
from headrace.weights.source import WeightSource

BLOCK = 16
TABLE = "tokens"  # holder of the embedding


class OneLayer(KVPool):
    """K/V of the layer that runs, for whole texts: `together` texts of at most `tokens` tokens at once."""

    def __init__(self, model: Model, tokens: int, dtype: torch.dtype, together: int = 1) -> None:
        self._each = -(-tokens // BLOCK)
        super().__init__(replace(model.config, layers=model.config.layers[:1]), self._each * together, BLOCK, dtype)

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return super().kv(0)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        super().write(0, slots, k, v)

    def context(self, *texts: Sequence[int]) -> Context:
        tables = [range(at * self._each, (at + 1) * self._each) for at in range(len(texts))]
        return build(self, [FeedRows(list(text), list(table)) for text, table in zip(texts, tables, strict=True)])


class Streamed:
    """Dequantised weights of an open file in torch; the embedding, a layer or the head is in memory only while it is held."""

    def __init__(
        self,
        source: WeightSource,
        dtype: torch.dtype = torch.float32,
        pool: Callable[[Model, int, torch.dtype], OneLayer] = OneLayer,
    ) -> None:
        """pool: makes the K/V store of a model, for the tokens of a text."""
        self.model = describe(read_config(source))
        if self.model.config.shares_kv:
            raise ValueError(f"{source.path}: layers that share K and V do not go one by one; begin with the original")
        if len(self.model.config.kv_sizes) > 1:
            raise ValueError(
                f"{source.path}: layers with K/V of other sizes do not go one by one; take a model of equal layers"
            )
        self.dtype = dtype
        self._pool = pool
        self._source = source
        self._plans = plan(self.model, source)
        self._holders = dict(self.model.holders())
        self.head = "output" if "output" in self._holders else TABLE
        self._make(path for path in self._holders if path not in (TABLE, self.head) and not path.startswith("layers."))

    @contextmanager
    def holding(self, name: str) -> Iterator[dict[str, Holder]]:
        """While open, the named part has its weights: "tokens", "layers.3", or `head`. Yields its holders by path."""
        held = {path: holder for path, holder in self._holders.items() if f"{path}.".startswith(f"{name}.")}
        self._make(held)
        yield held
        for holder in held.values():
            for field in holder.params():
                setattr(holder, field, None)

    def contexts(self, texts: Sequence[Sequence[int]]) -> list[Context]:
        """One context per text."""
        pool = self._pool(self.model, max(map(len, texts)), self.dtype)
        return [pool.context(text) for text in texts]

    @torch.inference_mode()
    def logits(self, texts: Sequence[Sequence[int]], count: int) -> Iterator[np.ndarray]:
        """Logits [count, vocabulary] of the last `count` tokens of each text, one text after the other."""
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
        parts, target = self._plans[f"{path}.{field}"], getattr(holder, field)
        # Without a copy, so that the embedding is in memory once.
        if len(parts) == 1:
            setattr(holder, field, read_part(parts[0], self._source, target.dtype).contiguous())
        else:
            fill(target, parts, self._source)
        for part in parts:
            self._source.release(part.source)
