"""Weights of which models consist: linear layers, embeddings, norms, rotary frequencies. They compute nothing.

A `Holder` owns weights. It is described first and allocated later.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from headrace.data.config import ModelConfig, RopeConfig

# A tensor of the back end that runs the model.
Tensor = Any


class Allocator(Protocol):
    """Creates the tensors of holders in the dtype and on the device of the model."""

    def empty(self, shape: tuple[int, ...], exact: bool = False) -> Tensor:
        """An uninitialised tensor. exact: float32 or wider, whatever the dtype of the model."""

    def constant(self, values: np.ndarray) -> Tensor:
        """A tensor with these values, in their own dtype."""


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Description of a parameter: named parts stacked along the first axis, each filled from its own source tensor.

    parts: (name, rows); the name of a single part is "". tail: sizes of the other axes. exact: float32 or wider, whatever the
    compute dtype. absent: parts that files do not have, which are zero. rows: what the first axis counts (heads, ffn or
    vocab) if the ranks of a parallel run split it; None: every rank has all rows. columns: the same for the second axis.
    """

    parts: tuple[tuple[str, int], ...]
    tail: tuple[int, ...] = ()
    exact: bool = False
    rows: str | None = None
    columns: str | None = None
    absent: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(rows for _, rows in self.parts), *self.tail)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class Group:
    """An object whose attributes are holders, groups, or lists of them."""

    def holders(self) -> "Iterator[tuple[str, Holder]]":
        """All holders by path ("layers.3.qkv"), in order of creation. A shared one (a tied head) comes once."""
        seen: set[int] = set()
        for path, group in self._groups(""):
            if isinstance(group, Holder) and id(group) not in seen:
                seen.add(id(group))
                yield path, group

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors of filled holders, by path ("layers.3.qkv.weight")."""
        for path, holder in self.holders():
            for field in holder.params():
                yield ".".join(filter(None, (path, field))), getattr(holder, field)

    def parameters(self) -> Iterator[Tensor]:
        return (tensor for _, tensor in self.named_parameters())

    def _groups(self, prefix: str) -> "Iterator[tuple[str, Group]]":
        for name, value in vars(self).items():
            places = enumerate(value) if isinstance(value, list) else [(None, value)]
            for place, each in places:
                if isinstance(each, Group):
                    path = f"{prefix}{name}" if place is None else f"{prefix}{name}.{place}"
                    yield path, each
                    yield from each._groups(f"{path}.")


class Holder(Group):
    """Owner of parameters. `params` describes them, `create` allocates, the loader fills, `finish` ends loading."""

    def holders(self) -> "Iterator[tuple[str, Holder]]":
        yield "", self

    def params(self) -> dict[str, ParamSpec]:
        """Description of each parameter by field name (weight, bias)."""
        return {}

    def create(self, allocator: Allocator) -> None:
        """Allocate every parameter."""
        for name, spec in self.params().items():
            setattr(self, name, allocator.empty(spec.shape, spec.exact))

    def finish(self) -> None:
        """End loading: called once, after every parameter is filled."""


class Embedding(Holder):
    """`weight` [count, width]: token embeddings or learned positions. A tied head uses it as a linear without bias.

    rows: axis that ranks of a parallel run split ("vocab"); None: every rank has all rows.
    """

    weight: Tensor

    def __init__(self, count: int, width: int, rows: str | None = None) -> None:
        self.count = count
        self.width = width
        self.rows = rows
        self.method: LinearMethod | None = None
        self.bias: Tensor | None = None

    def params(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((("", self.count),), (self.width,), rows=self.rows)}


class TokenTypes(Embedding):
    """`weight` [types, width]: BERT's token types. separator: the tokens of a text after this one have the second type; None:
    all have the first."""

    def __init__(self, count: int, width: int, separator: int | None = None) -> None:
        super().__init__(count, width)
        self.separator = separator


class Biased(Holder):
    """A tied head with a bias, which is stored as one row. never: token id that is never chosen."""

    def __init__(self, table: Embedding, never: int | None = None) -> None:
        self.table = table
        self.never = never
        self.method: LinearMethod | None = None
        self.bias: Tensor = None

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def params(self) -> dict[str, ParamSpec]:
        return {"bias": ParamSpec((("", 1),), (self.table.count,))}

    def finish(self) -> None:
        self.bias = self.bias[0]
        if self.never is not None:
            self.bias[self.never] = -math.inf


class Sinusoids(Holder):
    """Sinusoidal positions: sines of all frequencies, then cosines (Marian, fairseq)."""

    weight: Tensor
    # As in Rotary: all sines before all cosines.
    interleaved = False
    amplitude = 1.0

    def __init__(self, count: int, width: int) -> None:
        self.count = count
        self.width = width

    @property
    def frequencies(self) -> np.ndarray:
        """[width / 2] float64, radians per position."""
        return 1 / 10000.0 ** (np.arange(0, self.width, 2) / self.width)

    def create(self, allocator: Allocator) -> None:
        self.weight = allocator.empty((self.count, self.width))
        self.weight[:] = allocator.constant(self.values)

    @property
    def values(self) -> np.ndarray:
        """The table, [count, width] float32, as in training."""
        angles = np.arange(self.count)[:, None] / 10000.0 ** (np.arange(0, self.width, 2) / self.width)
        return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


class Relative(Holder):
    """`weight` [buckets, heads]: attention bias by distance of the key (T5, MPNet).

    distance: farther keys share the last bucket. both: keys ahead have buckets of their own.
    """

    weight: Tensor

    def __init__(self, buckets: int, heads: int, distance: int, both: bool) -> None:
        self.buckets = buckets
        self.heads = heads
        self.distance = distance
        self.both = both

    def params(self) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((("", self.buckets),), (self.heads,))}


class LinearMethod(Protocol):
    """Storage and multiplication of weights that are not dense. One object serves many layers and keeps their state on them.

    The loader calls `create`, fills `layer.weight`, then calls `finish`; the op `linear` calls `apply` at every step.
    """

    def create(self, layer: Any, n_in: int, n_out: int, allocator: Allocator) -> None:
        """Allocate `layer.weight` [n_out, n_in] for the loader."""
        ...

    def finish(self, layer: Any) -> None:
        """Called after the layer is filled: repack or quantise it, and free the rest."""
        ...

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, n_in] -> [n, n_out], in x's dtype."""
        ...


