"""The program of the native back end: a model that the compiled core runs, one call per step. Engines share thread pools."""

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import numpy as np

from headrace import core
from headrace.backends.native.buffers import Buffers, Ropes
from headrace.backends.native.encoder import NativeEncoder, scratch_blocks, scratch_shape
from headrace.backends.native.live import NativeLive
from headrace.backends.native.lowering import FUSIONS, Lowered, lower
from headrace.backends.native.step import NativeStep
from headrace.backends.native.weights import PackedWeights
from headrace.backends.protocol import RankGroup
from headrace.data.plan import NewSlot, StepPlan, pairs_of
from headrace.kv.layout import KVShape, kv_places, kv_shape, kv_shapes
from headrace.models.base import Model
from headrace.runner.program import InputRows, Placed
from headrace.runner.record import record
from headrace.runner.span import Span
from headrace.runner.stored_rows import StoredRows
from headrace.weights.lora import Adapter, numbers_of
from headrace.weights.source import WeightSource

log = logging.getLogger("headrace")

# Absolute value from which an input is an outlier (LLM.int8(), Dettmers et al. 2022, arXiv 2208.07339).
OUTLIERS = 6.0
# `activations` -> the core's name.
ROUNDINGS = {"auto": "group", **{name: name for name in ("group", "token", "split", "tensor")}}
KV_DTYPES = {"auto": "bf16", "bfloat16": "bf16", "float32": "f32", "int8": "int8", "int4": "int4"}

NOTHING = nullcontext()
# Smallest length that a row is divided by.
SHORTEST = 1e-12
SPIN_MICROSECONDS = 1000  # idle workers stay awake while Python works between two steps
QUOTA_SPIN_MICROSECONDS = 50  # under a CPU quota, time that a worker spins is missing for its work


class NativeStoredRows(StoredRows):
    """Stored rows in float32."""

    def __init__(self, num_blocks: int, block_size: int, width: int) -> None:
        super().__init__(num_blocks, block_size, width, 4)

    def allocate(self) -> np.ndarray:
        return np.zeros(self.shape, np.float32)

    def read_blocks(self, blocks: Sequence[int], out: np.ndarray) -> None:
        out.view(np.float32).reshape(len(blocks), self.block_size, -1)[:] = self.by_block()[list(blocks)]

    def write_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        self.by_block()[list(blocks)] = data.view(np.float32).reshape(len(blocks), self.block_size, -1)

    def join(self, parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def unit(self, rows: np.ndarray) -> np.ndarray:
        scaled: np.ndarray = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), SHORTEST)
        return scaled

    def nearest(self, rows: np.ndarray, nodes: np.ndarray) -> list[float]:
        best: list[float] = (rows @ nodes.T).max(axis=0).tolist()
        return best


def pool_block_bytes(config: Any, block_size: int, kv_dtype: str = "auto", window: int = 0) -> list[int]:
    """Bytes of one block of each pool, in all its layers. Raises ValueError as `kv_shapes` does."""
    dtype = "bfloat16" if kv_dtype == "auto" else kv_dtype
    return [shape.native_block_bytes(block_size, dtype) for shape in kv_shapes(config, window)]


def scratch_bytes(encoder: Any, block_size: int, max_positions: int) -> int:
    """Bytes of the pool in which an encoder (its config) encodes sources."""
    return scratch_blocks(block_size, max_positions) * scratch_shape(encoder).native_block_bytes(block_size, "float32")


