"""Encoding of an encoder-decoder's sources on the native core, and their cross-attention K and V."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace import core
from headrace.backends.native.lowering import lower
from headrace.backends.native.weights import PackedWeights
from headrace.data.config import ModelConfig
from headrace.data.frames import rows_of
from headrace.data.sources import Frames, Tokens
from headrace.kv.layout import KVPlace, KVShape, kv_shape
from headrace.models.base import Model
from headrace.ops.patches import patch_rows
from headrace.runner.program import Placed
from headrace.runner.record import record, record_convolution, record_cross

# Tokens of sources that one run encodes at most, unless one source is longer.
TOGETHER = 1024


def scratch_blocks(block_size: int, max_positions: int) -> int:
    """Blocks of the encoder's pool: room for one source of any length, or for several short ones."""
    return -(-max(max_positions, TOGETHER) // block_size)


def scratch_shape(config: ModelConfig) -> KVShape:
    """Shape of the encoder's pool. Its layers run one after the other over all rows, so they share the blocks of one layer."""
    return kv_shape(config)._replace(layers=1)


class NativeEncoder:
    """Programs of an encoder-decoder: the encoder, with a float32 KV pool of its own that lasts for one layer, and the
    projections that store cross-attention K and V of every decoder layer in the decoder's pool `kv`. An encoder that reads
    sound has a program for each convolution, too.

    settings: pool (threads), fuse and isa, as `lower` takes them. Raises RecordError.
    """

    def __init__(self, model: Model, weights: PackedWeights, kv: Any, *, max_positions: int, **settings: Any) -> None:
        encoder = model.encoder
        assert encoder is not None, "only an encoder-decoder has sources"
        config = encoder.config
        shape = scratch_shape(config)
        longest = max_positions if config.audio is None else config.audio.positions
        self._size, self._width = kv.block_size, config.hidden_size
        self._blocks = scratch_blocks(self._size, longest)
        scratch = core.module().KVPool(shape.layers, self._blocks, self._size, shape.heads, shape.head_dim, "f32")
        self.scratch_bytes = int(scratch.bytes)
        settings["max_positions"] = max(max_positions, longest)
        self._convolutions = [] if config.audio is None else convolutions(encoder, weights, scratch, **settings)
        self._positions = None if config.audio is None else weights.numbers(encoder.positions)
        places = {number: KVPlace(0, number % shape.layers) for number in range(config.num_layers)}
        recording = record(encoder, config.audio is None)
        self._encoder = lower(recording, weights, config, kv=scratch, places=places, **settings).program
        self._cross = lower(record_cross(model), weights, model.config, kv=kv, **settings).program

    def encode(self, sources: Sequence[Placed]) -> None:
        """Encode sources and store their cross-attention K and V, in groups that fit the pool. The grouping changes no bit."""
        for group in self._groups(sources):
            self._encode(group)

    def _groups(self, sources: Sequence[Placed]) -> Iterator[list[Placed]]:
        group: list[Placed] = []
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

    def _encode(self, group: list[Placed]) -> None:
        encoded, stored, first = core.module().Step(), core.module().Step(), 0
        for source, blocks in group:
            last = first + self._count((source, blocks))
            for step, table in ((encoded, range(first, last)), (stored, blocks)):
                feed_rows(step, source.ids if isinstance(source, Tokens) else [0] * source.positions, table)
            first = last
        rows = np.empty((encoded.rows, self._width), np.float32)
        inputs = [self._enter(source) for source, _ in group if isinstance(source, Frames)]
        self._encoder.run(encoded, hidden=np.concatenate(inputs) if inputs else None, hidden_out=rows)
        self._cross.run(stored, hidden=rows)

    def _enter(self, frames: Frames) -> np.ndarray:
        """The rows of the encoder's first layer, [positions, hidden] float32."""
        assert self._positions is not None, "this encoder reads no sound"
        x = rows_of(frames)
        for convolution in self._convolutions:
            x = convolution(x)
        rows: np.ndarray = x + self._positions[: len(x)]
        return rows

    def _count(self, source: Placed) -> int:
        """Number of blocks of a source's positions."""
        return -(-source[0].positions // self._size)


def feed_rows(step: Any, ids: Sequence[int], table: Sequence[int]) -> None:
    """Add a feed of all rows of a new sequence to a step of the core."""
    sequence = core.module().Sequence(list(ids), core.module().SampleParams())
    sequence.set_table(0, 0, list(table))
    step.feed(sequence, 0, len(ids))


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution with its activation as a program: a linear layer over neighbouring rows that numpy lays side by side.

    width: columns of the program's rows, the larger of its inputs and outputs. outputs: of the convolution. together: rows of
    one feed; the program stores no K and V, so feeds may share `blocks` blocks.
    """

    program: Any
    width: int
    outputs: int
    taps: int
    stride: int
    blocks: int
    together: int

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """Rows [n, inputs] -> [ceil(n / stride), outputs]."""
        patches = np.concatenate([x, np.zeros((1, x.shape[1]), np.float32)])[patch_rows(len(x), self.taps, self.stride)]
        rows = np.zeros((len(patches), self.width), np.float32)
        rows[:, : self.taps * x.shape[1]] = patches.reshape(len(patches), -1)
        step = core.module().Step()
        for start in range(0, len(rows), self.together):
            feed_rows(step, [0] * min(self.together, len(rows) - start), range(self.blocks))
        out = np.empty_like(rows)
        self.program.run(step, hidden=rows, hidden_out=out)
        return out[:, : self.outputs]


def convolutions(encoder: Model, weights: PackedWeights, scratch: Any, **settings: Any) -> list[Convolution]:
    """The convolutions of an encoder that reads sound, in their order."""
    config, audio, made = encoder.config, encoder.config.audio, []
    assert audio is not None
    for number, stride in enumerate(audio.strides):
        columns = audio.taps * (config.hidden_size if number else audio.bins)
        width = max(columns, config.hidden_size)
        sizes = replace(config, hidden_size=width)
        lowered = lower(record_convolution(encoder, number), weights, sizes, kv=scratch, entry_width=columns, **settings)
        blocks = -(-audio.positions // scratch.block_size)
        sizes_of_rows = width, config.hidden_size, audio.taps, stride
        made.append(Convolution(lowered.program, *sizes_of_rows, blocks, audio.positions))
    return made
