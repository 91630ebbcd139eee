"""The device side of the paged cache: where values land, and copies that do not read what they wrote."""

import pytest
import torch

from headrace.data.config import LayerConfig, ModelConfig
from headrace.kv.pool import KVPool

CONFIG = ModelConfig("case", 10, 12, (LayerConfig(3, 1, 4, 1),) * 2, 64)


def pool(dtype: torch.dtype = torch.float32) -> KVPool:
    made = KVPool(CONFIG, num_blocks=5, block_size=4, dtype=dtype)
    made.data.copy_(torch.arange(made.data.numel()).view(made.data.shape))
    return made


def test_rows_are_written_to_their_slots() -> None:
    made = pool()
    before = made.data.clone()
    k, v = torch.randn(2, 1, 4), torch.randn(2, 1, 4)
    made.write(1, torch.tensor([3 * 4 + 2, 0]), k, v)
    keys, values = made.kv(1)
    assert torch.equal(keys[3, 2], k[0])
    assert torch.equal(values[0, 0], v[1])
    assert int((made.data != before).any(-1).sum()) == 4  # two rows of K, two of V, nothing else
    assert torch.equal(made.data[0], before[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_values_are_rounded_to_the_pool(dtype: torch.dtype) -> None:
    made = pool(dtype)
    assert made.data.dtype == dtype
    k, v = torch.randn(1, 1, 4), torch.randn(1, 1, 4)
    made.write(0, torch.tensor([7]), k, v)
    keys, values = made.kv(0)
    assert torch.equal(keys[1, 3], k[0].to(dtype))
    assert torch.equal(values[1, 3], v[0].to(dtype))


def test_blocks_are_copied_in_all_layers_and_exchanged_at_once() -> None:
    made = pool()
    before = made.data.clone()
    made.copy_blocks([(0, 3), (3, 0)])
    assert torch.equal(made.data[:, :, 3], before[:, :, 0])
    assert torch.equal(made.data[:, :, 0], before[:, :, 3])
    assert torch.equal(made.data[:, :, [1, 2, 4]], before[:, :, [1, 2, 4]])
    made.copy_blocks([])


def test_overlapping_moves_read_the_old_rows() -> None:
    made = pool()
    before = made.data.flatten(2, 3).clone()
    made.move([(5, 4), (6, 5), (7, 6)])
    after = made.data.flatten(2, 3)
    assert torch.equal(after[:, :, 4:7], before[:, :, 5:8])
    assert torch.equal(after[:, :, 7:], before[:, :, 7:])
    before = after.clone()
    made.move([(0, 1), (1, 2), (2, 0)])
    assert torch.equal(after[:, :, :3], before[:, :, [2, 0, 1]])
    made.move([])
