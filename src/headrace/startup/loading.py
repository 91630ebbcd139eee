"""From an open model to one in memory: on which device, in which number format."""

from pathlib import Path

import torch

from headrace.data.plan import AMATEUR, DRAFT, TARGET
from headrace.models.base import Model
from headrace.startup import heads, selfdraft
from headrace.startup.memory import check_weights_fit
from headrace.startup.opening import Opened, open_companion, open_files, open_model
from headrace.startup.recipe import HEADS, SELF, Role
from headrace.weights.loader import load_model
from headrace.weights.progress import Progress

__all__ = ["DTYPES", "Opened", "load", "open_files", "open_model", "open_roles", "pick_device", "pick_dtype"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def open_roles(
    target: Opened, draft: str | Path | None, amateur: str | Path | None, by_itself: bool, progress: Progress | None
) -> tuple[Role, ...]:
    """The target, and what works beside it: `draft` is a model or a folder of trained heads; without one the target may draft
    `by_itself`. Raises ValueError besides what opening does."""
    roles = [Role(TARGET.name, target)]
    if draft is not None and heads.is_heads(draft):
        roles.append(Role(HEADS, heads=heads.load(draft, target)))
    elif draft is not None:
        roles.append(Role(DRAFT, open_companion(draft, target, DRAFT, progress)))
    elif by_itself:
        roles.append(Role(SELF, span=selfdraft.load(target.path)))
    if amateur is not None:
        roles.append(Role(AMATEUR, open_companion(amateur, target, AMATEUR, progress)))
    return tuple(roles)


def load(opened: Opened, dtype: torch.dtype, device: torch.device, free: int) -> Model:
    """The torch model, in memory of which `free` bytes are free. Raises DoesNotFit, WeightError."""
    source = opened.source
    elements = sum(_elements(source.info(name).shape) for name in source.names())
    check_weights_fit(elements * dtype.itemsize, free, opened.name)
    return load_model(source, dtype, device)


def pick_device(device: str) -> torch.device:
    """auto: the first GPU if there is one, else the CPU. Raises ValueError for a device torch cannot use."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ValueError(f"unknown device {device!r}; use auto, cpu, cuda or cuda:N") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device cuda was asked for and torch sees no GPU; use device='cpu'")
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 where the device computes in it, else float32."""
    if dtype == "auto":
        fast = device.type == "cuda" or "avx512_bf16" in _cpu_flags() or "amx_bf16" in _cpu_flags()
        return torch.bfloat16 if fast else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; use auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


def _elements(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
