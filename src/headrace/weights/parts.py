"""Load plan: the stored rows of each parameter, as plain data. Every parameter is filled once, and no tensor is left over.

Loaders execute a plan (`weights.loader` in torch, `backends.native.weights` in the core's tiles); `stored_as` is the inverse
for writers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from headrace.data.config import LayerConfig, ModelConfig
from headrace.models.base import Model
from headrace.models.configs import name_map
from headrace.models.layers import ParamSpec
from headrace.parallel.ranks.share import Share
from headrace.weights.origins import PADDED_ROWS, NameMap, Origin
from headrace.weights.source import WeightError, WeightSource

TAPS = 3  # of convolutions
HEAD = "lm_head.weight"  # in a Hugging Face folder; a GGUF file without a head has a tied one


@dataclass(frozen=True, slots=True)
class Unpaired:
    """Row order of heads that a file stores as rotary pairs: iterating yields the stored row of each row.

    Expanded only when iterated: the sizes come from a file's header and are verified by its tensors later.
    """

    heads: int
    head_dim: int
    rotary: int  # rotated dimensions of a head

    def __iter__(self) -> Iterator[int]:
        return iter(unpaired(self.heads, self.head_dim, self.rotary))


@dataclass(frozen=True, slots=True)
class Grouped:
    """Row order of q, k or v in a tensor that holds them by K/V head: iterating yields the stored row of each row.

    group, part: rows of a K/V head in the tensor, and those that belong to this part, from row `offset` on.
    """

    group: int
    part: int
    offset: int
    rows: range

    def __iter__(self) -> Iterator[int]:
        return (row // self.part * self.group + self.offset + row % self.part for row in self.rows)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """Rows of a stored tensor that become rows of a parameter.

    Applied in this order: transpose (Conv1D stores [in, out]), move the taps of a convolution before its inputs, take `rows`
    and `columns` (start, stop), reorder the rows (row i is the one that `row_order` yields at i), add `shift` to every value.
    """

    target: str  # parameter part: layers.3.qkv.q.weight
    source: str  # empty: no tensor, all values are zero
    shape: tuple[int, ...]  # shape in the parameter
    stored: tuple[int, ...]  # shape of the whole tensor in the file
    rows: tuple[int, int] | None = None  # None: all
    columns: tuple[int, int] | None = None
    row_order: Unpaired | Grouped | tuple[int, ...] | None = None
    transpose: bool = False
    shift: float = 0.0
    taps: bool = False

    @property
    def rewritten(self) -> bool:
        """Whether its values are not rows of the stored tensor: they are decoded before they are packed."""
        return bool(self.transpose or self.shift or self.taps or not self.source)

    def take(self, values: Any) -> Any:
        """Extract the part from the whole stored tensor (numpy or torch): a view or a new array."""
        if self.transpose:
            values = values.T
        if self.taps:
            values = values.swapaxes(1, 2).reshape(len(values), -1)
        if self.rows is not None:
            values = values[slice(*self.rows)]
        if self.columns is not None:
            values = values[:, slice(*self.columns)]
        if self.row_order is not None:
            values = values[list(self.row_order)]
        return values + self.shift if self.shift else values


def cut(part: WeightPart, spec: ParamSpec, share: Share) -> WeightPart:
    """The rows or columns of a part that a rank holds, by spec.rows and spec.columns; the whole part if neither is set.

    Query rows are cut by heads, K and V rows by the K/V heads that these read, all others by units of the fixed segments.
    """
    axis = spec.columns or spec.rows
    if axis is None:
        return part
    layer = re.search(r"\.(\d+)\.", part.target)
    held = share.layers[int(layer[1])].cut(axis, part.target.split(".")[-2]) if layer else share.vocab
    if spec.columns is not None:
        return replace(part, shape=(part.shape[0], len(held)), columns=(held.start, held.stop))
    order, first = part.row_order, part.rows[0] if part.rows else 0
    shape, rows = (len(held), *part.shape[1:]), (first + held.start, first + held.stop)
    if isinstance(order, Unpaired):  # reorders rows within a head, and heads are not cut
        order = replace(order, heads=len(held) // order.head_dim)
    elif isinstance(order, Grouped):
        return replace(part, shape=shape, row_order=replace(order, rows=order.rows[held.start : held.stop]))
    elif order is not None:
        return replace(part, shape=shape, row_order=order[held.start : held.stop])
    return replace(part, shape=shape, rows=rows, row_order=order)


def cut_plan(plans: Mapping[str, tuple[WeightPart, ...]], model: Model, share: Share) -> dict[str, tuple[WeightPart, ...]]:
    """A rank's part of the load plan of a whole model."""
    specs = {f"{path}.{field}": spec for path, holder in model.holders() for field, spec in holder.params().items()}
    return {key: tuple(cut(part, specs[key], share) for part in parts) for key, parts in plans.items()}


