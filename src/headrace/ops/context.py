"""Context: the step's feeds, and where their K/V are. It contains no value of the model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from headrace.kv.pool import KVPool


@dataclass(eq=False, slots=True)
class Context:
    """One step's feeds, flattened: n rows, f feeds. All tensors int64 on the model's device.

    A known row at KV index p sees KV indices 0..p; a draft node sees everything before the feed's first node and the nodes in
    its mask. Sliding windows count positions, not KV indices.
    """

    ids: torch.Tensor  # [n] token ids
    positions: torch.Tensor  # [n] rotary (or learned) positions; a node's is its depth below the last known token
    masks: torch.Tensor  # [n] bits of a uint64: which of the feed's nodes a node sees, itself included; 0: known
    row_start: torch.Tensor  # [f + 1] rows of feed i are row_start[i] .. row_start[i + 1]
    kv_start: torch.Tensor  # [f] tokens already in the pool, which is the KV index of the feed's first row
    known: torch.Tensor  # [f] how many rows are known tokens; the rest are nodes, stored behind them
    tables: list[torch.Tensor]  # per block table [f, w] block ids; entries beyond a sequence's blocks are never read
    slots: list[torch.Tensor]  # per pool [n] flat position (block * block_size + offset) of each row's K and V
    pool: KVPool
    source: torch.Tensor | None = None  # [f] tokens of each feed's source, whose K and V table 1 has; None: there is none
    adapters: torch.Tensor | None = None  # [n] number of each row's adapter, 0 for none; None: no row has one
    taps: dict[str, torch.Tensor | None] = field(default_factory=dict)  # names wanted; filled by the op `tap`
    memo: dict[Any, Any] = field(default_factory=dict)  # shared by the layers of one step: angles, masks, gathers


@dataclass(frozen=True, slots=True)
class FeedRows:
    """One sequence's part of a step, for `build`: known tokens from KV index `start` on, then the nodes of a draft tree."""

    ids: Sequence[int]
    table: Sequence[int]
    start: int = 0
    nodes: Sequence[int] = ()
    parents: Sequence[int] = ()  # index of the parent node, -1: the last known token
    full: bool = False  # each node sees all nodes, not only its ancestors
    source: int = 0  # tokens of its source, of an encoder-decoder
    source_table: Sequence[int] = ()
    window_table: Sequence[int] = ()  # of the layers in pool 1; -1: a block that was given up
    adapter: int = 0  # number of its adapter, 0: none


def build(pool: KVPool, feeds: Sequence[FeedRows]) -> Context:
    """A Context from plain lists: whole sequences, chunks, single tokens or draft trees over block tables, and their sources'
    tables."""
    device = pool.data.device
    ids: list[int] = []
    positions: list[int] = []
    masks: list[int] = []
    slots: list[list[int]] = [[] for _ in pool.parts]
    adapters: list[int] = []
    row_start = [0]
    for feed in feeds:
        first = feed.start + len(feed.ids)
        depths, seen = tree(feed.parents)
        if feed.full:
            seen = [(1 << len(seen)) - 1] * len(seen)
        ids += [*feed.ids, *feed.nodes]
        positions += [*range(feed.start, first), *(first + depth for depth in depths)]
        masks += [0] * len(feed.ids) + [signed(mask) for mask in seen]
        indices = range(feed.start, first + len(feed.nodes))
        for places, table in zip(slots, (feed.table, feed.window_table), strict=False):
            places += [table[i // pool.block_size] * pool.block_size + i % pool.block_size for i in indices]
        row_start.append(len(ids))
        adapters += [feed.adapter] * (len(ids) - len(adapters))

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def padded(tables: list[Sequence[int]]) -> torch.Tensor:
        width = max(map(len, tables))
        return tensor([[*table, *[0] * (width - len(table))] for table in tables])

    sources = any(feed.source for feed in feeds)
    tables = [padded([feed.table for feed in feeds])]
    if sources or len(pool.parts) > 1:
        tables += [padded([feed.source_table for feed in feeds]), padded([feed.window_table for feed in feeds])]
    return Context(
        ids=tensor(ids),
        positions=tensor(positions),
        masks=tensor(masks),
        row_start=tensor(row_start),
        kv_start=tensor([feed.start for feed in feeds]),
        known=tensor([len(feed.ids) for feed in feeds]),
        tables=tables,
        slots=[tensor(places) for places in slots],
        pool=pool,
        source=tensor([feed.source for feed in feeds]) if sources else None,
        adapters=tensor(adapters) if any(adapters) else None,
    )


def tree(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """Depth (0: child of the last known token) and ancestor mask (own bit included) of every node; parents come before
    children."""
    depths: list[int] = []
    masks: list[int] = []
    for node, parent in enumerate(parents):
        depths.append(0 if parent < 0 else depths[parent] + 1)
        masks.append(1 << node | (0 if parent < 0 else masks[parent]))
    return depths, masks


def signed(mask: int) -> int:
    """The int64 with the bits of a uint64."""
    return mask - (1 << 64) if mask >> 63 else mask
