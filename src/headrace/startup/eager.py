"""Torch as a back end."""

import torch

from headrace.data.config import ModelConfig
from headrace.data.plan import TARGET
from headrace.eager.heads import EagerHeads
from headrace.eager.program import EagerProgram
from headrace.kv.layout import kv_shape
from headrace.kv.pool import KVPool
from headrace.startup import memory
from headrace.startup.loading import DTYPES, load, pick_dtype
from headrace.startup.offer import Loaded
from headrace.startup.recipe import BLOCK_SIZE, HEADS, Recipe


class Eager:
    """Any device torch knows. Its products choose an order of sums by shape."""

    name = "torch"
    row_invariant = False
    kv_dtypes = frozenset(DTYPES)

    def why_not(self, recipe: Recipe) -> str:
        return ""

    def free_memory(self, recipe: Recipe) -> int:
        device = torch.device(recipe.settings.device)
        return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else memory.free_memory()

    def load(self, recipe: Recipe) -> Loaded:
        settings, device = recipe.settings, torch.device(recipe.settings.device)
        if settings.quantize:
            raise ValueError("quantize needs the native back end; leave it out, or take a quantised file")
        exact = recipe.target.config.encoder and settings.dtype == "auto" and device.type == "cpu"
        dtype = pick_dtype("float32" if exact else settings.dtype, device)
        if settings.kv_dtype not in {"auto", *DTYPES}:
            raise ValueError(f"torch keeps no KV in {settings.kv_dtype}; use kv_dtype auto, {', '.join(DTYPES)}")
        kv_type = dtype if settings.kv_dtype == "auto" else DTYPES[settings.kv_dtype]

        def kv_bytes(config: ModelConfig) -> int:
            return kv_shape(config).block_bytes(BLOCK_SIZE, kv_type.itemsize)

        models = {role: load(each, dtype, device, self.free_memory(recipe)) for role, each in recipe.models.items()}
        plan = recipe.plan(kv_bytes, dtype.itemsize, self.free_memory(recipe))
        heads = recipe.head_ids()
        programs: dict[str, EagerProgram] = {}
        for role, model in models.items():
            pool = KVPool(model.config, plan.num_blocks, BLOCK_SIZE, kv_type, device)
            programs[role] = EagerProgram(model, pool, settings.threads, heads.get(role))
        if recipe.heads is not None:
            programs[HEADS] = EagerHeads(recipe.heads, programs[TARGET.name], recipe.target.source)
        return Loaded(programs, plan, dtype)
