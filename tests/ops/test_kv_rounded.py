"""The core's attention over int8 and int4 pages against torch's over `Rounded`, on every instruction set."""

import random

import numpy as np
import pytest
import torch

from headrace.data.config import LayerConfig, ModelConfig
from headrace.kv import rounded
from headrace.kv.pool import KVPool
from headrace.kv.rounded import Rounded
from headrace.ops.attention import attention
from headrace.ops.context import FeedRows, build
from tests.ops.native_step import Feed, Shape, Stepper
from tests.ops.test_native_attention import ISAS, THREADS, fill, rows, tables

SHAPE = Shape(4, 2, 64)


def both(isa: str, format: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What the core gives for many rows and a draft, what torch gives, and what it gives for K and V as they are."""
    config = ModelConfig("llama", 10, 256, (LayerConfig(4, 2, 64, 64),), 512)
    feeds = [Feed(0, 70), Feed(0, 5, [-1, 0, 0, 1]), Feed(0, 1)]
    made, blocks = tables(random.Random(3), [feed.rows for feed in feeds], 16)
    for feed, table in zip(feeds, made, strict=True):
        feed.table = table
    x = rows(sum(feed.rows for feed in feeds), SHAPE, 1)
    x[:, 4 * 64 : 6 * 64] += np.linspace(-3, 3, 128, dtype=np.float32)  # what keys have in common, other in each half
    stepper = Stepper(SHAPE, blocks, format, isa, THREADS[2])
    fill(stepper, feeds, 0)
    found = []
    for kind in (format, None):
        pool = KVPool(config, blocks, 16, torch.float64, rounding=Rounded(kind) if kind else None)
        step = [FeedRows([0] * feed.known, feed.table, 0, [0] * len(feed.parents), feed.parents) for feed in feeds]
        parts = (torch.from_numpy(part.copy()).double() for part in SHAPE.split(x))
        found.append(attention(*parts, build(pool, step), 0).numpy())  # type: ignore[call-arg]
    return stepper.run(feeds, x), *found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("format", "near"), [("int8", 2e-3), ("int4", 6e-3)])
def test_the_same_as_the_torch_op_over_rounded_keys_and_values(isa: str, format: str, near: float) -> None:
    """But for numbers between two codes, which go either way; the control: it is far from K and V as they are."""
    core, torch_, exact = both(isa, format)
    assert np.abs(core - torch_).mean() < near * np.abs(exact).mean()
    assert np.abs(core - exact).mean() > 3 * np.abs(core - torch_).mean()


def test_scales_of_the_neighbour_head_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: each head's numbers above the minimum of the one beside it, by its scale."""
    core, right, exact = both(ISAS[0], "int4")

    def neighbours(x: torch.Tensor, dim: int) -> torch.Tensor:
        least, most = x.roll(1, 1).amin(dim, keepdim=True), x.roll(1, 1).amax(dim, keepdim=True)
        scale = (most - least) / 15
        return least + scale * ((x - least) / scale).round().clamp(0, 15)

    monkeypatch.setattr(rounded, "_range", neighbours)
    _, wrong, _ = both(ISAS[0], "int4")
    assert np.abs(core - wrong).mean() > 3 * np.abs(core - right).mean()
    assert np.abs(core - wrong).mean() > 6e-3 * np.abs(exact).mean()
