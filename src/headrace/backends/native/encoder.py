"""Encoding of an encoder-decoder's sources on the native core, and their cross-attention K and V."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from headrace import core
from headrace.backends.native.lowering import lower
from headrace.backends.native.weights import PackedWeights
from headrace.kv.layout import kv_shape
from headrace.models.base import Model
from headrace.runner.program import Source
from headrace.runner.record import record, record_cross

# Tokens of sources that one run encodes at most, unless one source is longer.
TOGETHER = 1024


def scratch_blocks(block_size: int, max_positions: int) -> int:
    """Blocks of the encoder's pool: room for one source of any length, or for several short ones."""
    return -(-max(max_positions, TOGETHER) // block_size)


class NativeEncoder:
    """Two programs of an encoder-decoder: the encoder, with a float32 KV pool of its own that lasts for one run, and the
    projections that store cross-attention K and V of every decoder layer in the decoder's pool `kv`.

    settings: pool (threads), fuse and isa, as `lower` takes them. Raises RecordError.
    """

    def __init__(self, model: Model, weights: PackedWeights, kv: Any, *, max_positions: int, **settings: Any) -> None:
        encoder = model.encoder
        assert encoder is not None, "only an encoder-decoder has sources"
        layers, heads, head_dim = kv_shape(encoder.config)
        self._size, self._width = kv.block_size, encoder.config.hidden_size
        self._blocks = scratch_blocks(self._size, max_positions)
        scratch = core.module().KVPool(layers, self._blocks, self._size, heads, head_dim, "f32")
        self.scratch_bytes = int(scratch.bytes)
        settings["max_positions"] = max_positions
        self._encoder = lower(record(encoder), weights, encoder.config, kv=scratch, **settings).program
        self._cross = lower(record_cross(model), weights, model.config, kv=kv, **settings).program

    def encode(self, sources: Sequence[Source]) -> None:
        """Encode sources and store their cross-attention K and V, in groups that fit the pool. The grouping changes no bit."""
        for group in self._groups(sources):
            self._encode(group)

    def _groups(self, sources: Sequence[Source]) -> Iterator[list[Source]]:
        group: list[Source] = []
        room = self._blocks
        for source in sources:
            count = self._count(source)
            if group and count > room:
                yield group
                group, room = [], self._blocks
            group.append(source)
            room -= count
        if group:
            yield group

    def _encode(self, group: list[Source]) -> None:
        encoded, stored, first = core.module().Step(), core.module().Step(), 0
        for tokens, blocks in group:
            last = first + self._count((tokens, blocks))
            for step, table in ((encoded, range(first, last)), (stored, blocks)):
                sequence = core.module().Sequence(list(tokens), core.module().SampleParams())
                sequence.set_table(0, 0, list(table))
                step.feed(sequence, 0, len(tokens))
            first = last
        rows = np.empty((encoded.rows, self._width), np.float32)
        self._encoder.run(encoded, hidden_out=rows)
        self._cross.run(stored, hidden=rows)

    def _count(self, source: Source) -> int:
        """Number of blocks of a source's tokens."""
        return -(-len(source[0]) // self._size)
