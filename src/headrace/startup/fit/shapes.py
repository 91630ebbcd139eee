"""Shape of a model for the planner: every matrix with its number format, and the K/V and state of each layer. No values."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import lcm

from headrace import core
from headrace.backends.native.weights import PackedSize, packed_sizes
from headrace.data.config import LayerConfig, ModelConfig
from headrace.kv.layout import PAGE, vector_bytes
from headrace.models.registry import describe
from headrace.weights.source import WeightSource

# Columns of a packed tile, and the number of segments in which a layer with split columns is summed.
TILE, SEGMENTS = 64, 8
LAYER = re.compile(r"layers\.(\d+)\.(.+)")
ENCODER_LAYER = re.compile(r"encoder\.layers\.(\d+)\.(.+)")


@lru_cache(maxsize=4096)
def packed(kind: str, rows: int, columns: int, into: str) -> int:
    """Bytes of a packed matrix."""
    return int(core.module().packed_bytes(kind, rows, columns, into))


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of a weight matrix with one number format. kind, into: as in `PackedSize`. columns: inputs."""

    kind: str
    into: str
    rows: int
    columns: int

    def nbytes(self, rows: int | None = None, columns: range | None = None) -> int:
        """Bytes after packing, of `rows` rows and of the blocks that hold `columns` (None: all)."""
        count = self.rows if rows is None else rows
        if not count or (columns is not None and not columns):
            return 0
        if columns is None or len(columns) == self.columns:
            return packed(self.kind, count, self.columns, self.into)
        block = self.block_columns
        blocks = -(-columns.stop // block) - columns.start // block
        return packed(self.kind, count, block * blocks, self.into)

    @property
    def block_columns(self) -> int:
        """Columns of a packed block: 64, 128 or 256. A block is never divided between ranks."""
        sizes = [packed(self.kind, 1, TILE * tiles, self.into) for tiles in (1, 2, 4)]
        return max(TILE * tiles for tiles, size in zip((1, 2, 4), sizes, strict=True) if size == sizes[0])

    @property
    def label(self) -> str:
        """Number format in which the core multiplies the matrix."""
        return {"int8": "Q8_0", "int4": "Q4_0"}.get(self.into, "BF16" if self.kind in ("F32", "F16") else self.kind)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: matrices with the same input, stacked.

    rows, columns: what ranks split, as in `ParamSpec` (heads, ffn, vocab, experts; None: every rank has all). copies: equal
    layers (experts), of which a token uses `active`. multiplied: False for tables whose rows are looked up.
    """

    name: str
    parts: tuple[Matrix, ...]
    rows: str | None = None
    columns: str | None = None
    copies: int = 1
    active: int = 1
    multiplied: bool = True

    @property
    def outputs(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def inputs(self) -> int:
        return self.parts[0].columns

    @property
    def weights(self) -> int:
        """Weights that a token is multiplied by."""
        return self.active * sum(part.rows * part.columns for part in self.parts)

    @property
    def nbytes(self) -> int:
        return self.copies * sum(part.nbytes() for part in self.parts)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer. heads: query heads, 0 for a state layer. key_dim, value_dim: numbers of a head that scores and sums use.

    latent: numbers of the one latent vector per token that multi-head latent attention caches in place of K and V; 0 otherwise.
    owns_kv: False if it reads another layer's. state_bytes: state of one sequence. vectors: bytes of norms and biases.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    linears: tuple[Linear, ...]
    vectors: int = 0
    window: int | None = None
    owns_kv: bool = True
    latent: int = 0
    state_bytes: int = 0
    post_norms: bool = False

    def slides(self, window: int) -> bool:
        """Whether the layer is in the pool of layers that see at most `window` tokens."""
        return self.window is not None and self.window <= window

    def kv_bytes(self, kv_dtype: str, kv_heads: int | None = None) -> int:
        """Bytes of K and V of PAGE tokens. kv_heads: held by a rank; a latent vector is held whole by every rank."""
        if not self.owns_kv or not self.heads:
            return 0
        if self.latent:
            return vector_bytes(self.latent, kv_dtype)
        heads = self.kv_heads if kv_heads is None else kv_heads
        return heads * (vector_bytes(self.key_dim, kv_dtype) + vector_bytes(self.value_dim, kv_dtype))

    @property
    def unit(self) -> int:
        """Columns of a unit of the output projection: whole heads and whole tiles."""
        return lcm(self.value_dim, TILE)


@dataclass(frozen=True, slots=True, eq=False)
class ModelShape:
    """All that the planner knows of a model. Compared by identity, so that results for it are cached.

    tables: token table (first), positions. head: output projection; the token table if tied. other: bytes that are in no layer
    (an encoder-decoder's encoder). source_positions, encoder_layers, convolutions: of an encoder that reads sound. config: of a
    model that Headrace runs, otherwise None with `refusal` as the reason.
    origin: what the sizes come from. stored: packed bytes of all tensors of the file, if the matrices are by formula.
    """

    name: str
    architecture: str
    hidden: int
    vocab_size: int
    max_position: int
    layers: tuple[LayerShape, ...]
    tables: tuple[Linear, ...]
    head: Linear
    tied: bool
    vectors: int = 0
    other: int = 0
    source_positions: int = 0
    encoder_layers: tuple[LayerShape, ...] = ()
    convolutions: tuple[Linear, ...] = ()
    config: ModelConfig | None = None
    refusal: str = ""
    origin: str = ""
    stored: int | None = None

    @property
    def encoder(self) -> bool:
        return self.config is not None and self.config.encoder

    @property
    def sides(self) -> int:
        """K/V tables of a sequence: 2 for an encoder-decoder."""
        return 2 if self.config is not None and self.config.source is not None else 1

    def kv_blocks(self, blocks: int, batch: int, block_size: int) -> int:
        """Blocks of `batch` sequences with `blocks` blocks of tokens, and of their sources: as many, or a window each."""
        if self.source_positions:
            return blocks + batch * -(-self.source_positions // block_size)
        return self.sides * blocks

    @property
    def linears(self) -> Iterator[Linear]:
        """All matrices, each once."""
        yield from self.tables
        for layer in self.layers:
            yield from layer.linears
        if not self.tied:
            yield self.head

    @property
    def weights_bytes(self) -> int:
        """Bytes of the packed weights, padding included."""
        return self.matched_bytes if self.stored is None else self.stored

    @property
    def matched_bytes(self) -> int:
        """Bytes of the matrices and vectors listed here; `weights_bytes` unless the file has others."""
        vectors = self.vectors + sum(layer.vectors for layer in self.layers)
        return sum(linear.nbytes for linear in self.linears) + vectors + self.other

    @property
    def parameters(self) -> int:
        """Weights of all matrices, those of an encoder of sound included."""
        sound = (linear for layer in self.encoder_layers for linear in layer.linears)
        every = (*self.linears, *sound, *self.convolutions)
        return sum(linear.copies * part.rows * part.columns for linear in every for part in linear.parts)

    @property
    def multiplied(self) -> int:
        """Weights that a decoded token is multiplied by: A5's 2 · P operations a token are twice this number."""
        return sum(linear.weights for layer in self.layers for linear in layer.linears) + self.head.weights

    def kv_block_bytes(self, kv_dtype: str = "bfloat16", block_size: int = PAGE) -> int:
        """Bytes of K and V of `block_size` tokens in all layers."""
        return sum(layer.kv_bytes(kv_dtype) for layer in self.layers) * block_size // PAGE

    def window(self, context: int) -> int:
        """Number of tokens that window layers keep in a pool of their own, 0 if there is none (`ModelConfig.shared_window`)."""
        if self.config is not None:
            return self.config.shared_window(context)
        if not all(layer.owns_kv for layer in self.layers):
            return 0
        return max((layer.window for layer in self.layers if layer.window is not None and layer.window < context), default=0)

    @property
    def state_bytes(self) -> int:
        return sum(layer.state_bytes for layer in self.layers)


def shape_of(config: ModelConfig, source: WeightSource, name: str, quantize: str = "", origin: str = "") -> ModelShape:
    """Shape of a model that Headrace runs, from the headers of its file. Raises WeightError as `weights.parts.plan` does."""
    sizes: dict[int, list[PackedSize]] = {}
    encoder: dict[int, list[PackedSize]] = {}
    outside: list[PackedSize] = []
    for size in packed_sizes(describe(config), source, quantize):
        found = LAYER.fullmatch(size.path)
        sizes.setdefault(int(found[1]), []).append(size) if found else outside.append(size)
    sound = config.source if config.reads_sound else None
    for size in outside if sound is not None else ():
        if (found := ENCODER_LAYER.fullmatch(size.path)) is not None:
            encoder.setdefault(int(found[1]), []).append(replace(size, path=size.path.removeprefix("encoder.")))
    convolutions = [size for size in outside if size.columns and size.path.startswith("encoder.conv")]
    layers = tuple(_layer(config, layer, sizes[at]) for at, layer in enumerate(config.layers))
    tables = [size for size in outside if size.columns and not size.path.startswith(("output", "encoder"))]
    own_head = [size for size in outside if size.columns and size.path.startswith("output")]
    made = tuple(_linear(path, parts, multiplied=False) for path, parts in groupby(tables, lambda size: size.path))
    head = _linear("head", own_head) if own_head else replace(made[0], name="head", multiplied=True)
    return ModelShape(
        name=name,
        architecture=config.architecture,
        hidden=config.hidden_size,
        vocab_size=config.vocab_size,
        max_position=config.max_position,
        layers=layers,
        tables=made,
        head=head,
        tied=not own_head,
        vectors=sum(size.nbytes for size in outside if not size.columns and not size.path.startswith("encoder")),
        other=sum(size.nbytes for size in outside if size.path.startswith("encoder")),
        source_positions=0 if sound is None else sound.max_position,
        encoder_layers=() if sound is None else tuple(_layer(sound, one, encoder[at]) for at, one in enumerate(sound.layers)),
        convolutions=tuple(
            _linear(path.rpartition(".")[2], parts) for path, parts in groupby(convolutions, lambda size: size.path)
        ),
        config=config,
        origin=origin or f"headers of {source.path.name}",
    )


def _layer(config: ModelConfig, layer: LayerConfig, sizes: list[PackedSize]) -> LayerShape:
    matrices = [size for size in sizes if size.columns]
    names = [LAYER.fullmatch(size.path)[2] for size in sizes]  # type: ignore[index]
    return LayerShape(
        heads=layer.heads,
        kv_heads=layer.kv_heads,
        key_dim=layer.head_dim,
        value_dim=layer.head_dim,
        linears=tuple(_linear(path.rpartition(".")[2], parts) for path, parts in groupby(matrices, lambda size: size.path)),
        vectors=sum(size.nbytes for size in sizes if not size.columns),
        window=layer.window,
        owns_kv=layer.kv_from is None,
        post_norms=any(name.endswith("post_norm") for name in names),
    )


def _linear(name: str, sizes: Iterable[PackedSize], multiplied: bool = True) -> Linear:
    sizes = list(sizes)
    spec = sizes[0].spec
    parts = tuple(Matrix(size.kind, size.into, size.rows, size.columns) for size in sizes)
    return Linear(name, parts, spec.rows, spec.columns, multiplied=multiplied)
