"""The native core's arithmetic of a model that does not fit into memory in float32, said in torch."""

from collections.abc import Iterable

import torch

from headrace.backends.native.weights import PackedWeights
from headrace.models.base import Model
from headrace.models.layers import Embedding, Linear
from headrace.runner.streamed import Streamed
from headrace.weights.loader import Allocator
from headrace.weights.source import WeightSource
from tests.native_reference import centre, narrow


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