class Linear(Holder):
    """`weight` [n_out, n_in] and `bias`, with the rows of all parts stacked.

    parts: output width, or width by part ({"q": 576, "k": 192, "v": 192}). split: the op `linear` returns one value per part.
    unbiased: parts without a bias in files, if the others have one. rows, columns: how ranks of a parallel run split outputs
    and inputs ("heads", "ffn"); None: every rank has all. adapters: by number, (first output, down [rank, in], up [rank, out])
    of each adapted part, in torch.
    """

    weight: Tensor

    def __init__(
        self,
        n_in: int,
        parts: int | Mapping[str, int],
        bias: bool = False,
        split: bool = False,
        rows: str | None = None,
        columns: str | None = None,
        unbiased: tuple[str, ...] = (),
    ) -> None:
        self.n_in = n_in
        self.parts = tuple({"": parts}.items() if isinstance(parts, int) else parts.items())
        self.sizes = tuple(rows for _, rows in self.parts)
        self.n_out = sum(self.sizes)
        self.split = split
        self.rows = rows
        self.columns = columns
        self.has_bias = bias
        self.unbiased = unbiased
        self.method: LinearMethod | None = None
        self.bias: Tensor | None = None
        self.adapters: Mapping[int, Any] | None = None

    def params(self) -> dict[str, ParamSpec]:
        specs = {"weight": ParamSpec(self.parts, (self.n_in,), rows=self.rows, columns=self.columns)}
        if self.has_bias:
            specs["bias"] = ParamSpec(self.parts, rows=self.rows, absent=self.unbiased)
        return specs

    def create(self, allocator: Allocator) -> None:
        if self.method is None:
            super().create(allocator)
        else:
            self.method.create(self, self.n_in, self.n_out, allocator)
            self.bias = allocator.empty((self.n_out,)) if self.has_bias else None

    def finish(self) -> None:
        if self.method is not None:
            self.method.finish(self)


