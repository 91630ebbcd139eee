"""From an open file to a model: rename, lay out, fuse. Every parameter is filled exactly once and nothing is left over.

`plan` says as plain data which stored rows make up each parameter; `load_model` carries it out in torch, tensor by tensor,
and a back end that packs stored rows itself (WeightSource.raw) follows the same plan. `stored_as` is the way back, for writers.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod

import torch

from headrace.data.config import LayerConfig, ModelConfig
from headrace.layers.holder import ParamSpec
from headrace.models.base import Model
from headrace.models.configs import name_map
from headrace.models.registry import describe, read_config
from headrace.weights.dequant import read_tensor
from headrace.weights.origins import NameMap
from headrace.weights.source import WeightError, WeightSource

HEAD = "lm_head.weight"  # of a Hugging Face folder; a GGUF file without a head is one with a tied head
Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows of a stored tensor that become rows of a parameter.

    In this order: transpose (Conv1D stores [in, out]), take `rows` and `columns` (start, stop), reorder the rows (`row_order`:
    row i of the parameter is row row_order[i] of what was taken), add `shift` to every value.
    """

    target: str  # what we call it: layers.3.qkv.q.weight
    source: str
    shape: tuple[int, ...]  # of the part in the parameter
    stored: tuple[int, ...]  # of the whole tensor in the file
    rows: tuple[int, int] | None = None  # None: all
    columns: tuple[int, int] | None = None
    row_order: tuple[int, ...] | None = None
    transpose: bool = False
    shift: float = 0.0


