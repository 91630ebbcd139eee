"""Load an open file into a torch model, tensor by tensor, by a plan of `weights.parts`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from headrace.data.config import ModelConfig
from headrace.models.base import Model
from headrace.models.registry import describe, read_config
from headrace.weights.decode import CHUNK, check_finite, dequantize
from headrace.weights.kinds import KINDS
from headrace.weights.parts import WeightPart, plan, stored_as
from headrace.weights.schemes.folder import input_scale
from headrace.weights.source import WeightError, WeightSource

STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}  # read by copying
Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


@dataclass(frozen=True, slots=True)
class Allocator:
    """Allocates a model's tensors (models.layers.Allocator)."""

    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def empty(self, shape: tuple[int, ...], exact: bool = False) -> torch.Tensor:
        wide = exact and self.dtype != torch.float64
        return torch.empty(shape, dtype=torch.float32 if wide else self.dtype, device=self.device)

    def constant(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def load_model(
    source: WeightSource,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config: ModelConfig | None = None,
    progress: Progress | None = None,
) -> Model:
    """A filled model in `dtype` on `device` (norms stay float32 or wider); one stored tensor is in memory besides it.

    progress: called with bytes read and total bytes. Raises WeightError for an unknown architecture or setting, a missing,
    surplus, doubled or wrongly shaped tensor, and for values that are not finite in `dtype`.
    """
    model = describe(config or read_config(source))
    plans = plan(model, source)
    total = sum(source.info(name).nbytes for name in {part.source for parts in plans.values() for part in parts if part.source})
    done, allocator = 0, Allocator(dtype, device)
    for path, holder in model.holders():
        holder.create(allocator)
        for field in holder.params():
            parts = plans[f"{path}.{field}"]
            fill(getattr(holder, field), parts, source)
            if progress is not None:
                done += sum(
                    source.info(part.source).nbytes * prod(part.shape) // prod(part.stored) for part in parts if part.source
                )
                progress(done, total)
        holder.finish()
    return model


def weight_kinds(model: Model, source: WeightSource) -> dict[str, tuple[str, ...]]:
    """Kinds of the parts of each weight, by its holder's path: "layers.3.qkv" -> ("Q4_0", "Q4_0", "Q6_K")."""
    plans = plan(model, source)
    return {
        path: tuple(source.info(part.source).kind for part in plans[f"{path}.weight"])
        for path, holder in model.holders()
        if "weight" in holder.params()
    }


def input_scales(model: Model, source: WeightSource) -> dict[str, float]:
    """Static scales of int8 inputs that a file has, by holder path."""
    plans = plan(model, source)
    scales = {
        path: input_scale(source, [part.source for part in plans[f"{path}.weight"]]) for path in weight_kinds(model, source)
    }
    return {path: scale for path, scale in scales.items() if scale is not None}


def fill(target: torch.Tensor, parts: Sequence[WeightPart], source: WeightSource) -> None:
    """Read the parts of a parameter into `target`; they must be finite."""
    start = 0
    for part in parts:
        target[start : start + part.shape[0]].copy_(read_part(part, source, target.dtype))
        start += part.shape[0]


def read_part(part: WeightPart, source: WeightSource, dtype: torch.dtype) -> torch.Tensor:
    """A part as in the parameter. Raises WeightError if its tensor holds NaN or infinities."""
    if not part.source:
        return torch.zeros(part.shape, dtype=dtype)
    values = read_tensor(source, part.source, dtype)
    check_finite(values, torch.float64 if dtype == torch.float64 else torch.float32, part.source, source)
    taken: torch.Tensor = part.take(values)
    return taken


def write_parts(parts: Sequence[WeightPart], values: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The stored tensor that consists of these parts, from their values in the parameters: the inverse of `read_part`."""
    pieces, orders = [], []
    for part in parts:
        piece = values(part.target)
        pieces.append(piece - part.shift if part.shift else piece)
        first = part.rows[0] if part.rows else 0
        orders.append(first + torch.tensor(tuple(range(len(piece)) if part.row_order is None else part.row_order)))
    if len(parts) == 1 and parts[0].rows is not None:  # rows for padding come before
        pieces.insert(0, pieces[0].new_zeros(parts[0].rows[0], *pieces[0].shape[1:]))
        orders.insert(0, torch.arange(parts[0].rows[0]))
    whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    if len(pieces) > 1 or parts[0].row_order is not None:
        whole = whole[torch.cat(orders).argsort()]
    if parts[0].taps:
        return whole.reshape(len(whole), -1, parts[0].stored[1]).swapaxes(1, 2).contiguous()
    return whole.t().contiguous() if parts[0].transpose else whole


def stored_tensors(model: Model, container: str) -> dict[str, torch.Tensor]:
    """Every tensor of a filled model as a container (gguf | safetensors) stores it: the inverse of `load_model`."""
    pieces, stored = part_values(model), stored_as(model, container)
    return {name: write_parts(parts, pieces.__getitem__).contiguous() for name, parts in stored.items()}


def part_values(model: Model) -> dict[str, torch.Tensor]:
    """Parts of a filled model's parameters by target ("layers.3.qkv.q.weight"), as views."""
    pieces = {}
    for path, holder in model.holders():
        for name, spec in holder.params().items():
            split = getattr(holder, name).split([rows for _, rows in spec.parts])
            for (part, _), piece in zip(spec.parts, split, strict=True):
                pieces[".".join(filter(None, (path, part, name)))] = piece
    return pieces


def read_tensor(source: WeightSource, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A stored tensor dequantized to `dtype` (from float32, to nearest even), a new tensor. Raises WeightError."""
    info = source.info(name)
    values = to_torch(source.raw(name), info.kind, info.shape, dtype)
    columns = source.columns(name)
    return values if columns is None else values[:, torch.from_numpy(columns).argsort()]


def to_torch(raw: np.ndarray, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Stored rows, uint8 [rows, row bytes], as a new tensor of `shape`, rounded from float32 to `dtype`.

    Raises WeightError if `dtype` is not a floating type.
    """
    if not dtype.is_floating_point:
        raise WeightError(f"weights are read as floating numbers, not as {dtype}; use float32, bfloat16, float16 or float64")
    if STORED.get(kind) is dtype:
        return torch.from_numpy(raw.reshape(-1).copy()).view(dtype).view(shape)
    out = torch.empty(shape, dtype=dtype)
    flat, data = out.view(-1), raw.reshape(-1)
    block, block_bytes = KINDS[kind]
    if dtype is torch.float32:
        dequantize(data, kind, flat.numpy())
        return out
    scratch = np.empty(min(CHUNK, flat.numel()), np.float32)
    for start in range(0, flat.numel(), CHUNK):
        part = scratch[: min(CHUNK, flat.numel() - start)]
        begin = start // block * block_bytes
        dequantize(data[begin : begin + part.size // block * block_bytes], kind, part)
        flat[start : start + part.size] = torch.from_numpy(part)
    return out
