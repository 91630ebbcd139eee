"""Norm: the weights of an RMSNorm or LayerNorm."""

from headrace.models.layers.holder import Holder, ParamSpec, Tensor


class Norm(Holder):
    """`weight` [width], the factor itself (1 + w for gemma), in float32 or wider. kind: rms or layer."""

    weight: Tensor

    def __init__(self, width: int, eps: float, kind: str = "rms", bias: bool = False) -> None:
        self.width = width
        self.eps = eps
        self.kind = kind
        self.has_bias = bias
        self.bias: Tensor | None = None

    def params(self) -> dict[str, ParamSpec]:
        spec = ParamSpec((("", self.width),), exact=True)
        return {"weight": spec, "bias": spec} if self.has_bias else {"weight": spec}
