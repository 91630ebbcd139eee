"""Trained heads on the native core. The input rows of heads without a feature layer are computed here, the rest in the core."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headrace import core
from headrace.backends.native.buffers import HIDDEN, Buffers, Ropes
from headrace.backends.native.lowering import FUSIONS, Lowered, Lowering
from headrace.backends.native.program import NativeProgram, thread_pool
from headrace.data.plan import Feed
from headrace.models.registry import describe
from headrace.runner.heads import UNIT_EPS, HeadInputs, Heads, HeadsSource, heads_config
from headrace.runner.program import AnyLive
from headrace.runner.record import record
from headrace.runner.stored_rows import StoredRows
from headrace.weights.kinds import FLOATS
from headrace.weights.source import WeightSource


class PackedInputs(HeadInputs):
    """Inputs of heads, with their matrices packed as int8 for the core, which multiplies them on all threads."""

    def __init__(self, heads: Heads, target: NativeProgram, pool: Any) -> None:
        super().__init__(heads)
        self.target = target
        self._pool, self._arena = pool, core.module().Arena()
        self._ones = np.ones(target.config.hidden_size, np.float32)
        self._packed = {name: self._pack(x.contiguous()) for name, x in self.tensors.items() if x.ndim == 2}

    def rows(self, feeds: Sequence[Feed], slots: Mapping[int, AnyLive], features: StoredRows) -> np.ndarray:
        """Input rows, [tokens, hidden] float32."""
        rows: np.ndarray = super().rows(feeds, slots, features).numpy()
        return rows

    def at_exit(self, exit: int, hidden: Any) -> np.ndarray:
        """Input rows of an exit's head, computed by the core, so that a row does not depend on the other rows."""
        scaled = core.module().norm(np.ascontiguousarray(hidden), "rms", self._ones, None, UNIT_EPS)
        rows: np.ndarray = core.module().linear(self._packed[f"exits.{exit}.weight"], scaled, self._pool)
        return rows + self.tensors[f"exits.{exit}.bias"].numpy()

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(core.module().linear(self._packed[name], x.contiguous().numpy(), self._pool))

    def lower(self, lowered: Lowered, ropes: Ropes, buffers: Buffers) -> None:
        """Add the phases before the first layer: combine the target's hidden rows with the embeddings of the tokens."""
        config, weights = self.target.config, self.target.weights
        width = config.hidden_size
        before, product = buffers.take("a8", width, local=True), (buffers.take("float", width), 0)
        lowered.program.quantize((HIDDEN, 0), before, _scaled(np.ones(width, np.float32)), name="before")
        lowered.program.linear(self._packed["hidden.weight"], before, "store", product, name="before")
        Lowering(lowered, record(self.target.model).embed, weights, config, ropes, buffers, FUSIONS).run(HIDDEN)
        embedded = _scaled(self.tensors["embed.weight"].numpy())
        lowered.program.residual(product, (HIDDEN, 0), (HIDDEN, 0), width, embedded, name="enter")

    def _pack(self, x: torch.Tensor) -> Any:
        rows = x.numpy().view(np.uint8)
        tensor = core.module().pack(rows, "F32", *x.shape, self._arena, self._pool, quantize="int8")
        return core.module().PackedLinear([tensor])


class NativeHeads(NativeProgram):
    """A program of trained heads. It uses the target's block ids, and its matrices become int8."""

    def __init__(self, heads: Heads, target: NativeProgram, source: WeightSource, **settings: Any) -> None:
        """settings: num_blocks, block_size, max_positions, kv_dtype and threads of the target."""
        whole = target.config if target.group is None else target.group.share.config
        config = heads_config(heads.kind, whole)
        own = HeadsSource(heads, whole, source)
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
    """An RMS norm with this weight."""
    return core.module().NormWeights("rms", weight, None, UNIT_EPS)