class NativeProgram:
    """A model lowered to the native core, with its paged KV pool.

    kv_dtype: auto (bfloat16), bfloat16, int8, int4 or float32. centre: [KV heads * head size] by layer, subtracted from K
        before it is stored.
    activations: rounding of the inputs of integer weights to int8: auto, group (one scale for 32 columns), token (one per row),
        split (as auto, but up to 64 columns of a row with values of `threshold` or more are multiplied in float32), tensor (the
        file's scale, one per layer; token if the file has none).
    quantize: "", int8 or int4, for files with float weights. weights: packed weights to share with another program.
    threads: 0 for one per core. max_positions: longest sequence. head_ids: token ids (ascending) with logits.
    inputs: steps begin with these hidden rows instead of tokens; `enter` adds phases before the first layer.
    layers: the only layers to run, on a pool of their K/V; embedding and head belong to the first and the last layer.
    pack: False leaves packing to the caller, before the first step.
    group: the ranks that share the model, which is then this rank's, of `group.share.narrowed()`.
    adapters: of the model; a sequence has one of them, or none.
    window, window_blocks: layers with a window of at most `window` tokens have a pool and block tables of their own.
    Raises RecordError if the model cannot be recorded or lowered, WeightError for bad weights.
    """

    # The core's Streaming, if the weights are in a file (offload).
    streaming: Any = None

    def __init__(
        self,
        model: Model,
        source: WeightSource,
        *,
        num_blocks: int,
        block_size: int,
        max_positions: int,
        kv_dtype: str = "auto",
        centre: Mapping[int, np.ndarray] | None = None,
        activations: str = "auto",
        threshold: float = OUTLIERS,
        threads: int = 0,
        quantize: str = "",
        fuse: frozenset[str] = FUSIONS,
        isa: str = "",
        weights: PackedWeights | None = None,
        head_ids: np.ndarray | None = None,
        inputs: InputRows | None = None,
        enter: Callable[[Lowered, Ropes, Buffers], None] | None = None,
        layers: range | None = None,
        pack: bool = True,
        group: RankGroup | None = None,
        adapters: Sequence[Adapter] = (),
        window: int = 0,
        window_blocks: int = 0,
    ) -> None:
        self.model, pool = model, thread_pool(threads)
        self.config = config = model.config
        self.weights = weights or PackedWeights(model, source, pool, quantize, None if group is None else group.share)
        held = range(config.num_layers) if layers is None else layers
        own = config.of_layers(held)
        places = dict(zip(held, kv_places(own, window), strict=True))
        self.kv, self.windows = _pools(kv_shapes(own, window), (num_blocks, window_blocks), block_size, KV_DTYPES[kv_dtype])
        shared: dict[str, Any] = {"pool": pool, "max_positions": max_positions, "fuse": fuse, "isa": isa}
        lowered = lower(
            record(model, inputs is None, layers),
            self.weights,
            config,
            kv=self.kv,
            windows=self.windows,
            places=places,
            activations=ROUNDINGS[activations],
            threshold=threshold,
            head_ids=head_ids,
            enter=enter,
            centre=centre,
            group=group,
            adapters=adapters,
            **shared,
        )
        self.encoder = None if model.encoder is None else NativeEncoder(model, self.weights, self.kv, **shared)
        if pack:
            self.weights.pack()
        self.inputs, self.group, self._adapters = inputs, group, numbers_of(adapters)
        self.core, self.taps = lowered.program, lowered.taps
        self._sizes, self._norm = (num_blocks, block_size), None if model.norm is None else self._read_norm(model.norm)
        self._step = NativeStep(config.vocab_size)
        if self.weights.summary():
            log.info("%s", self.weights.summary())

    def _read_norm(self, norm: Any) -> tuple[str, Any, Any, float]:
        return norm.kind, self.weights.vector(norm), self.weights.vector(norm, "bias"), norm.eps

    def live(self, new: NewSlot) -> NativeLive:
        return NativeLive.of(new, self._adapters.get((new.params and new.params.adapter) or "", 0))

    def step(self) -> NativeStep:
        torch = sys.modules.get("torch")
        if torch is not None and torch.get_num_threads() != 1:
            # Torch's idle threads would spin on the cores of the native threads.
            torch.set_num_threads(1)
        self._step.clear()
        return self._step

    def encode(self, sources: Sequence[Placed]) -> None:
        if self.encoder is not None:
            self.encoder.encode(sources)

    def run(
        self,
        step: NativeStep,
        span: Span,
        rows: np.ndarray | None = None,
        keep: bool = False,
        taps: dict[str, np.ndarray] | None = None,
    ) -> np.ndarray | None:
        """Run a step. Returns the rows [n, hidden] after the last layer if `keep`, else None."""
        hidden = np.empty((step.core.rows, self.config.hidden_size), np.float32) if keep else None
        layers = (span.first, span.layers or -1)
        run: dict[str, Any] = {"layers": layers, "skips": list(span.skips), "fill": span.fill}
        if taps is not None:
            taps.update({name: np.empty((step.core.rows, self.config.hidden_size), np.float32) for name in taps})
            run["taps"] = [(self.taps[name], out) for name, out in taps.items()]
        with self._in_group():
            self.core.run(step.core, hidden=rows, hidden_out=hidden, **run)
        return hidden

    def _in_group(self) -> AbstractContextManager[None]:
        """Raises RankLostError when the core has lost a rank."""
        return NOTHING if self.group is None else losing(self.group)

    def source_keys(self, live: NativeLive, layer: int, positions: int) -> np.ndarray:
        _, size = self._sizes
        places = np.arange(positions)
        flat = (np.array(live.source_table, np.int64)[places // size] * size + places % size).astype(np.int32)
        _, heads, head_dim = kv_shape(self.config)
        k, v = np.empty((2, positions, heads, head_dim), np.float32)
        self.kv.read(layer, flat, k, v)
        return k

    def final(self, hidden: np.ndarray) -> np.ndarray:
        if self._norm is None or not len(hidden):
            return hidden
        normed: np.ndarray = core.module().norm(np.ascontiguousarray(hidden), *self._norm)
        return normed

    def on_host(self, rows: np.ndarray) -> np.ndarray:
        return rows.astype(np.float64)

    def rearrange(self, plan: StepPlan) -> None:
        with self._in_group():
            for number in range(1 if self.windows is None else 2):
                if moves := pairs_of(plan.moves, number):
                    self.core.move(moves, number)
                if copies := pairs_of(plan.copies, number):
                    self.core.copy_blocks(copies, number)

    def block_bytes(self) -> int:
        return int(self.kv.bytes) // int(self.kv.num_blocks)

    def read_blocks(self, blocks: Sequence[int], out: np.ndarray) -> None:
        self.kv.read_blocks(list(blocks), out)

    def write_blocks(self, blocks: Sequence[int], data: np.ndarray) -> None:
        self.kv.write_blocks(list(blocks), data)

    def kept(self) -> NativeStoredRows:
        return NativeStoredRows(*self._sizes, self.config.hidden_size)

    def kv_bytes(self) -> int:
        return int(self.kv.bytes) + (0 if self.windows is None else int(self.windows.bytes))

    def close(self) -> None:
        """Release the packed weights and the pool, and end the other ranks."""
        if self.group is not None:
            self.group.close()
        self.streaming = None
        del self.core, self.encoder, self.weights, self.kv, self.windows


def _pools(shapes: Sequence[KVShape], blocks: tuple[int, int], block_size: int, dtype: str) -> tuple[Any, Any]:
    """The pool of all layers that see all tokens, and that of window layers, None if there are none."""
    made = [
        core.module().KVPool(shape.layers, count, block_size, shape.heads, shape.head_dim, dtype)
        for number, (shape, count) in enumerate(zip(shapes, blocks, strict=False))
        if number == 0 or shape.layers
    ]
    return made[0], made[1] if len(made) > 1 else None


@contextmanager
def losing(group: RankGroup) -> Iterator[None]:
    """Turn the core's error about a lost rank into RankLostError."""
    try:
        yield
    except core.module().RankLost as error:
        raise group.lost(error) from None


def thread_pool(threads: int) -> Any:
    """Return the process's pool of `threads` threads; 0: one for each core that the process may use. Engines take turns on it.

    Raises _core.ThreadsError (a RuntimeError) if the system does not start them all; fewer threads may work.
    """
    return _pool(threads or core.processors())


@cache
def _pool(threads: int) -> Any:
    pool = core.module().ThreadPool(threads)
    pool.set_spin(spin_microseconds(core.module().cpu_info()["quota"]))
    return pool


def spin_microseconds(quota: float) -> int:
    """Time that an idle worker spins for the next step. `quota`: CPUs that the control group grants; 0: no limit."""
    return QUOTA_SPIN_MICROSECONDS if quota else SPIN_MICROSECONDS


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has no workers; a model that it loads gets a new pool
