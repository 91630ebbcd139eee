"""Device side of the paged KV cache: the tensors of the blocks."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from headrace.data.config import ModelConfig
from headrace.kv.layout import kv_places, kv_shapes

KVRounding = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]  # (layer, k, v) -> k, v


class KVPool:
    """K/V of every layer in `num_blocks` blocks of `block_size` tokens.

    data: one tensor [layers, 2, num_blocks, block_size, kv_heads, head_dim], zeros at first, so that nothing read from it is
    NaN by accident. A flat position is block * block_size + offset. K is stored as attention uses it, after norm and rotary.
    rounding: applied to k and v [n, kv_heads, head_dim] of a layer before they are stored.
    window, window_blocks: layers with a window of at most `window` tokens are in a pool of their own, `parts[1]`.
    places: pool and layer of the K/V that each of the model's layers reads.

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
        window: int = 0,
        window_blocks: int = 0,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self._rounding = rounding
        self.places = kv_places(config, window)
        self.parts = [
            torch.zeros((shape.layers, 2, count, block_size, shape.heads, shape.head_dim), dtype=dtype, device=device)
            for shape, count in zip(kv_shapes(config, window), (num_blocks, window_blocks), strict=False)
        ]
        self.data = self.parts[0]
        self._flats = [part.flatten(2, 3) for part in self.parts]  # [layers, 2, positions, kv_heads, head_dim], views

    @property
    def bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(part.nbytes for part in self.parts)

    def pool_of(self, layer: int) -> int:
        """Number of a layer's pool."""
        return self.places[layer].pool if len(self.parts) > 1 else 0

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, views [num_blocks, block_size, kv_heads, head_dim]."""
        pool, at = self.places[layer]
        return self.parts[pool][at, 0], self.parts[pool][at, 1]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v [n, kv_heads, head_dim] at the flat positions `slots` [n] int64, rounded to the pool's dtype."""
        if self._rounding is not None:
            k, v = self._rounding(layer, k, v)
        pool, at = self.places[layer]
        self._flats[pool][at, 0].index_copy_(0, slots, k.to(self.dtype))
        self._flats[pool][at, 1].index_copy_(0, slots, v.to(self.dtype))

    def read_blocks(self, blocks: Sequence[int], out: np.ndarray) -> None:
        """Copy whole blocks of all layers into `out` [blocks * bytes of a block] uint8."""
        out[:] = as_bytes(self.data[:, :, list(blocks)].movedim(2, 0))

    def write_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        """Copy whole blocks of all layers from `data` [blocks * bytes of a block] uint8."""
        layers, two, _, *sizes = self.data.shape
        values = from_bytes(data, self.data).view(len(blocks), layers, two, *sizes)
        self.data[:, :, list(blocks)] = values.movedim(0, 2)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]], pool: int = 0) -> None:
        """Copy whole blocks (from, to) of all layers of a pool. All sources are read before anything is written."""
        if pairs:
            source, target = self._columns(pairs)
            self.parts[pool][:, :, target] = self.parts[pool][:, :, source]

    def move(self, pairs: Sequence[tuple[int, int]], pool: int = 0) -> None:
        """Copy single flat positions (from, to) of all layers of a pool. All sources are read before anything is written."""
        if pairs:
            source, target = self._columns(pairs)
            self._flats[pool][:, :, target] = self._flats[pool][:, :, source]

    def _columns(self, pairs: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = torch.tensor(pairs, dtype=torch.int64, device=self.data.device).unbind(1)
        return source, target


def as_bytes(values: torch.Tensor) -> np.ndarray:
    """The memory of a tensor's values in their order, [bytes] uint8."""
    result: np.ndarray = values.contiguous().view(torch.uint8).cpu().numpy().reshape(-1)
    return result


def from_bytes(data: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """The reverse of `as_bytes`: values [n] of the dtype and on the device of `like`."""
    return torch.from_numpy(data).view(like.dtype).to(like.device)


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
        empty = {sizes: self.data.new_zeros(num_blocks, block_size, *sizes) for sizes in config.kv_sizes}
        self._empty = [empty[layer.kv_heads, layer.head_dim] for layer in config.layers]
        self._config = config
        self._written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._written.get(self._config.kv_layer(layer)) or (self._empty[layer], self._empty[layer])

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        empty = self._empty[layer]
        flat = empty.flatten(0, 1)
        keys, values = (flat.index_copy(0, slots, rows.to(self.dtype)).view_as(empty) for rows in (k, v))
        self._written[layer] = keys, values
