"""An order of ops with one more of them: llama, each layer's output times a number."""

from collections.abc import Callable
from typing import Any

from headrace.models.base import Value
from headrace.models.llama import Llama


def scaled_llama(scale: Callable[..., Any], by: float) -> type[Llama]:
    class ScaledLlama(Llama):
        def layer(self, i: int, x: Value, ctx: Any) -> Value:
            return scale(super().layer(i, x, ctx), by)

    return ScaledLlama
