"""Norm: the weights of an RMSNorm or LayerNorm."""

import torch

from headrace.layers.holder import Holder, ParamSpec


class Norm(Holder):
    """`weight` [width] is what is multiplied (gemma's 1 + w), kept in float32 or wider; `kind` is rms or layer."""

    weight: torch.nn.Parameter

    def __init__(self, width: int, eps: float, kind: str = "rms", bias: bool = False) -> None:
        super().__init__()
        self.width = width
        self.eps = eps
        self.kind = kind
        self.has_bias = bias
        self.bias: torch.nn.Parameter | None = None

    def params(self) -> dict[str, ParamSpec]:
        spec = ParamSpec((("", self.width),), exact=True)
        return {"weight": spec, "bias": spec} if self.has_bias else {"weight": spec}
