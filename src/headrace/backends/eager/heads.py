"""Trained heads in torch."""

import torch

from headrace.backends.eager.program import EagerProgram
from headrace.kv.pool import KVPool
from headrace.ops.context import Context
from headrace.runner.heads import HeadInputs, Heads, HeadsSource, enter, heads_config
from headrace.weights.loader import load_model
from headrace.weights.source import WeightSource


class EagerHeads(EagerProgram):
    """A program of trained heads. It uses the target's block ids."""

    inputs: HeadInputs

    def __init__(self, heads: Heads, target: EagerProgram, source: WeightSource) -> None:
        config, weight = heads_config(heads.kind, target.config), next(target.model.parameters())
        model = load_model(HeadsSource(heads, target.config, source), weight.dtype, weight.device, config)
        pool = KVPool(config, target.pool.num_blocks, target.pool.block_size, target.pool.dtype, weight.device)
        super().__init__(model, pool, target.threads, heads.vocab)
        self.target = target
        self.inputs = HeadInputs(heads)

    def enter(self, ctx: Context, rows: torch.Tensor | None) -> torch.Tensor:
        assert rows is not None, "heads begin with hidden rows"
        if self.inputs.chains:
            rows = enter(self.inputs.tensors, self.target.model.embed(ctx), rows)
        return rows.to(self._weight.dtype)
