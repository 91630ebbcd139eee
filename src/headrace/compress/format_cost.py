"""Cost of a model in a number format, and the rounding error of its weights, without writing it."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, log10, prod
from pathlib import Path

import numpy as np
import torch

from headrace.compress.grids.arithmetic import Cost, kv_token_bytes
from headrace.compress.grids.errors import ErrorParts, measure
from headrace.compress.grids.spec import WITHOUT_GROUPS, NumberFormat, parse, unknown
from headrace.data.config import ModelConfig
from headrace.models import gguf
from headrace.models.registry import describe
from headrace.startup.opening import open_files
from headrace.weights.loader import read_part, write_parts
from headrace.weights.mixes import HEAD, MIXES, SHORT, TABLE, tensor_kind
from headrace.weights.parts import WeightPart, plan, stored_as
from headrace.weights.schemes.small_floats import GROUPS
from headrace.weights.source import WeightError, WeightSource

ROWS = 32  # sampled rows of each matrix, evenly spread


@dataclass(frozen=True, slots=True)
class FormatCost:
    """A format's cost, and its error averaged over the weights of matrices (None: not rounded)."""

    format: str
    cost: Cost
    error: ErrorParts | None


def format_costs(model: str | Path, formats: list[str], kv_dtype: str = "bfloat16", errors: bool = True) -> list[FormatCost]:
    """Costs of the unchanged model, then in each format: a mix of GGUF, or a grid for all matrices ("int4-g128", "nf4-g64").

    errors: measure ROWS rows of each matrix. Raises ValueError as opening does, and for an unknown format.
    """
    chosen = [_chosen(name) for name in formats]
    opened = open_files(model)
    source, config = opened.source, opened.config
    if config.encoder:
        raise WeightError(f"{opened.path}: encoders ({config.architecture}) decode no tokens, of which this is the arithmetic")
    target = gguf.with_gguf_architecture(config)
    stored = stored_as(describe(target), "gguf")
    read = {part.target: part for parts in plan(describe(config), source).values() for part in parts}
    kv = kv_token_bytes(config, kv_dtype)
    sizes = {name: prod(parts[0].stored) for name, parts in stored.items()}
    read_each_step = {name: size for name, size in sizes.items() if config.tied_head or name != TABLE}

    def cost(bits: dict[str, float]) -> Cost:
        whole, each = (round(sum(size * bits[name] / 8 for name, size in of.items())) for of in (sizes, read_each_step))
        return Cost(sum(sizes.values()), whole, sum(read_each_step.values()), each, kv)

    bits_now = {
        name: 8
        * sum(source.info(read[part.target].source).nbytes * prod(part.shape) / prod(part.stored) for part in parts)
        / sizes[name]
        for name, parts in stored.items()
    }
    costs = [FormatCost("unchanged", cost(bits_now), None)]
    for name, mix in zip(formats, chosen, strict=True):
        specs = {key: _spec(mix, key, parts[0].stored, target) for key, parts in stored.items()}
        bits = {
            key: specs[key].stored_bits(sizes[key] // parts[0].stored[-1], parts[0].stored[-1]) for key, parts in stored.items()
        }
        lost = _error(((specs[key], rows, sizes[key]) for key, rows in _samples(stored, read, source))) if errors else None
        costs.append(FormatCost(name, cost(bits), lost))
    return costs


def _chosen(name: str) -> str | NumberFormat:
    mix = SHORT.get(name.upper(), name.upper())
    if mix in MIXES and name not in GROUPS:
        return mix
    if name.lower() in WITHOUT_GROUPS:
        return NumberFormat("int", 8)
    try:
        return parse(name)
    except ValueError as error:
        raise ValueError(
            unknown(name, MIXES, "or a grid such as int4-g128") if "unknown" in str(error) else str(error)
        ) from None


def _spec(mix: str | NumberFormat, name: str, shape: tuple[int, ...], config: ModelConfig) -> NumberFormat:
    """Format of a tensor: vectors stay float32; a grid is for all matrices but the token table and the head."""
    kind = tensor_kind(mix if isinstance(mix, str) else "F32", name, shape[-1], config)
    vector = tensor_kind("F16", name, shape[-1], config) == "F32"
    if isinstance(mix, str) or vector:
        return NumberFormat("kind", kind=kind)
    return NumberFormat("kind", kind="BF16") if name in (TABLE, HEAD) else mix


def _samples(
    stored: dict[str, list[WeightPart]], read: dict[str, WeightPart], source: WeightSource
) -> Iterator[tuple[str, np.ndarray]]:
    for name, parts in stored.items():
        if len(parts[0].stored) > 1:
            whole = write_parts(parts, lambda target: read_part(read[target], source, torch.float32)).numpy()
            yield name, whole[:: max(1, len(whole) // ROWS)][:ROWS].copy()
            for part in parts:
                source.release(read[part.target].source)


def _error(samples: Iterator[tuple[NumberFormat, np.ndarray, int]]) -> ErrorParts:
    """Mean over all weights of errors relative to each matrix's mean square."""
    sums, count = np.zeros(3), 0
    for spec, rows, size in samples:
        energy = float(np.square(rows, dtype=np.float64).mean()) or 1.0
        error = measure(rows, spec)
        sums += size * np.array([error.rounding, error.clipping, error.noise]) / energy
        count += size
    rounding, clipping, noise = (sums / count).tolist()
    whole = rounding + clipping
    return ErrorParts(rounding, clipping, noise, -10 * log10(whole) if whole else inf)
