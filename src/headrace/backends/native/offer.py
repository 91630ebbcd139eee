"""The native back end: loads models into the compiled core."""

import logging
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from headrace import core, host
from headrace.backends import memory
from headrace.backends.native import offload
from headrace.backends.native.program import KV_DTYPES, NativeProgram, pool_block_bytes, scratch_bytes, thread_pool
from headrace.backends.native.shared import SharedFile
from headrace.backends.native.weights import PackedWeights, WeightsFile, packed_bytes, packed_sizes, total_packed_bytes
from headrace.backends.protocol import LoadedPrograms, RankGroup
from headrace.backends.recipe import BLOCK_SIZE, Recipe
from headrace.data.config import ModelConfig
from headrace.data.plan import MAX_NODES, TARGET
from headrace.data.settings import ModelSettings
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.parallel.ranks.share import Share
from headrace.weights.kv_settings import kv_settings
from headrace.weights.source import WeightSource

log = logging.getLogger("headrace")


class TargetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the target's program, the same on all ranks and stages. threads: of one process, 0 for one per core.

    window, window_blocks: pool of the window layers, 0 if there is none.
    """

    quantize: str
    activations: str
    kv_dtype: str
    threads: int
    num_blocks: int
    max_positions: int
    window: int = 0
    window_blocks: int = 0
    rope: str | None = None

    @property
    def context(self) -> int:
        """Tokens of the longest sequence, without draft nodes."""
        return self.max_positions - MAX_NODES

    @property
    def program(self) -> dict[str, Any]:
        """As arguments of NativeProgram."""
        settings = msgspec.structs.asdict(self)
        for name in ("rope", "window", "window_blocks"):  # the config has the first; other programs have no such pool
            del settings[name]
        return {**settings, "block_size": BLOCK_SIZE}


def of_stage(path: str, layers: range, config: ModelConfig) -> bool:
    """Whether a pipeline's stage with these layers holds the parameters at `path`."""
    first, last = layers.start == 0, layers.stop == config.num_layers
    name, *rest = path.split(".")
    if name == "layers":
        return int(rest[0]) in layers
    if name == "tokens" and config.tied_head:
        return first or last
    return last if name in ("norm", "output") else first


def stage_bytes(config: ModelConfig, source: WeightSource, settings: TargetSettings, layers: range) -> int:
    """Bytes of the packed weights and of the K/V of a pipeline's stage."""
    sizes = packed_sizes(describe(config), source, settings.quantize)
    weights = sum(size.nbytes for size in sizes if of_stage(size.path, layers, config))
    held = config.of_layers(layers)
    blocks = (settings.num_blocks, settings.window_blocks)
    of_pools = pool_block_bytes(held, BLOCK_SIZE, settings.kv_dtype, settings.window)
    return weights + sum(count * size for count, size in zip(blocks, of_pools, strict=False))


def load_target(
    config: ModelConfig,
    source: WeightSource,
    settings: TargetSettings,
    group: RankGroup | None = None,
    on_disk: bool = False,
    shared: SharedFile | None = None,
    **stage: Any,
) -> NativeProgram:
    """The target's program, or this rank's share of it. Its weights are laid out and not packed yet.

    on_disk: pack the weights into a file (offload). shared: into memory of all replicas. stage: layers and input rows of a
    pipeline's stage.
    """
    own = config if group is None else group.share.narrowed()
    model, centre = describe(own.within(settings.context)), _centre(config, source)
    if group is not None and centre is not None:
        held = group.share.layers
        centre = {layer: np.ascontiguousarray(mean[held[layer].cut("heads", "k")]) for layer, mean in centre.items()}
    weights = weights_in_file(model, source, settings, shared) if on_disk or shared is not None else None
    stage |= {"window": settings.window, "window_blocks": settings.window_blocks}
    return NativeProgram(model, source, weights=weights, centre=centre, pack=False, group=group, **stage, **settings.program)


def target_settings(recipe: Recipe, plan: memory.MemoryPlan) -> TargetSettings:
    """Settings of the target's program by a recipe and its memory plan."""
    return TargetSettings(
        quantize=recipe.settings.quantize or "",
        activations=recipe.activations(recipe.target),
        kv_dtype=recipe.settings.kv_dtype,
        threads=threads_of_process(recipe.settings),
        num_blocks=plan.num_blocks,
        max_positions=plan.max_model_len + MAX_NODES,
        window=plan.window,
        window_blocks=plan.window_blocks,
        rope=recipe.settings.rope,
    )