def layout(model: Model, container: str) -> dict[str, tuple[WeightPart, ...]]:
    """Parameter ("layers.3.qkv.weight") -> its parts in row order, by the names of a container (gguf | safetensors)."""
    names = name_map(container, model.config.architecture)
    parts_of = {}
    for path, holder in model.holders():
        for field, spec in holder.params().items():
            parts_of[f"{path}.{field}"] = tuple(_parts(names, path, field, spec, model.config))
    return parts_of


def stored_as(model: Model, container: str) -> dict[str, list[WeightPart]]:
    """The inverse of `layout`, for writers: stored tensor -> its parts."""
    parts_of: dict[str, list[WeightPart]] = {}
    for part in filter(_is_stored, chain.from_iterable(layout(model, container).values())):
        parts_of.setdefault(part.source, []).append(part)
    return parts_of


def plan(model: Model, source: WeightSource) -> dict[str, tuple[WeightPart, ...]]:
    """`layout` with the names of an open file. Reads names and shapes only.

    Raises WeightError as `load_model` does, except for values.
    """
    names = name_map(source.format, model.config.architecture)
    stored = _stored(source, names)
    planned = layout(model, source.format)
    missing = dict.fromkeys(
        part.source for part in filter(_is_stored, chain.from_iterable(planned.values())) if part.source not in stored
    )
    if missing:
        raise WeightError(f"{source.path}: {_lacking(list(missing))}")
    planned_parts = {
        key: tuple(replace(part, source=stored.get(part.source, "")) for part in parts) for key, parts in planned.items()
    }
    used = list(filter(_is_stored, chain.from_iterable(planned_parts.values())))
    for part in used:
        _check_shape(part, source)
    _refuse_surplus(stored, {part.source for part in used}, names, model.config, source)
    return planned_parts


def _is_stored(part: WeightPart) -> bool:
    """Whether files have the tensor of a part."""
    return bool(part.source)


def _lacking(missing: list[str]) -> str:
    """Message about missing tensors."""
    if missing == [HEAD]:
        return (
            f"the model was saved without its head (no {HEAD!r}); save it with AutoModelForCausalLM, or, where its head is its "
            'table of tokens, set "tie_word_embeddings": true in config.json'
        )
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    return f"tensor {missing[0]!r} is missing{more}; the file is incomplete"


def _stored(source: WeightSource, names: NameMap) -> dict[str, str]:
    """Usual tensor name -> name in this file, in which the prefix may be missing."""
    stored: dict[str, str] = {}
    for name in source.names():
        full = names.full(name.removeprefix(names.prefix))
        if full in stored:
            raise WeightError(f"{source.path}: tensors {stored[full]!r} and {name!r} are both {full!r}; remove one of them")
        stored[full] = name
    return stored


def _parts(names: NameMap, path: str, field: str, spec: ParamSpec, config: ModelConfig) -> Iterator[WeightPart]:
    """The parts of a parameter by the names of its family."""
    start = 0
    for name, rows in spec.parts:
        target = ".".join(filter(None, (path, name, field)))
        if name in spec.absent:
            yield WeightPart(target, "", (rows, *spec.tail), (rows, *spec.tail))
        else:
            yield _part(names, target, spec, (start, start + rows), config)
        start += rows


