"""The native back end: loads models into the compiled core."""

from typing import Any

from headrace import core, host
from headrace.backends import memory
from headrace.backends.native.program import KV_DTYPES, NativeProgram, kv_block_bytes, scratch_bytes
from headrace.backends.native.weights import total_packed_bytes
from headrace.backends.protocol import LoadedPrograms
from headrace.backends.recipe import BLOCK_SIZE, Recipe
from headrace.data.plan import MAX_NODES, TARGET
from headrace.kv.layout import kv_shape
from headrace.models.registry import describe
from headrace.weights.kv_settings import kv_settings


class NativeBackend:
    """The compiled core, on CPUs. Sums have one order, so outputs do not depend on the batch."""

    name = "native"
    row_invariant = True
    kv_dtypes = frozenset(KV_DTYPES) - {"auto"}

    def unsupported_reason(self, recipe: Recipe) -> str:
        settings = recipe.settings
        if not settings.device.startswith("cpu"):
            return f"the native core computes on the CPU, and the device is {settings.device}"
        if settings.dtype not in ("auto", "bfloat16"):
            return f"dtype {settings.dtype} is not supported by the native core"
        if settings.kv_dtype not in KV_DTYPES:
            return f"the native core keeps no KV in {settings.kv_dtype}"
        return core.reason()

    def free_memory(self, recipe: Recipe) -> int:
        return host.free_memory()

    def load(self, recipe: Recipe) -> LoadedPrograms:
        settings, models = recipe.settings, recipe.models
        quantize, owners = settings.quantize or "", recipe.owners
        described = {role: describe(models[role].config) for role in dict.fromkeys(owners.values())}
        need, narrower = total_packed_bytes([(model, models[role].source, quantize) for role, model in described.items()])
        free = host.free_memory()
        memory.check_weights_fit(need, free, *(each.name for each in models.values()), narrower=narrower)
        scratch = recipe.scratch(lambda encoder: scratch_bytes(encoder, BLOCK_SIZE, recipe.longest + MAX_NODES))
        plan = recipe.plan(lambda config: kv_block_bytes(config, BLOCK_SIZE, settings.kv_dtype), 4, free - need, scratch)
        shared: dict[str, Any] = {
            "num_blocks": plan.num_blocks,
            "block_size": BLOCK_SIZE,
            "max_positions": plan.max_model_len + MAX_NODES,
            "kv_dtype": settings.kv_dtype,
            "activations": recipe.activations(recipe.target),
            "threads": settings.threads or 0,
        }
        heads = recipe.head_ids()
        programs: dict[str, NativeProgram] = {}
        for name, owner in owners.items():
            kept = kv_settings(models[owner].source, kv_shape(models[owner].config))
            programs[name] = NativeProgram(
                described[owner],
                models[owner].source,
                quantize=quantize,
                weights=programs[owner].weights if owner in programs else None,
                head_ids=heads.get(name),
                centre=None if kept is None else kept.centre,
                layers=recipe.layers,
                inputs=recipe.inputs,
                pack=False,
                **{**shared, "activations": recipe.activations(models[owner])},
            )
        # In a thread of its own: packing mostly runs without the GIL.
        recipe.target.load_tokenizer()
        for program in programs.values():
            program.weights.pack(recipe.progress)
        if recipe.headed:
            from headrace.backends.native.heads import NativeHeads  # torch makes the heads' first products

        for role in recipe.headed:
            programs[role.name] = NativeHeads(role.heads, programs[TARGET.name], recipe.target.source, **shared)
        return LoadedPrograms(programs, plan, "bfloat16")