def threads_of_process(settings: ModelSettings) -> int:
    """Threads of each rank and stage; 0, one for each core, for a model in one process."""
    processes = max(1, settings.tp * settings.pp)
    if settings.threads is not None or processes == 1:
        return settings.threads or 0
    return max(1, core.processors() // processes)


def weights_in_file(model: Model, source: WeightSource, settings: TargetSettings, shared: SharedFile | None) -> PackedWeights:
    """A model's weights, to be packed into a file on disk, or into memory shared with others. Raises ValueError if the disk
    has no room."""
    need = packed_bytes(model, source, settings.quantize) + offload.ROUNDING
    pool = thread_pool(settings.threads)
    if shared is not None:
        file = WeightsFile(shared.descriptor, need, shared=True, filled=shared.filled)
        return PackedWeights(model, source, pool, settings.quantize, file=file)
    with offload.weights_file(need) as on_disk:
        return PackedWeights(model, source, pool, settings.quantize, file=WeightsFile(on_disk.fileno(), need))


def start_streaming(program: NativeProgram, plan: memory.MemoryPlan, least: int) -> memory.MemoryPlan:
    """Hold what fits of a program's weights in memory. Returns the plan with a line about the rest.

    plan: made with `least` bytes of weights.
    """
    division, bandwidth = offload.stream(program, offload.room_for_weights(plan.spare, least))
    if not division.streamed:
        return replace(plan, summary=f"{plan.summary}, all weights fit in memory and offload does nothing")
    log.warning("%s", division.summary(bandwidth))
    return plan


def _shares(recipe: Recipe) -> bool:
    """Whether a recipe's target can share its weights with other replicas: it is whole, in one process, and in memory."""
    settings = recipe.settings
    return settings.tp == 1 and settings.pp == 1 and recipe.layers is None and not settings.offload


def _centre(config: ModelConfig, source: WeightSource) -> dict[int, np.ndarray] | None:
    kept = kv_settings(source, config)
    return None if kept is None else kept.by_layer(config.kv_layers)


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
        if recipe.shared_weights is None or not _shares(recipe):
            return self._load(recipe, None)
        with SharedFile(recipe.shared_weights) as shared:
            return self._load(recipe, shared)

    def _load(self, recipe: Recipe, shared: SharedFile | None) -> LoadedPrograms:
        plan, least = self._plan(recipe, shared is not None and shared.filled)
        of_target = target_settings(recipe, plan)
        group: RankGroup | None = None if recipe.start_ranks is None else recipe.start_ranks(recipe, of_target)
        try:
            programs = self._programs(recipe, of_target, group, shared)
            if group is not None:
                group.ready()
            if recipe.settings.offload:
                plan = start_streaming(programs[TARGET.name], plan, least)
        except BaseException:
            if group is not None:
                group.close()
            raise
        return LoadedPrograms(programs, plan, "bfloat16")

    def _programs(
        self, recipe: Recipe, settings: TargetSettings, group: RankGroup | None, shared: SharedFile | None
    ) -> dict[str, NativeProgram]:
        """Load the programs of all roles. Ranks share the target; all other programs are whole, on the first rank."""
        models, owners, heads = recipe.models, recipe.owners, recipe.head_ids()
        stage = {"layers": recipe.layers, "inputs": recipe.inputs, "adapters": recipe.adapters}
        opened, on_disk = recipe.target, recipe.settings.offload
        target = load_target(opened.config, opened.source, settings, group, on_disk, shared, **stage)
        programs = {TARGET.name: target}
        for name, owner in owners.items():
            if name == TARGET.name:
                continue
            same = owner in programs and (owner != TARGET.name or group is None)
            programs[name] = NativeProgram(
                programs[owner].model if same else describe(models[owner].config.within(settings.context)),
                models[owner].source,
                weights=programs[owner].weights if same else None,
                head_ids=heads.get(name),
                centre=_centre(models[owner].config, models[owner].source),
                pack=False,
                **{**settings.program, "activations": recipe.activations(models[owner])},
            )
        # In a thread of its own: packing mostly runs without the GIL.
        recipe.target.load_tokenizer()
        for program in programs.values():
            program.weights.pack(recipe.progress)
        if recipe.headed:
            from headrace.backends.native.heads import NativeHeads  # torch makes the heads' first products

        for role in recipe.headed:
            shared_settings = {name: value for name, value in settings.program.items() if name != "quantize"}
            programs[role.name] = NativeHeads(role.heads, programs[TARGET.name], recipe.target.source, **shared_settings)
        return programs

    def _plan(self, recipe: Recipe, there: bool) -> tuple[memory.MemoryPlan, int]:
        """The memory plan of all ranks and stages together, and the least bytes of the target's weights (offload).

        there: whether the target's weights are in memory already, packed by another replica.
        """
        settings, models = recipe.settings, recipe.models
        quantize, target = settings.quantize or "", recipe.target
        described = {role: describe(models[role].config) for role in dict.fromkeys(recipe.owners.values())}
        need, narrower = total_packed_bytes([(model, models[role].source, quantize) for role, model in described.items()])
        shares = [Share(rank, settings.tp, target.config) for rank in range(settings.tp)] if settings.tp > 1 else [None]
        if settings.tp * settings.pp > 1:
            whole = described[TARGET.name]
            held = [size for share in shares for size in packed_sizes(whole, target.source, quantize, share)]
            here = held
            if settings.stage_hosts and recipe.layers:  # other hosts have the other stages
                here = [size for size in held if of_stage(size.path, recipe.layers, target.config)]
            elif settings.pp > 1 and target.config.tied_head:  # the first stage embeds, the last one has the head
                here = held + [size for size in held if size.path == "tokens"]
            need += sum(size.nbytes for size in here) - packed_bytes(whole, target.source, quantize)
        if there:
            need -= packed_bytes(described[TARGET.name], target.source, quantize)
        need += sum(adapter.bytes for adapter in recipe.adapters)
        least = need
        if settings.offload:
            sizes = list(packed_sizes(described[TARGET.name], target.source, quantize))
            least = offload.least_resident(offload.unit_sizes(described[TARGET.name], sizes))
            need += least - sum(size.nbytes for size in sizes)
        free = host.free_memory()
        memory.check_weights_fit(need, free, *(each.name for each in models.values()), narrower=narrower)
        scratch = recipe.scratch(lambda encoder: scratch_bytes(encoder, BLOCK_SIZE, recipe.longest_source(encoder) + MAX_NODES))

        def block_bytes(config: ModelConfig, window: int) -> list[int]:
            ranks = shares if config is target.config else [None]
            held = [config if share is None else share.narrowed() for share in ranks]
            sizes = [pool_block_bytes(each, BLOCK_SIZE, settings.kv_dtype, window) for each in held]
            return [sum(of_ranks) for of_ranks in zip(*sizes, strict=True)]

        return recipe.plan(block_bytes, 4, free - need, scratch), least
