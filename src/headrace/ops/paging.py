"""How the reference attention reads a paged pool: which rows attend together, which blocks they gather, and which keys each row
sees."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from headrace.data.plan import SOURCE, TOKENS
from headrace.ops.context import Context

TILE = 64  # rows of one feed that share a gather of K and V
MAX_SCORES = 1 << 22  # attention scores formed at once, over all heads (16 MB of float32: a cache's worth)


@dataclass(frozen=True, slots=True)
class TileGroup:
    """b tiles of equal padded size: up to c rows each, over w blocks (t = w * block_size keys)."""

    rows: torch.Tensor  # [b, c] rows of the step; padding repeats row 0
    meant: torch.Tensor  # [m] rows of the b * c that are not padding
    target: torch.Tensor  # [m] their rows in the step
    blocks: torch.Tensor  # [b, w] block ids; padding repeats a block of the tile
    visible: torch.Tensor  # [b, c, t] which keys a row sees
    reached: torch.Tensor  # [b, t] keys that any row of the tile sees
    distance: torch.Tensor | None = None  # [b, c, t] positions from a row to a key, if wanted


@dataclass(frozen=True, slots=True)
class _Tile:
    feed: int
    first: int  # row
    last: int  # row after the last
    block: int  # first block of its table that is gathered
    blocks: int  # how many

    def shape(self) -> tuple[int, int]:
        """Padded rows and blocks: a function of the tile alone, so that the rest of the step changes nothing."""
        rows = 1 << (self.last - self.first - 1).bit_length()
        step = 1 << max(0, self.blocks.bit_length() - 3)  # a quarter more at most
        return rows, -(-self.blocks // step) * step


@dataclass(frozen=True, slots=True)
class Sight:
    """Which keys rows see: the known tokens before them and a node's ancestors; without `causal` the whole feed; with `source`
    the whole source in table 1. relative: the distance of each key is wanted too. table: the block table of the layer."""

    heads: int
    window: int | None = None
    causal: bool = True
    source: bool = False
    relative: bool = False
    table: int = TOKENS


def groups(ctx: Context, sight: Sight) -> list[TileGroup]:
    """The step's rows in groups that attend together; computed once per step and kind of layer."""
    key = ("groups", sight)
    if key not in ctx.memo:
        ctx.memo[key] = list(_groups(ctx, sight))
    made: list[TileGroup] = ctx.memo[key]
    return made


def _groups(ctx: Context, sight: Sight) -> Iterator[TileGroup]:
    by_shape: dict[tuple[int, int], list[_Tile]] = defaultdict(list)
    for tile in _tiles(ctx, sight):
        by_shape[tile.shape()].append(tile)
    for (rows, blocks), tiles in by_shape.items():
        most = max(1, MAX_SCORES // (rows * blocks * ctx.pool.block_size * sight.heads))
        for i in range(0, len(tiles), most):
            yield _group(ctx, tiles[i : i + most], rows, blocks, sight)


def _tiles(ctx: Context, sight: Sight) -> Iterator[_Tile]:
    size, window = ctx.pool.block_size, sight.window
    row_start, kv_start = ctx.row_start.tolist(), ctx.kv_start.tolist()
    positions = ctx.positions.tolist() if window is not None else []
    known, masks = ctx.known.tolist(), ctx.masks.tolist()
    sources = _sources(ctx).tolist() if sight.source else []
    for feed, (start, end) in enumerate(pairwise(row_start)):
        kv_end = kv_start[feed] + end - start
        for first in range(start, end, TILE):
            last = min(first + TILE, end)
            nodes = range(max(first, start + known[feed]), last)
            ahead = any(masks[row] % (1 << 64) >> row - start - known[feed] + 1 for row in nodes)
            stop = kv_end if ahead or not sight.causal else kv_start[feed] + last - start  # ancestors come before their nodes
            lowest = 0
            if window is not None:
                offset = positions[start] - kv_start[feed]
                lowest = max(0, min(positions[first:last]) - offset - window + 1)
            stop = sources[feed] if sight.source else stop
            yield _Tile(feed, first, last, lowest // size, -(-stop // size) - lowest // size)


def _sources(ctx: Context) -> torch.Tensor:
    if ctx.source is None:
        raise ValueError("attention: this step has no source with K and V")
    return ctx.source


def _group(ctx: Context, tiles: list[_Tile], rows: int, blocks: int, sight: Sight) -> TileGroup:
    device = ctx.ids.device
    feed, first, count, block, held = torch.tensor(
        [(t.feed, t.first, t.last - t.first, t.block, t.blocks) for t in tiles], device=device
    ).unbind(1)
    lane = torch.arange(rows, device=device)
    valid = lane < count[:, None]
    row = torch.where(valid, first[:, None] + lane, 0)
    column = torch.minimum(torch.arange(blocks, device=device), held[:, None] - 1)
    gathered = ctx.tables[SOURCE if sight.source else sight.table][feed[:, None], block[:, None] + column]
    size = ctx.pool.block_size
    key = block[:, None] * size + torch.arange(blocks * size, device=device)  # KV indices [b, t]
    visible = _visible(ctx, feed, row, key, sight) & valid[:, :, None]
    meant = valid.flatten().nonzero()[:, 0]
    distance = _key_positions(ctx, feed, key)[:, None, :] - ctx.positions[row][:, :, None] if sight.relative else None
    return TileGroup(row, meant, row.flatten()[meant], gathered, visible, visible.any(1), distance)


def _visible(ctx: Context, feed: torch.Tensor, row: torch.Tensor, key: torch.Tensor, sight: Sight) -> torch.Tensor:
    """[b, c, t]: whether `row` [b, c] of `feed` [b] sees KV index `key` [b, t]."""
    if sight.source:
        return (key < _sources(ctx)[feed][:, None])[:, None, :].expand(-1, row.shape[1], -1)
    start = ctx.row_start[feed]
    index = ctx.kv_start[feed, None] + row - start[:, None]  # KV index of each row
    node0 = ctx.kv_start[feed] + ctx.known[feed]  # KV index of the feed's first node
    end = ctx.kv_start[feed] + ctx.row_start[feed + 1] - start
    node = key - node0[:, None]  # [b, t], below 0: a known token
    is_node = (node >= 0) & (key < end[:, None])
    ancestor = ctx.masks[row][:, :, None] >> node.clamp(0, 63)[:, None, :] & 1 == 1
    if sight.causal:
        upto = torch.where(index < node0[:, None], index, node0[:, None] - 1)
        seen = (key[:, None, :] <= upto[:, :, None]) | (ancestor & is_node[:, None, :])
    else:
        seen = (key < end[:, None])[:, None, :].expand(-1, row.shape[1], -1)
    if sight.window is None:
        return seen
    return seen & ((ctx.positions[row][:, :, None] - _key_positions(ctx, feed, key)[:, None, :]).abs() < sight.window)


def _key_positions(ctx: Context, feed: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Position of each key, [b, t], for the KV indices `key` [b, t] of feeds [b]. Draft nodes of one depth share a position."""
    start = ctx.row_start[feed]
    node = key - (ctx.kv_start[feed] + ctx.known[feed])[:, None]
    is_node = (node >= 0) & (key < (ctx.kv_start[feed] + ctx.row_start[feed + 1] - start)[:, None])
    offset = ctx.positions[start] - ctx.kv_start[feed]
    node_row = torch.where(is_node, start[:, None] + ctx.known[feed, None] + node, 0)
    return torch.where(is_node, ctx.positions[node_row], key + offset[:, None])
