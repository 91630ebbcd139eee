"""Linear: one or several projections of the same input, fused into one product when they are loaded."""

from collections.abc import Mapping

import torch

from headrace.layers.holder import Holder, ParamSpec
from headrace.quant.dense import Dense
from headrace.quant.method import LinearMethod

DENSE = Dense()


class Linear(Holder):
    """Weights [n_out, n_in] (and bias) whose rows are the parts one after the other.

    `parts` is the output width, or name -> width of each part ({"q": 576, "k": 192, "v": 192}); with `split` the op `linear`
    returns one value per part. `shard` names the side that tensor parallelism cuts: "out" (rows of each part) or "in".
    """

    def __init__(
        self, n_in: int, parts: int | Mapping[str, int], bias: bool = False, split: bool = False, shard: str | None = None
    ) -> None:
        super().__init__()
        self.n_in = n_in
        self.parts = tuple({"": parts}.items() if isinstance(parts, int) else parts.items())
        self.sizes = tuple(rows for _, rows in self.parts)
        self.n_out = sum(self.sizes)
        self.split = split
        self.shard = shard
        self.has_bias = bias
        self.method: LinearMethod = DENSE
        self.bias: torch.nn.Parameter | None = None

    def params(self) -> dict[str, ParamSpec]:
        specs = {"weight": ParamSpec(self.parts, (self.n_in,), shard={"out": 0, "in": 1, None: None}[self.shard])}
        if self.has_bias:
            specs["bias"] = ParamSpec(self.parts, shard=0 if self.shard == "out" else None)
        return specs

    def create(self, dtype: torch.dtype) -> None:
        self.method.create(self, self.n_in, self.n_out, dtype)
        if self.has_bias:
            self.allocate("bias", self.params()["bias"], dtype)

    def finish(self) -> None:
        self.method.finish(self)
