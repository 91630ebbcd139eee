"""Models in torch: on which device, in which number format."""

import logging
from collections.abc import Callable

import torch

from headrace import host
from headrace.data.config import ModelConfig
from headrace.data.plan import TARGET
from headrace.eager.heads import EagerHeads
from headrace.eager.program import EagerProgram
from headrace.eager.rounded import round_inputs
from headrace.kv.layout import kv_shape
from headrace.kv.pool import KVPool
from headrace.kv.rounded import FORMATS, RoundedPool
from headrace.models.base import Model
from headrace.startup.memory import check_weights_fit
from headrace.startup.offer import Loaded
from headrace.startup.opening import Opened
from headrace.startup.recipe import BLOCK_SIZE, Recipe
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


def load(recipe: Recipe, free_memory: Callable[[Recipe], int]) -> Loaded:
    """The weights of all models in torch; see Offer.load."""
    settings, device = recipe.settings, torch.device(recipe.settings.device)
    if settings.quantize:
        raise ValueError("quantize needs the native back end; leave it out, or take a quantised file")
    target = recipe.target.config
    exact = (target.encoder or target.source is not None) and settings.dtype == "auto" and device.type == "cpu"
    dtype = pick_dtype("float32" if exact else settings.dtype, device)
    kv_type = DTYPES.get(settings.kv_dtype, dtype)

    def kv_bytes(config: ModelConfig) -> int:
        return kv_shape(config).block_bytes(BLOCK_SIZE, kv_type.itemsize)

    models = {role: _model(recipe, each, dtype, device, free_memory(recipe)) for role, each in recipe.models.items()}

    def pool_bytes(encoder: ModelConfig) -> int:
        return -(-recipe.longest // BLOCK_SIZE) * kv_shape(encoder).block_bytes(BLOCK_SIZE, dtype.itemsize)

    plan = recipe.plan(kv_bytes, dtype.itemsize, free_memory(recipe), recipe.scratch(pool_bytes))
    heads = recipe.head_ids()
    programs: dict[str, EagerProgram] = {}
    for role, model in models.items():
        pool = _pool(recipe.models[role], settings.kv_dtype, plan.num_blocks, kv_type, device)
        programs[role] = EagerProgram(model, pool, settings.threads, heads.get(role))
    if settings.kv_dtype in FORMATS:
        log.warning("torch rounds K and V to %s and keeps them as %s: it saves no memory", settings.kv_dtype, kv_type)
    for each in recipe.headed:
        programs[each.name] = EagerHeads(each.heads, programs[TARGET.name], recipe.target.source)
    return Loaded(programs, plan, str(dtype).removeprefix("torch."))


def _pool(opened: Opened, kv_dtype: str, blocks: int, dtype: torch.dtype, device: torch.device) -> KVPool:
    if kv_dtype not in FORMATS:
        return KVPool(opened.config, blocks, BLOCK_SIZE, dtype, device)
    shape = kv_shape(opened.config)
    settings = kv_settings(opened.source, shape)
    centre = None if settings is None else torch.tensor(settings.centre).view(shape)
    return RoundedPool(opened.config, blocks, BLOCK_SIZE, dtype, device, format=kv_dtype, centre=centre)


def _model(recipe: Recipe, opened: Opened, dtype: torch.dtype, device: torch.device, free: int) -> Model:
    """The torch model, in memory of which `free` bytes are free. Raises DoesNotFit, WeightError."""
    source = opened.source
    elements = sum(_elements(source.info(name).shape) for name in source.names())
    check_weights_fit(elements * dtype.itemsize, free, opened.name)
    before = 0

    def tell(done: int, total: int) -> None:
        nonlocal before
        if not before:
            recipe.progress.start(f"reading {opened.path.name}", total)
        recipe.progress.advance(done - before)
        before = done

    model = load_model(source, dtype, device, progress=tell)
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
        raise ValueError("device cuda was asked for and torch sees no GPU; use device='cpu'")
    return chosen


def free_memory(name: str) -> int:
    """Bytes that are free on a GPU."""
    return int(torch.cuda.mem_get_info(torch.device(name))[0])


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the device computes in it, else float32."""
    if dtype == "auto":
        fast = device.type == "cuda" or bool({"avx512_bf16", "amx_bf16"} & host.cpu_flags())
        return torch.bfloat16 if fast else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
