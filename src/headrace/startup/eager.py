"""Torch as a back end. What it loads models with is imported when it is asked to."""

from headrace import host
from headrace.startup.offer import Loaded
from headrace.startup.recipe import Recipe


class Eager:
    """Any device torch knows. Its products choose an order of sums by shape."""

    name = "torch"
    row_invariant = False
    kv_dtypes = frozenset({"float64", "float32", "bfloat16", "float16", "int8", "int4"})

    def why_not(self, recipe: Recipe) -> str:
        return ""

    def free_memory(self, recipe: Recipe) -> int:
        if recipe.settings.device.startswith("cpu"):
            return host.free_memory()
        from headrace.startup import tensors  # torch

        return tensors.free_memory(recipe.settings.device)

    def load(self, recipe: Recipe) -> Loaded:
        from headrace.startup import tensors  # torch

        return tensors.load(recipe, self.free_memory)
