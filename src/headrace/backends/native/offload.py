"""Layer offload: packed weights that do not fit in memory stay in a file on disk (csrc/program/streaming.h).

Units are the parts of the weights that a step reads one after the other: embed, each layer, the head. Units that fit are held
in memory. The others are read in each step, one while the unit before it computes, and released afterwards.
"""

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

from headrace import host
from headrace.backends.memory import gib
from headrace.backends.native.weights import PackedSize
from headrace.backends.recipe import Recipe
from headrace.data.plan import TARGET
from headrace.models.base import Model
from headrace.models.layers import Embedding
from headrace.weights.store import home

# Units in memory besides the held ones: the current one and the next.
WINDOW = 2
# Bytes of an arena besides the weights: tensors begin at cache lines.
ROUNDING = 4 << 20
# Memory that is left for buffers of a step: bytes, and a share of what is free.
SPARE, SPARE_SHARE = 128 << 20, 0.05


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a model's units between memory and disk.

    sizes: bytes by unit, embed first (0 if the head multiplies its table). held: by unit, whether it stays in memory. Of embed
    a step reads single rows.
    """

    sizes: tuple[int, ...]
    held: tuple[bool, ...]

    @property
    def streamed(self) -> int:
        """Bytes that each step reads from disk."""
        return sum(size for size, held in zip(self.sizes[1:], self.held[1:], strict=True) if not held)

    @property
    def resident(self) -> int:
        """Most bytes of weights in memory."""
        away = sorted(size for size, held in zip(self.sizes[1:], self.held[1:], strict=True) if not held)
        return sum(size for size, held in zip(self.sizes, self.held, strict=True) if held) + sum(away[-WINDOW:])

    def summary(self, bandwidth: float) -> str:
        """One line for the user. bandwidth: bytes/s of the disk."""
        return (
            f"offload: each step reads {gib(self.streamed)} of {gib(sum(self.sizes))} of weights from disk and takes at least "
            f"{self.streamed / bandwidth:.2g} s ({bandwidth / 1e9:.2g} GB/s); for trying a model, not for serving"
        )


def unsupported_reason(recipe: Recipe) -> str:
    """Why the target of a recipe cannot be offloaded; empty if it can."""
    settings, target = recipe.settings, recipe.target
    if recipe.layers is not None or settings.tp != 1:
        return "it runs in one process, without tp, pp and stages"
    if target.config.encoder or target.config.source is not None:
        return f"it is for decoders, and {target.name} is an encoder or has one"
    if same := [role for role, owner in recipe.owners.items() if owner == TARGET.name != role]:
        return f"the {same[0]} model must be another one than {target.name}"
    if settings.backend == "torch":
        return "it needs the native core, and the back end is torch"
    return ""


def unit_sizes(model: Model, sizes: Iterable[PackedSize]) -> list[int]:
    """Packed bytes of the matrices by unit, as `divide` takes them. A table that the head multiplies counts as the head's."""
    holders, units = dict(model.holders()), [0] * (model.config.num_layers + 2)
    for size in sizes:
        place, _, rest = size.path.partition(".")
        if not size.columns:
            continue
        if place == "layers":
            units[1 + int(rest.partition(".")[0])] += size.nbytes
        else:
            units[0 if isinstance(holders[size.path], Embedding) else -1] += size.nbytes
    if not units[-1]:
        units[0], units[-1] = 0, units[0]
    return units


def least_resident(sizes: Sequence[int]) -> int:
    """Bytes in memory if no unit is held."""
    return sum(sorted(sizes[1:])[-WINDOW:])


def divide(sizes: Sequence[int], room: int) -> Division:
    """Hold as many units as fit in `room` bytes, spread evenly, so that held units compute while the disk reads others."""
    if sum(sizes) <= room:
        return Division(tuple(sizes), (True,) * len(sizes))
    budget, total = max(0, room - least_resident(sizes)), sum(sizes[1:])
    held, taken, seen = [False], 0, 0
    for size in sizes[1:]:
        seen += size
        held.append(taken + size <= budget * seen / total)
        taken += size * held[-1]
    return Division(tuple(sizes), tuple(held))


def room_for_weights(spare: int, least: int) -> int:
    """Bytes that weights may take. spare: free bytes next to `least` bytes of weights and the K/V."""
    return least + max(0, int(spare * (1 - SPARE_SHARE)) - SPARE)


def weights_file(need: int) -> Any:
    """A file without a name for `need` bytes of weights, in the store's folder. Raises ValueError if it does not fit."""
    folder = home()
    folder.mkdir(parents=True, exist_ok=True)
    if host.in_memory(folder):
        raise ValueError(f"offload: {folder} is in memory; set HEADRACE_HOME to a folder on a disk")
    free = shutil.disk_usage(folder).free
    if need > free:
        raise ValueError(
            f"offload: the weights take {gib(need)} of disk and {gib(free)} are free in {folder}; free disk space, or set "
            "HEADRACE_HOME to a folder on a larger disk"
        )
    return TemporaryFile(dir=folder)


def stream(program: Any, room: int) -> tuple[Division, float]:
    """Read the held units of a program whose weights are packed in a file. Returns the division and the disk's bytes/s.

    program: a NativeProgram.
    """
    division = divide(program.core.weight_units(), room)
    program.streaming = program.core.stream(program.weights.arena, list(division.held))
    while division.streamed and not program.streaming.stats["fetched"]:
        time.sleep(0.001)
    stats = program.streaming.stats
    return division, stats["fetched"] / max(stats["reading"], 1e-9)
