"""Device side of the paged KV cache: the tensors of the blocks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from headrace.data.config import ModelConfig
from headrace.kv.layout import kv_shape

KVRounding = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # (layer, k, v) -> k, v


class KVPool:
    """K/V of every layer in `num_blocks` blocks of `block_size` tokens.

    data: one tensor [layers, 2, num_blocks, block_size, kv_heads, head_dim], zeros at first, so that nothing read from it is
    NaN by accident. A flat position is block * block_size + offset. K is stored as attention uses it, after norm and rotary.
    rounding: applied to k and v [n, kv_heads, head_dim] of a layer before they are stored.

    Source: Kwon et al., "PagedAttention", arXiv 2309.06180.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        rounding: KVRounding | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._rounding = rounding
        layers, heads, head_dim = kv_shape(config)
        shape = (layers, 2, num_blocks, block_size, heads, head_dim)
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._flat = self.data.flatten(2, 3)  # [layers, 2, positions, kv_heads, head_dim], a view

    @property
    def bytes(self) -> int:
        """Bytes of the pool: num_blocks * KVShape.block_bytes."""
        return self.data.nbytes

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, views [num_blocks, block_size, kv_heads, head_dim]."""
        return self.data[layer, 0], self.data[layer, 1]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [n, kv_heads, head_dim] at the flat positions `slots` [n] int64, rounded to the pool's dtype."""
        if self._rounding is not None:
            k, v = self._rounding(layer, k, v)
        self._flat[layer, 0].index_copy_(0, slots, k.to(self.dtype))
        self._flat[layer, 1].index_copy_(0, slots, v.to(self.dtype))

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (from, to) of all layers. All sources are read before anything is written."""
        if pairs:
            source, target = self._columns(pairs)
            self.data[:, :, target] = self.data[:, :, source]

    def move(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy single flat positions (from, to) of all layers. All sources are read before anything is written."""
        if pairs:
            source, target = self._columns(pairs)
            self._flat[:, :, target] = self._flat[:, :, source]

    def _columns(self, pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = torch.tensor(pairs, dtype=torch.int64, device=self.data.device).unbind(1)
        return source, target


class FreshPool(KVPool):
    """K/V with gradients, for whole texts that are fed once. Each write replaces the layer's K/V by new tensors, so that no
    layer's gradient runs through another's rows."""

    def __init__(
        self,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(replace(config, layers=config.layers[:1]), num_blocks, block_size, dtype, device)
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._written.get(layer) or super().kv(0)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        empty, shape = self._flat[0, 0], self.data[0, 0].shape
        keys, values = (empty.index_copy(0, slots, rows.to(self.dtype)).view(shape) for rows in (k, v))
        self._written[layer] = keys, values
