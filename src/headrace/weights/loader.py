"""From an open file to a model: rename, lay out, shard, fuse. Every parameter is filled exactly once and nothing is left over.

`plan` says as plain data which stored rows make up each parameter; `load_model` carries it out in torch, tensor by tensor,
and a back end that packs stored rows itself (WeightSource.raw) follows the same plan.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from headrace.data.config import ModelConfig
from headrace.layers.holder import ParamSpec
from headrace.models.base import Model
from headrace.models.configs import name_map
from headrace.models.registry import describe, read_config
from headrace.weights.dequant import read_tensor
from headrace.weights.origins import NameMap, Origin
from headrace.weights.source import WeightError, WeightSource

HEAD = "lm_head.weight"  # of a Hugging Face folder; a GGUF file without a head is one with a tied head
Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a stored tensor that become rows of a parameter.

    In this order: transpose (Conv1D stores [in, out]), take `rows` (start, stop) of the first axis, reorder them
    (`permutation`: row i of the parameter is row permutation[i] of what was taken), add `shift` to every value.
    """

    source: str
    shape: tuple[int, ...]  # of the part in the parameter
    rows: tuple[int, int] | None = None  # None: all
    permutation: tuple[int, ...] | None = None
    transpose: bool = False
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of one rank in tensor parallelism. World 1 takes everything."""

    rank: int = 0
    world: int = 1

    def cut(self, tensor: torch.Tensor, axis: int | None) -> torch.Tensor:
        """This rank's slice of one part along `axis`; None: parts that every rank has whole."""
        if self.world == 1 or axis is None:
            return tensor
        if tensor.shape[axis] % self.world:
            raise WeightError(f"{tensor.shape[axis]} rows cannot be cut for {self.world} ranks; use a divisor")
        return tensor.chunk(self.world, axis)[self.rank]