def _part(names: NameMap, target: str, spec: ParamSpec, rows: tuple[int, int], config: ModelConfig) -> WeightPart:
    """The part of a parameter that is its rows from rows[0] to rows[1]."""
    layer = re.search(r"\.(\d+)\.", target)
    origin = names.names[target if layer is None else target.replace(layer[0], ".{i}.", 1)]
    shape = (rows[1] - rows[0], *spec.tail)
    whole = spec.shape if origin.stacked else shape
    if origin.layout == "padded":
        whole, rows = (shape[0] + PADDED_ROWS, *shape[1:]), (PADDED_ROWS, shape[0] + PADDED_ROWS)
    transpose, taps = origin.layout == "transposed", origin.layout == "conv"
    if taps:
        whole = (shape[0], shape[1] // TAPS, TAPS)
    return WeightPart(
        target=target,
        source=names.full(origin.name.format(i=layer and layer[1])),
        shape=shape,
        stored=whole[::-1] if transpose else whole,
        rows=rows if origin.layout == "padded" or (origin.stacked and origin.layout != "by_group") else None,
        row_order=_row_order(origin, target, shape[0], config.layers[int(layer[1])]) if layer else None,
        transpose=transpose,
        shift=1.0 if origin.layout == "minus_one" else 0.0,
        taps=taps,
    )


def _row_order(origin: Origin, target: str, rows: int, layer: LayerConfig) -> Unpaired | Grouped | None:
    """Order of the `rows` rows of a part in a layer's stored tensor, None for their own."""
    if origin.layout == "by_group":
        dim, share = layer.head_dim, layer.heads // layer.kv_heads
        count, first = {"q": (share, 0), "k": (1, share), "v": (1, share + 1)}[target.split(".")[-2]]
        return Grouped((share + 2) * dim, count * dim, first * dim, range(rows))
    return _paired(layer, rows) if origin.layout == "rope_pairs" else None


def _paired(layer: LayerConfig, rows: int) -> Unpaired:
    """Order of `rows` rows of heads that are stored as rotary pairs."""
    rotary = layer.rope.dim if layer.rope and layer.rope.dim else layer.head_dim
    return Unpaired(rows // layer.head_dim, layer.head_dim, rotary)


def unpaired(heads: int, head_dim: int, rotary: int) -> tuple[int, ...]:
    """Permutation from rows stored as rotary pairs (0, 1), (2, 3) ... to halves (0, rotary / 2) ... for each head."""
    order = [*range(0, rotary, 2), *range(1, rotary, 2), *range(rotary, head_dim)]
    return tuple(head * head_dim + row for head in range(heads) for row in order)


def _check_shape(part: WeightPart, source: WeightSource) -> None:
    shape = tuple(source.info(part.source).shape)
    if shape != part.stored:
        raise WeightError(
            f"{source.path}: tensor {part.source!r} is {_sizes(shape)} and must be {_sizes(part.stored)} "
            "by the file's own settings; the file is damaged"
        )


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _refuse_surplus(stored: dict[str, str], used: set[str], names: NameMap, config: ModelConfig, source: WeightSource) -> None:
    # A tied head may be saved twice.
    ignored = names.ignored + ((r"lm_head\.weight",) if config.tied_head else ())
    plain = {full.removeprefix(names.prefix): name for full, name in stored.items() if name not in used}
    surplus = [name for short, name in plain.items() if not any(re.fullmatch(pattern, short) for pattern in ignored)]
    if surplus:
        more = f" (and {len(surplus) - 1} more)" if len(surplus) > 1 else ""
        raise WeightError(
            f"{source.path}: tensor {surplus[0]!r}{more} has no place in a {config.architecture} model; "
            "is this another architecture or an adapter?"
        )