def load_model(
    source: WeightSource,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config: ModelConfig | None = None,
    progress: Progress | None = None,
) -> Model:
    """A filled model in `dtype` on `device` (norms stay float32 or wider); one stored tensor is in memory besides it at a time.

    Raises WeightError, in one line, on an unknown architecture or setting, a missing, surplus or wrongly shaped tensor, one
    that two tensors of the file would fill, and on values that are not finite in `dtype`.
    """
    model = describe(config or read_config(source))
    plans = plan(model, source)
    total = sum(source.info(name).nbytes for name in {part.source for parts in plans.values() for part in parts})
    done = 0
    for path, holder in model.holders():
        with torch.device(device):
            holder.create(dtype)
        for field in holder.params():
            parts = plans[f"{path}.{field}"]
            fill(getattr(holder, field), parts, source)
            if progress is not None:
                done += sum(source.info(part.source).nbytes * prod(part.shape) // prod(part.stored) for part in parts)
                progress(done, total)
        holder.finish()
    return model.eval()


def fill(target: torch.Tensor, parts: Sequence[WeightPart], source: WeightSource) -> None:
    """Read the parts of one parameter into `target`, checked for NaN and infinities."""
    start = 0
    for part in parts:
        target[start : start + part.shape[0]].copy_(read_part(part, source, target.dtype))
        start += part.shape[0]


def read_part(part: WeightPart, source: WeightSource, dtype: torch.dtype) -> torch.Tensor:
    """One part as it stands in the parameter. Raises WeightError where its tensor holds NaN or infinities."""
    values = read_tensor(source, part.source, dtype)
    if not torch.isfinite(values.sum(dtype=torch.float64 if dtype == torch.float64 else torch.float32)):
        _refuse_values(values, part.source, source)
    if part.transpose:
        values = values.t()
    if part.rows is not None:
        values = values[slice(*part.rows)]
    if part.columns is not None:
        values = values[:, slice(*part.columns)]
    if part.row_order is not None:
        values = values[torch.tensor(part.row_order)]
    return values + part.shift if part.shift else values


def write_parts(parts: Sequence[WeightPart], values: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The stored tensor that has these parts and no others, of their values in the parameters: the inverse of `read_part`."""
    pieces = []
    for part in sorted(parts, key=lambda part: part.rows or (0, 0)):
        piece = values(part.target)
        piece = piece - part.shift if part.shift else piece
        pieces.append(piece if part.row_order is None else piece[torch.tensor(part.row_order).argsort()])
    whole = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return whole.t().contiguous() if parts[0].transpose else whole


def cut(part: WeightPart, spec: ParamSpec, rank: int, world: int) -> WeightPart:
    """The share of one of `world` ranks in a part: of its rows or columns, where ranks share them (spec.rows, spec.columns).

    Raises WeightError where they cannot be shared evenly; that no head is cut in two is for the caller to see to.
    """
    if world == 1 or (spec.rows is None and spec.columns is None):
        return part
    axis = 1 if spec.rows is None else 0
    if part.shape[axis] % world:
        raise WeightError(f"{part.shape[axis]} {'columns' if axis else 'rows'} cannot be cut for {world} ranks; use a divisor")
    size = part.shape[axis] // world
    mine = (rank * size, (rank + 1) * size)
    if axis == 1:
        return replace(part, shape=(part.shape[0], size), columns=mine)
    if part.row_order is not None:
        return replace(part, shape=(size, *part.shape[1:]), row_order=part.row_order[slice(*mine)])
    first = part.rows[0] if part.rows else 0
    return replace(part, shape=(size, *part.shape[1:]), rows=(first + mine[0], first + mine[1]))


def _refuse_values(stored: torch.Tensor, name: str, source: WeightSource) -> None:
    """A sum that is not finite may be an overflow of the sum itself; only values that are not finite are refused."""
    bad = int((~torch.isfinite(stored)).sum())
    if bad:
        type_name = str(stored.dtype).removeprefix("torch.")
        raise WeightError(
            f"{source.path}: tensor {name!r} has {bad} values that are NaN or infinite in {type_name}; "
            "the file is damaged, or needs a wider dtype (float32)"
        )


def layout(model: Model, container: str) -> dict[str, tuple[WeightPart, ...]]:
    """Parameter ("layers.3.qkv.weight") -> its parts in row order, by the names of a kind of file (gguf | safetensors)."""
    names = name_map(container, model.config.architecture)
    made = {}
    for path, holder in model.holders():
        for field, spec in holder.params().items():
            parts = [(".".join(filter(None, (path, name, field))), (rows, *spec.tail)) for name, rows in spec.parts]
            made[f"{path}.{field}"] = tuple(_part(names, target, shape, model.config) for target, shape in parts)
    return made


def stored_as(model: Model, container: str) -> dict[str, list[WeightPart]]:
    """The same by stored tensors, for writers: name -> its parts."""
    made: dict[str, list[WeightPart]] = {}
    for part in chain.from_iterable(layout(model, container).values()):
        made.setdefault(part.source, []).append(part)
    return made


def plan(model: Model, source: WeightSource) -> dict[str, tuple[WeightPart, ...]]:
    """`layout` by the names of an open file. Reads names and shapes only, never values.

    Raises WeightError as `load_model` does, except for values.
    """
    names = name_map(source.format, model.config.architecture)
    stored = _stored(source, names)
    planned = layout(model, source.format)
    missing = dict.fromkeys(part.source for part in chain.from_iterable(planned.values()) if part.source not in stored)
    if missing:
        raise WeightError(f"{source.path}: {_lacking(list(missing))}")
    found = {key: tuple(replace(part, source=stored[part.source]) for part in parts) for key, parts in planned.items()}
    for part in chain.from_iterable(found.values()):
        _check_shape(part, source)
    _refuse_surplus(stored, {part.source for part in chain.from_iterable(found.values())}, names, model.config, source)
    return found


def _lacking(missing: list[str]) -> str:
    """What is said of a file without these tensors."""
    if missing == [HEAD]:
        return (
            f"the model was saved without its head (no {HEAD!r}); save it with AutoModelForCausalLM, or, where its head is its "
            'table of tokens, set "tie_word_embeddings": true in config.json'
        )
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return f"tensor {missing[0]!r} is missing{more}; the file is incomplete"


def _stored(source: WeightSource, names: NameMap) -> dict[str, str]:
    """Names as files usually have them -> names in this file, where the prefix may be missing."""
    stored: dict[str, str] = {}
    for name in source.names():
        full = names.full(name.removeprefix(names.prefix))
        if full in stored:
            raise WeightError(f"{source.path}: tensors {stored[full]!r} and {name!r} are both {full!r}; remove one of them")
        stored[full] = name
    return stored


def _part(names: NameMap, target: str, shape: tuple[int, ...], config: ModelConfig) -> WeightPart:
    """A part by the names of its family, at its target (layers.3.qkv.q.weight)."""
    layer = re.search(r"\.(\d+)\.", target)
    origin = names.names[target if layer is None else target.replace(layer[0], ".{i}.", 1)]
    index, count = origin.rows
    whole = (count * shape[0], *shape[1:])
    transpose = origin.layout == "transposed"
    return WeightPart(
        target=target,
        source=names.full(origin.name.format(i=layer and layer[1])),
        shape=shape,
        stored=whole[::-1] if transpose else whole,
        rows=None if count == 1 else (index * shape[0], (index + 1) * shape[0]),
        row_order=_paired(config.layers[int(layer[1])], shape[0]) if layer and origin.layout == "rope_pairs" else None,
        transpose=transpose,
        shift=1.0 if origin.layout == "minus_one" else 0.0,
    )


def _paired(layer: LayerConfig, rows: int) -> tuple[int, ...]:
    """The order of `rows` rows of heads that are stored as rotary neighbours."""
    rotary = layer.rope.dim if layer.rope and layer.rope.dim else layer.head_dim
    return unpaired(rows // layer.head_dim, layer.head_dim, rotary)


def unpaired(heads: int, head_dim: int, rotary: int) -> tuple[int, ...]:
    """The permutation that takes rows stored as rotary neighbours (0, 1), (2, 3) ... to halves (0, rotary / 2) ... per head."""
    order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, head_dim)]
    return tuple(head * head_dim + row for head in range(heads) for row in order)


def _check_shape(part: WeightPart, source: WeightSource) -> None:
    found = tuple(source.info(part.source).shape)
    if found != part.stored:
        raise WeightError(
            f"{source.path}: tensor {part.source!r} is {_sizes(found)} and must be {_sizes(part.stored)} "
            "by the file's own settings; the file is damaged"
        )


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _refuse_surplus(stored: dict[str, str], used: set[str], names: NameMap, config: ModelConfig, source: WeightSource) -> None:
    ignored = names.ignored + ((r"lm_head\.weight",) if config.tied_head else ())  # a tied head saved twice
    plain = {full.removeprefix(names.prefix): name for full, name in stored.items() if name not in used}
    surplus = [name for short, name in plain.items() if not any(re.fullmatch(pattern, short) for pattern in ignored)]
    if surplus:
        more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise WeightError(
            f"{source.path}: tensor {surplus[0]!r}{more} has no place in a {config.architecture} model; "
            "is this another architecture or an adapter?"
        )
