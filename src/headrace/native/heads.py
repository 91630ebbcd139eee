"""Trained heads on the native core: what is small is done here, the layer, the lm_head and the draws in the core."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headrace.models.registry import describe
from headrace.native import core
from headrace.native.runner import NativeRunner, Slot, thread_pool
from headrace.native.weights import FLOATS
from headrace.runner.heads import FEATURE, Entrance, Heads, HeadsSource, heads_config
from headrace.runner.parts import Part
from headrace.types import StepPlan
from headrace.weights.source import WeightSource


class Packed(Entrance):
    """Matrices as the core multiplies them, int8: as they are they would be read from memory, and by one thread."""

    def __init__(self, heads: Heads, target: NativeRunner, pool: Any) -> None:
        super().__init__(heads, target.features, target.slots)
        self._pool, self._arena = pool, core().Arena()
        self._packed = {name: self._pack(x.contiguous()) for name, x in self.tensors.items() if x.ndim == 2}

    def product(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(core().linear(self._packed[name], x.contiguous().numpy(), self._pool))

    def _pack(self, x: torch.Tensor) -> Any:
        rows = x.numpy().view(np.uint8)
        tensor = core().pack(rows, "F32", *x.shape, self._arena, self._pool, quantize="int8")
        return core().PackedLinear([tensor])


class NativeHeads(NativeRunner):
    """Heads on the target's slots and block ids; their matrices become int8."""

    def __init__(self, heads: Heads, target: NativeRunner, source: WeightSource, **settings: Any) -> None:
        """`settings`: num_blocks, block_size, max_positions, kv_dtype and threads as the target has them."""
        config = heads_config(heads.kind, target.config)
        own = HeadsSource(heads, target.config, source)
        super().__init__(
            describe(config),
            own,
            **settings,
            quantize="int8" if any(own.info(name).kind in FLOATS for name in own.names() if name != "norm.weight") else "",
            slots=target.slots,
            head_ids=heads.vocab,
            embeds=False,
        )
        self.target = target
        self.entrance = Packed(heads, target, thread_pool(settings.get("threads", 0)))
        self._ids = core().Step()
        target.features.reserve()

    def _draw_each(self, step: Any, plan: StepPlan, slots: Mapping[int, Slot], part: Part) -> None:
        """There is no short way: its steps begin with hidden rows."""

    def _run(self, step: Any, plan: StepPlan, slots: Mapping[int, Slot], part: Part) -> np.ndarray:
        embedded = self._embedded(plan, slots) if self.entrance.heads.kind == FEATURE else None
        rows = self.entrance.rows(plan, embedded).numpy()
        out = np.empty_like(rows)
        self.program.run(step, hidden=rows, hidden_out=out)
        if embedded is not None:
            self.entrance.left(plan, torch.from_numpy(out))
        return out

    def _embedded(self, plan: StepPlan, slots: Mapping[int, Slot]) -> torch.Tensor:
        """The target's embeddings of a plan's tokens, [n, hidden]."""
        self._ids.clear()
        for feed in plan.feeds:
            self._ids.feed(slots[feed.slot].sequence, feed.start, feed.count)
        rows = np.empty((self._ids.rows, self.config.hidden_size), np.float32)
        self.target.program.run(self._ids, layers=(0, 0), hidden_out=rows)
        return torch.from_numpy(rows)
