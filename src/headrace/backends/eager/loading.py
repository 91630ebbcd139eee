"""Loading of models into torch: device, number format, weights, KV pools."""

import logging
import math
from collections.abc import Callable

import numpy as np
import torch

from headrace import host
from headrace.backends.eager.program import EagerHeads, EagerProgram
from headrace.backends.eager.rounded import round_inputs
from headrace.backends.memory import check_weights_fit
from headrace.backends.protocol import LoadedPrograms
from headrace.backends.recipe import BLOCK_SIZE, Recipe
from headrace.data.config import ModelConfig
from headrace.data.plan import TARGET
from headrace.kv.layout import kv_shape, kv_shapes
from headrace.kv.pool import KVPool
from headrace.kv.rounded import FORMATS, Rounded
from headrace.models.base import Model
from headrace.models.layers import Linear
from headrace.runner.centring import k_shifts
from headrace.startup.opening import Opened
from headrace.weights.kinds import FLOATS
from headrace.weights.kv_settings import kv_settings
from headrace.weights.loader import input_scales, load_model, weight_kinds

log = logging.getLogger("headrace")

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def load(recipe: Recipe, free_memory: Callable[[Recipe], int]) -> LoadedPrograms:
    """Load the weights of all models into torch; see `Backend.load`."""
    settings, device = recipe.settings, torch.device(recipe.settings.device)
    if settings.quantize:
        raise ValueError("quantize needs the native back end; leave it out, or take a quantised file")
    target = recipe.target.config
    exact = (target.encoder or target.source is not None) and settings.dtype == "auto" and device.type == "cpu"
    dtype = pick_dtype("float32" if exact else settings.dtype, device)
    kv_type = DTYPES.get(settings.kv_dtype, dtype)

    def kv_bytes(config: ModelConfig, window: int) -> list[int]:
        return [shape.block_bytes(BLOCK_SIZE, kv_type.itemsize) for shape in kv_shapes(config, window)]

    opened, owners = recipe.models, recipe.owners
    # Roles with the same file share its weights.
    firsts = {role: opened[role] for role in dict.fromkeys(owners.values())}

    def pool_bytes(encoder: ModelConfig) -> int:
        return -(-recipe.longest_source(encoder) // BLOCK_SIZE) * kv_shape(encoder).block_bytes(BLOCK_SIZE, dtype.itemsize)

    need, free = sum(_elements(each) for each in firsts.values()) * dtype.itemsize, free_memory(recipe)
    narrower = "a narrower dtype (dtype='bfloat16')" if dtype.itemsize > 2 else ""
    check_weights_fit(need, free, *(each.name for each in opened.values()), narrower=narrower)
    plan = recipe.plan(kv_bytes, dtype.itemsize, free - need, recipe.scratch(pool_bytes))
    models = {role: _model(recipe, each, dtype, device, plan.max_model_len) for role, each in firsts.items()}
    heads = recipe.head_ids()
    programs: dict[str, EagerProgram] = {}
    for role, owner in owners.items():
        model, rounding = models[owner], _rounding(opened[role], models[owner], settings.kv_dtype)
        windows = (plan.window, plan.window_blocks) if role == TARGET.name else ()
        pool = KVPool(model.config, plan.num_blocks, BLOCK_SIZE, kv_type, device, rounding, *windows)
        adapters = recipe.adapters if role == TARGET.name else ()
        programs[role] = EagerProgram(model, pool, settings.threads, heads.get(role), adapters)
    if settings.kv_dtype in FORMATS:
        log.warning("torch rounds K and V to %s and keeps them as %s: it saves no memory", settings.kv_dtype, kv_type)
    for each in recipe.headed:
        programs[each.name] = EagerHeads(each.heads, programs[TARGET.name], recipe.target.source)
    return LoadedPrograms(programs, plan, str(dtype).removeprefix("torch."))


def _rounding(opened: Opened, model: Model, kv_dtype: str) -> Rounded | None:
    """Rounding of a model's K and V; None: the pool's dtype. As in the native core, rounded K is stored less a shift from the
    model's file, or from the biases of the projection."""
    if kv_dtype not in FORMATS:
        return None
    config, settings = opened.config, kv_settings(opened.source, opened.config)
    shifts = k_shifts(model, _bias) if settings is None else settings.by_layer(config.kv_layers)
    return Rounded(kv_dtype, {at: torch.tensor(shift).view(-1, config.layers[at].head_dim) for at, shift in shifts.items()})


def _bias(layer: Linear) -> np.ndarray | None:
    bias: np.ndarray | None = None if layer.bias is None else layer.bias.float().cpu().numpy()
    return bias


def _model(recipe: Recipe, opened: Opened, dtype: torch.dtype, device: torch.device, context: int) -> Model:
    """Load the weights of one model for contexts of at most `context` tokens. Raises WeightError."""
    source, before = opened.source, 0

    def tell(done: int, total: int) -> None:
        nonlocal before
        if not before:
            recipe.progress.start(f"reading {opened.path.name}", total)
        recipe.progress.advance(done - before)
        before = done

    model = load_model(source, dtype, device, opened.config.within(context), tell)
    if (activations := recipe.activations(opened)) != "auto":
        kinds = weight_kinds(model, source)
        integers = {path: tuple(kind not in FLOATS for kind in parts) for path, parts in kinds.items()}
        round_inputs(model, integers, activations, input_scales(model, source))
    return model


def device(name: str) -> torch.device:
    """auto: the first GPU if there is one, else the CPU. Raises ValueError for a device torch cannot use."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(name)
    except RuntimeError:
        raise ValueError(f"unknown device {name!r}; use auto, cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda: torch finds no GPU; use device='cpu'")
    return chosen


def free_memory(name: str) -> int:
    """Free bytes of a GPU."""
    return int(torch.cuda.mem_get_info(torch.device(name))[0])


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 if the device computes in it, else float32."""
    if dtype == "auto":
        fast = device.type == "cuda" or bool({"avx512_bf16", "amx_bf16"} & host.cpu_flags())
        return torch.bfloat16 if fast else torch.float32
    return DTYPES[dtype]


def _elements(opened: Opened) -> int:
    """Number of values in a model's file."""
    return sum(math.prod(opened.source.info(name).shape) for name in opened.source.names())