class Norm(Holder):
    """`weight` [width], the factor itself (1 + w for gemma), in float32 or wider. kind: rms or layer."""

    weight: Tensor

    def __init__(self, width: int, eps: float, kind: str = "rms", bias: bool = False) -> None:
        self.width = width
        self.eps = eps
        self.kind = kind
        self.has_bias = bias
        self.bias: Tensor | None = None

    def params(self) -> dict[str, ParamSpec]:
        spec = ParamSpec((("", self.width),), exact=True)
        return {"weight": spec, "bias": spec} if self.has_bias else {"weight": spec}


class Rotary(Holder):
    """The frequencies of one RopeConfig for heads of `head_dim`; `inv_freq` [dim / 2] float64, radians per position."""

    inv_freq: Tensor

    def __init__(self, config: RopeConfig, head_dim: int) -> None:
        self.config = config
        self.dim = config.dim or head_dim
        self.interleaved = config.interleaved
        self.amplitude = config.amplitude
        self.growth = config.growth
        self.length = config.original_context
        if self.dim % 2 or not 0 < self.dim <= head_dim:
            raise ValueError(f"rotary needs an even number of values, at most head_dim {head_dim}, not {self.dim}")

    def create(self, allocator: Allocator) -> None:
        self.inv_freq = allocator.constant(self.frequencies)

    @property
    def frequencies(self) -> np.ndarray:
        return frequencies(self.config, self.dim)


def rotaries(config: ModelConfig) -> list[Rotary | None]:
    """The Rotary of each layer, None without rotation. Layers with equal settings share one object."""
    kinds = [(layer.rope, layer.head_dim) for layer in config.layers]
    by_kind = {(rope, head_dim): Rotary(rope, head_dim) if rope else None for rope, head_dim in set(kinds)}
    return [by_kind[kind] for kind in kinds]


def frequencies(config: RopeConfig, dim: int) -> np.ndarray:
    """Radians per position, [dim / 2] float64. Raises ValueError for an unknown scaling."""
    base = np.array([config.theta ** -(pair / dim) for pair in range(0, dim, 2)])
    if config.scaling == "none":
        return base
    if config.scaling == "linear":
        return base / config.factor
    if config.scaling == "llama3":
        return _llama3(base, config)
    if config.scaling == "yarn":
        return _yarn(base, config, dim)
    if config.scaling == "divisors":
        if len(config.divisors) != dim // 2:
            raise ValueError(f"rotary needs {dim // 2} divisors, one per frequency, not {len(config.divisors)}")
        return base / np.array(config.divisors)
    raise ValueError(f"unknown rotary scaling {config.scaling!r}; known are none, linear, llama3, yarn and divisors")


def _llama3(base: np.ndarray, config: RopeConfig) -> np.ndarray:
    """Llama 3.1 scaling: short wavelengths are unchanged, long ones grow by `factor`, and those between are blended."""
    turns = config.original_context * base / (2 * math.pi)  # in the original context
    keep = np.clip((turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor), 0.0, 1.0)
    blended: np.ndarray = keep * base + (1 - keep) * base / config.factor
    return blended


def _yarn(base: np.ndarray, config: RopeConfig, dim: int) -> np.ndarray:
    """YaRN scaling: frequencies with more than beta_fast turns in the original context are unchanged, those with less than
    beta_slow are divided by `factor`, and those between are blended by their number.

    Source: Peng et al., "YaRN", arXiv 2309.00071.
    """
    low, high = (_pair_with(turns, config, dim) for turns in (config.beta_fast, config.beta_slow))
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    divided = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    blended: np.ndarray = divided * base / config.factor + (1 - divided) * base
    return blended


def _pair_with(turns: float, config: RopeConfig, dim: int) -> float:
    """Number, with a fraction, of the pair that makes `turns` turns in the original context."""
    return dim * math.log(config.original_context / (turns * 2 * math.pi)) / (2 * math.log(config.theta))
