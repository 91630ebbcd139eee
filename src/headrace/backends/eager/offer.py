"""Torch as a back end. Torch itself is imported when a model is loaded."""

from headrace import host
from headrace.backends.protocol import LoadedPrograms
from headrace.backends.recipe import Recipe


class EagerBackend:
    """Torch on any device it supports. Its matrix products choose the order of sums by shape."""

    name = "torch"
    row_invariant = False
    kv_dtypes = frozenset({"float64", "float32", "bfloat16", "float16", "int8", "int4"})

    def unsupported_reason(self, recipe: Recipe) -> str:
        return "" if recipe.layers is None else "torch has no pipeline stages; leave pp out"

    def free_memory(self, recipe: Recipe) -> int:
        if recipe.settings.device.startswith("cpu"):
            return host.free_memory()
        from headrace.backends.eager import loading  # torch

        return loading.free_memory(recipe.settings.device)

    def load(self, recipe: Recipe) -> LoadedPrograms:
        from headrace.backends.eager import loading  # torch

        return loading.load(recipe, self.free_memory)
