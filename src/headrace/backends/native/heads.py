"""Trained heads on the native core: rows that heads without a feature layer begin with are made here, all else in the core."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace import core
from headrace.backends.native.buffers import HIDDEN, Buffers, Ropes
from headrace.backends.native.lowering import FUSIONS, Lowered, Lowering
from headrace.backends.native.program import NativeProgram
from headrace.backends.native.threads import thread_pool
from headrace.data.plan import Feed
from headrace.models.registry import describe
from headrace.runner.heads import UNIT_EPS, HeadInputs, Heads, HeadsSource, heads_config
from headrace.runner.program import AnyLive
from headrace.runner.record import record
from headrace.runner.stored_rows import Kept
from headrace.weights.kinds import FLOATS
from headrace.weights.source import WeightSource


class PackedInputs(HeadInputs):
    """Matrices as the core multiplies them, int8: as they are they would be read from memory, and by one thread."""

    def __init__(self, heads: Heads, target: NativeProgram, pool: Any) -> None:
        super().__init__(heads)
        self.target = target
        self._pool, self._arena = pool, core.module().Arena()
        self._ones = np.ones(target.config.hidden_size, np.float32)
        self._packed = {name: self._pack(x.contiguous()) for name, x in self.tensors.items() if x.ndim == 2}

    def rows(self, feeds: Sequence[Feed], slots: Mapping[int, AnyLive], features: Kept) -> np.ndarray:
        """As the core takes them."""
        rows: np.ndarray = super().rows(feeds, slots, features).numpy()
        return rows

    def at_exit(self, exit: int, hidden: Any) -> np.ndarray:
        """As the core takes them, and computed by it: a row's do not depend on those beside it."""
        scaled = core.module().norm(np.ascontiguousarray(hidden), "rms", self._ones, None, UNIT_EPS)
        rows: np.ndarray = core.module().linear(self._packed[f"exits.{exit}.weight"], scaled, self._pool)
        return rows + self.tensors[f"exits.{exit}.bias"].numpy()

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(core.module().linear(self._packed[name], x.contiguous().numpy(), self._pool))

    def lower(self, made: Lowered, ropes: Ropes, buffers: Buffers) -> None:
        """The phases of `enter`: a program that begins with the rows before its tokens goes on with what the layer takes."""
        config, weights = self.target.config, self.target.weights
        width = config.hidden_size
        before, product = buffers.take("a8", width, local=True), (buffers.take("float", width), 0)
        made.program.quantize((HIDDEN, 0), before, _scaled(np.ones(width, np.float32)), name="before")
        made.program.linear(self._packed["hidden.weight"], before, "store", product, name="before")
        Lowering(made, record(self.target.model).embed, weights, config, ropes, buffers, FUSIONS).run(HIDDEN)
        embedded = _scaled(self.tensors["embed.weight"].numpy())
        made.program.residual(product, (HIDDEN, 0), (HIDDEN, 0), width, embedded, name="enter")

    def _pack(self, x: torch.Tensor) -> Any:
        rows = x.numpy().view(np.uint8)
        tensor = core.module().pack(rows, "F32", *x.shape, self._arena, self._pool, quantize="int8")
        return core.module().PackedLinear([tensor])


class NativeHeads(NativeProgram):
    """Heads on the target's block ids; their matrices become int8."""

    def __init__(self, heads: Heads, target: NativeProgram, source: WeightSource, **settings: Any) -> None:
        """`settings`: num_blocks, block_size, max_positions, kv_dtype and threads as the target has them."""
        config = heads_config(heads.kind, target.config)
        own = HeadsSource(heads, target.config, source)
        inputs = PackedInputs(heads, target, thread_pool(settings.get("threads", 0)))
        super().__init__(
            describe(config),
            own,
            **settings,
            quantize="int8" if any(own.info(name).kind in FLOATS for name in own.names() if own.info(name).rows > 1) else "",
            head_ids=heads.vocab,
            inputs=inputs,
            enter=inputs.lower,
        )


def _scaled(weight: np.ndarray) -> Any:
    """Rows to length, and by a weight."""
    return core.module().NormWeights("rms", weight, None, UNIT_EPS)
