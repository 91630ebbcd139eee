"""Stored hidden rows of the torch back end, on any device."""

import torch

from headrace.runner.stored_rows import StoredRows


class EagerStoredRows(StoredRows):
    """Stored rows in the model's dtype, on its device."""

    def __init__(self, num_blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(num_blocks, block_size, width, dtype.itemsize)
        self.dtype, self.device = dtype, device

    def allocate(self) -> torch.Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(parts)

    def unit(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(rows, dim=-1)

    def nearest(self, rows: torch.Tensor, nodes: torch.Tensor) -> list[float]:
        best: list[float] = (rows @ nodes.T).amax(0).tolist()
        return best