WHOLE = Shard()


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
        for field, spec in holder.params().items():
            parts = plans[f"{path}.{field}"]
            fill(getattr(holder, field), spec, parts, source)
            if progress is not None:
                done += sum(source.info(part.source).nbytes // (3 if part.rows else 1) for part in parts)
                progress(done, total)
        holder.finish()
    return model.eval()


def fill(target: torch.Tensor, spec: ParamSpec, parts: tuple[Part, ...], source: WeightSource, shard: Shard = WHOLE) -> None:
    """Read the parts of one parameter into `target`, checked for NaN and infinities."""
    start = 0
    for part in parts:
        axis = 0 if spec.rows else 1 if spec.columns else None
        values = shard.cut(read_part(part, source, target.dtype), axis)
        target[start : start + len(values)].copy_(values)
        start += len(values)


def read_part(part: Part, source: WeightSource, dtype: torch.dtype) -> torch.Tensor:
    """One part as it stands in the parameter. Raises WeightError where it holds NaN or infinities."""
    stored = read_tensor(source, part.source, dtype)
    if not torch.isfinite(stored.sum(dtype=torch.float64 if dtype == torch.float64 else torch.float32)):
        _refuse_values(stored, part.source, source)
    if part.transpose:
        stored = stored.t()
    if part.rows is not None:
        stored = stored[part.rows[0] : part.rows[1]]
    if part.permutation is not None:
        stored = stored[torch.tensor(part.permutation)]
    return stored + part.shift if part.shift else stored


def _refuse_values(stored: torch.Tensor, name: str, source: WeightSource) -> None:
    """A sum that is not finite may be an overflow of the sum itself; only values that are not finite are refused."""
    bad = int((~torch.isfinite(stored)).sum())
    if bad:
        type_name = str(stored.dtype).removeprefix("torch.")
        raise WeightError(
            f"{source.path}: tensor {name!r} has {bad} values that are NaN or infinite in {type_name}; "
            "the file is damaged, or needs a wider dtype (float32)"
        )


def plan(model: Model, source: WeightSource) -> dict[str, tuple[Part, ...]]:
    """Parameter ("layers.3.qkv.weight") -> its parts in row order. Reads names and shapes only, never values.

    Raises WeightError as `load_model` does, except for values.
    """
    names = name_map(source.format, model.config.architecture)
    stored = _stored(source, names)
    plans: dict[str, tuple[Part, ...]] = {}
    missing: list[str] = []
    used: set[str] = set()
    for param, spec, part, rows in _wanted(model):
        origin = _origin(names, f"{param[0]}.{part}.{param[1]}" if part else ".".join(param))
        if origin.name not in stored:
            missing.append(names.full(origin.name))
            continue
        used.add(origin.name)
        made = _part(origin, stored[origin.name], (rows, *spec.tail), part, model.config)
        _check_shape(made, origin, source)
        key = ".".join(param)
        plans[key] = (*plans.get(key, ()), made)
    if missing:
        raise WeightError(f"{source.path}: {_lacking(list(dict.fromkeys(missing)))}")
    _refuse_surplus(stored, used, names, model.config, source)
    return plans


def _lacking(missing: list[str]) -> str:
    """What is said of a file without these tensors."""
    if missing == [HEAD]:
        return (
            f"the model was saved without its head (no {HEAD!r}); save it with AutoModelForCausalLM, or, where its head is its "
            'table of tokens, set "tie_word_embeddings": true in config.json'
        )
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return f"tensor {missing[0]!r} is missing{more}; the file is incomplete"


def _wanted(model: Model) -> Iterator[tuple[tuple[str, str], ParamSpec, str, int]]:
    """(path, field), spec, part name, rows of every part of every parameter."""
    for path, holder in model.holders():
        for field, spec in holder.params().items():
            for part, rows in spec.parts:
                yield (path, field), spec, part, rows


def _stored(source: WeightSource, names: NameMap) -> dict[str, str]:
    """Names without the optional prefix -> names in the file."""
    stored: dict[str, str] = {}
    for name in source.names():
        plain = name.removeprefix(names.prefix)
        if plain in stored:
            raise WeightError(f"{source.path}: tensors {stored[plain]!r} and {name!r} are both {plain!r}; remove one of them")
        stored[plain] = name
    return stored


def _origin(names: NameMap, target: str) -> Origin:
    layer = re.search(r"\.(\d+)\.", target)
    if layer is None:
        return names.names[target]
    origin = names.names[target.replace(layer[0], ".{i}.", 1)]
    return Origin(origin.name.format(i=layer[1]), origin.layout, origin.third)


def _part(origin: Origin, name: str, shape: tuple[int, ...], part: str, config: ModelConfig) -> Part:
    rows = None if origin.third is None else (origin.third * shape[0], (origin.third + 1) * shape[0])
    permutation = None
    if origin.layout == "rope_pairs":
        layer = config.each_layer
        rotary = layer.rope.dim if layer.rope and layer.rope.dim else layer.head_dim
        permutation = unpaired(layer.heads if part == "q" else layer.kv_heads, layer.head_dim, rotary)
    shift = 1.0 if origin.layout == "minus_one" else 0.0
    return Part(name, shape, rows, permutation, origin.layout == "transposed", shift)


def unpaired(heads: int, head_dim: int, rotary: int) -> tuple[int, ...]:
    """The permutation that takes rows stored as rotary neighbours (0, 1), (2, 3) ... to halves (0, rotary / 2) ... per head."""
    order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, head_dim)]
    return tuple(head * head_dim + row for head in range(heads) for row in order)


def _check_shape(part: Part, origin: Origin, source: WeightSource) -> None:
    expected = part.shape if part.rows is None else (3 * part.shape[0], *part.shape[1:])
    if part.transpose:
        expected = expected[::-1]
    found = source.info(part.source).shape
    if tuple(found) != expected:
        raise WeightError(
            f"{source.path}: tensor {part.source!r} is {_sizes(tuple(found))} and must be {_sizes(expected)} "
            "by the file's own settings; the file is damaged"
        )


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _refuse_surplus(stored: dict[str, str], used: set[str], names: NameMap, config: ModelConfig, source: WeightSource) -> None:
    ignored = names.ignored + ((r"lm_head\.weight",) if config.tied_head else ())  # a tied head saved twice
    surplus = [name for plain, name in stored.items() if plain not in used and not any(re.fullmatch(p, plain) for p in ignored)]
    if surplus:
        more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise WeightError(
            f"{source.path}: tensor {surplus[0]!r}{more} has no place in a {config.architecture} model; "
            "is this another architecture or an adapter?"
        )
