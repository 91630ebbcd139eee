"""Memory of a model: weights, K/V, state, buffers and process, by rank of a layout. The memory plan has the same bytes."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

from headrace.backends.memory import window_blocks
from headrace.backends.native.encoder import scratch_blocks
from headrace.data.plan import MAX_NODES
from headrace.kv.layout import PAGE
from headrace.parallel.pipeline.cut import even_borders, possible_ends
from headrace.startup.fit.shapes import SEGMENTS, TILE, LayerShape, Linear, ModelShape

# Bytes of a process before it opens a model: Python, the core, the engine.
PROCESS = 72 << 20
# Bytes of a process for each token of the vocabulary.
TOKEN_TEXT = 640
# Buffers in the core (csrc/program/buffers.cpp): a cache line, a large page, 64 quantized columns, rows of logits at once.
LINE, LARGE_PAGE, A8_TILE, HEAD_ROWS = 64, 2 << 20, 104, 80
# Tokens of a block of K/V.
BLOCK = 16
# Largest number of ranks that split a layer; ranks own whole segments.
TP = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of a model over processes: tp ranks that split each layer, pp stages of whole layers, replicas of all that.

    cut: layers of each stage, the stages as even as they can be if empty. Raises ValueError for counts that cannot be.
    """

    tp: int = 1
    pp: int = 1
    replicas: int = 1
    cut: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.tp not in TP:
            raise ValueError(f"--tp {self.tp}: must be 1, 2, 4 or 8")
        for name in ("pp", "replicas"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be 1 or more")
        if self.cut and len(self.cut) != self.pp:
            raise ValueError(f"{len(self.cut)} stages are named and --pp is {self.pp}; they must be equal")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.replicas

    def __str__(self) -> str:
        parts = [f"{name} {count}" for name, count in (("tp", self.tp), ("pp", self.pp), ("replicas", self.replicas))]
        return " × ".join(part for part in parts if not part.endswith(" 1")) or "one process"


# The model in one process.
ONE = Layout()


@dataclass(frozen=True, slots=True)
class Bytes:
    """Memory of one rank in bytes. kv: blocks of all sequences. state: of state layers. windows: the part of `kv` in the pool
    of window layers."""

    weights: int
    kv: int
    state: int
    buffers: int
    process: int
    windows: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.state + self.buffers + self.process


@dataclass(frozen=True, slots=True)
class Load:
    """Work that memory is planned for: `batch` sequences of `context` tokens, at most `chunk` rows in a step."""

    context: int
    batch: int = 1
    chunk: int = 2048
    kv_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("context", "batch", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: must be 1 or more")

    @property
    def blocks(self) -> int:
        """Blocks of K/V of all sequences."""
        return self.batch * -(-self.context // BLOCK)


def check_layout(shape: ModelShape, layout: Layout) -> None:
    """Raise ValueError if the model has fewer heads or layers than the layout has ranks or stages."""
    heads = min((layer.heads for layer in shape.layers if layer.heads), default=SEGMENTS)
    if layout.tp > heads:
        raise ValueError(f"--tp {layout.tp}: {shape.name} has {heads} heads, and a rank takes at least one; lower it")
    if layout.pp > len(shape.layers):
        raise ValueError(
            f"--pp {layout.pp}: {shape.name} has {len(shape.layers)} layers, and a stage has at least one; lower it"
        )
    if layout.cut and sum(layout.cut) != len(shape.layers):
        raise ValueError(f"stages of {'+'.join(map(str, layout.cut))} layers: {shape.name} has {len(shape.layers)} layers")


def share(units: int, tp: int, rank: int) -> range:
    """Units of a rank: whole segments, of which segment i ends before unit floor((i + 1) * units / 8)."""
    each = SEGMENTS // tp
    return range(rank * each * units // SEGMENTS, (rank + 1) * each * units // SEGMENTS)


def heads_of(layer: LayerShape, tp: int, rank: int) -> tuple[range, range]:
    """Query heads and KV heads of a rank. A KV head is held by every rank with a query head of it."""
    per_unit = layer.unit // layer.value_dim
    units = share(-(-layer.heads // per_unit), tp, rank)
    heads = range(units.start * per_unit, min(layer.heads, units.stop * per_unit))
    group = layer.heads // layer.kv_heads
    return heads, range(heads.start // group, -(-heads.stop // group)) if heads else range(0)


def weights_of(linear: Linear, layer: LayerShape | None, tp: int, rank: int) -> int:
    """Packed bytes of a rank's share of a linear layer. Blocks that a border cuts are held whole by both ranks."""
    if tp == 1 or (linear.rows is None and linear.columns is None):
        return linear.nbytes
    if linear.rows == "experts":
        return linear.nbytes // linear.copies * len(share(linear.copies, tp, rank))
    if linear.columns is not None:
        columns = _columns(linear, layer, tp, rank)
        return linear.copies * sum(part.nbytes(columns=columns) for part in linear.parts)
    return linear.copies * sum(
        part.nbytes(rows=rows) for part, rows in zip(linear.parts, _rows(linear, layer, tp, rank), strict=True)
    )


def _columns(linear: Linear, layer: LayerShape | None, tp: int, rank: int) -> range:
    """Columns of a rank, in whole units."""
    if linear.columns == "heads" and layer is not None and layer.heads:
        heads, _ = heads_of(layer, tp, rank)
        return range(heads.start * layer.value_dim, heads.stop * layer.value_dim)
    units = share(-(-linear.inputs // TILE), tp, rank)
    return range(units.start * TILE, min(linear.inputs, units.stop * TILE))


def _rows(linear: Linear, layer: LayerShape | None, tp: int, rank: int) -> list[int]:
    """Number of rows of each part that a rank holds."""
    if linear.rows == "heads" and layer is not None and layer.heads:
        heads, kv_heads = heads_of(layer, tp, rank)
        if len(linear.parts) == 3 and not layer.latent:
            q, k, v = (part.rows for part in linear.parts)
            return [
                q // layer.heads * len(heads),
                k // layer.kv_heads * len(kv_heads),
                v // layer.kv_heads * len(kv_heads),
            ]
        if linear.name == "qkv" and not layer.latent:  # by formula: q, k and v in one matrix
            kv = (layer.key_dim + layer.value_dim) * layer.kv_heads if layer.owns_kv else 0
            (whole,) = (part.rows for part in linear.parts)
            return [(whole - kv) // layer.heads * len(heads) + kv // layer.kv_heads * len(kv_heads)]
        return [part.rows // layer.heads * len(heads) for part in linear.parts]
    made = []
    for part in linear.parts:
        units = share(-(-part.rows // TILE), tp, rank)
        made.append(max(0, min(part.rows, units.stop * TILE) - units.start * TILE))
    return made


@lru_cache(maxsize=1024)
def stages(shape: ModelShape, layout: Layout) -> list[range]:
    """Layers of each stage: those of `cut`, or the stages that `--pp` runs (`parallel.pipeline.cut`).

    A layer that reads the K/V of another stays in its stage.
    """
    if layout.pp == 1:
        return [range(len(shape.layers))]
    if layout.cut:
        ends = list(accumulate(layout.cut))
        return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    costs = [sum(linear.weights for linear in layer.linears) for layer in shape.layers]
    count = len(costs)
    if shape.config is not None:
        ends = possible_ends(shape.config)
    else:
        ends = [end for end in range(1, count + 1) if end == count or shape.layers[end].owns_kv]
    if len(ends) < layout.pp:
        raise ValueError(f"{layout.pp} stages: the layers that share K/V cannot be divided into them; lower --pp")
    tables = sum(table.weights for table in shape.tables)
    return [range(*pair) for pair in pairwise(even_borders(costs, ends, tables, shape.head.weights, layout.pp))]


def bytes_of(shape: ModelShape, load: Load, layout: Layout = ONE, rank: int = 0, stage: int = 0) -> Bytes:
    """Memory of one rank of one stage."""
    window = shape.window(load.context)
    weights, page, in_windows, state = _held(shape, layout, rank, stage, load.kv_dtype, window)
    windows = in_windows * min(load.blocks, window_blocks(window, BLOCK, load.batch, load.chunk)) * BLOCK // PAGE
    kv = shape.kv_blocks(load.blocks, load.batch, BLOCK) * page * BLOCK // PAGE + windows
    buffers, process = buffers_of(shape, load) + encoder_bytes(shape), PROCESS + TOKEN_TEXT * shape.vocab_size
    return Bytes(weights, kv, load.batch * state, buffers, process, windows)


@lru_cache(maxsize=4096)
def _held(shape: ModelShape, layout: Layout, rank: int, stage: int, kv_dtype: str, window: int) -> tuple[int, int, int, int]:
    """Bytes of a rank: weights, K/V of a page, K/V of a page in window layers, state of a sequence."""
    inside = layer_counts(shape, layout, stage)
    first, last = stage == 0, stage == layout.pp - 1
    weights = page = in_windows = state = 0
    for layer, count in inside:
        weights += count * (layer.vectors + sum(weights_of(linear, layer, layout.tp, rank) for linear in layer.linears))
        held = len(heads_of(layer, layout.tp, rank)[1]) if layer.heads and not layer.latent else None
        kv = count * layer.kv_bytes(kv_dtype, held)
        page, in_windows = (page, in_windows + kv) if layer.slides(window) else (page + kv, in_windows)
        state += count * layer.state_bytes // layout.tp
    if first:
        weights += sum(weights_of(table, None, layout.tp, rank) for table in shape.tables) + shape.other
    if last:
        weights += shape.vectors
        if not shape.tied or not first:
            weights += weights_of(shape.head, None, layout.tp, rank)
    if shape.stored is not None:
        weights = round(weights * shape.stored / shape.matched_bytes)
    return weights, page, in_windows, state


def units_of(shape: ModelShape) -> list[int]:
    """Bytes of the packed matrices that a step reads one after the other: tables of embed, each layer, the head.

    A table that the head multiplies counts as the head's, as in `backends.native.offload`.
    """
    layers = [sum(linear.nbytes for linear in layer.linears) for layer in shape.layers]
    tables = sum(table.nbytes for table in shape.tables[int(shape.tied) :])
    return [tables, *layers, shape.head.nbytes]


@lru_cache(maxsize=1024)
def layer_counts(shape: ModelShape, layout: Layout, stage: int) -> tuple[tuple[LayerShape, int], ...]:
    """The different layers of a stage, with their number."""
    return tuple(Counter(shape.layers[at] for at in stages(shape, layout)[stage]).items())


def largest_rank(shape: ModelShape, load: Load, layout: Layout = ONE) -> Bytes:
    """Memory of the rank that needs most."""
    every = [bytes_of(shape, load, layout, rank, stage) for stage in range(layout.pp) for rank in range(layout.tp)]
    return max(every, key=lambda each: each.total)


def encoder_bytes(shape: ModelShape) -> int:
    """Bytes of an encoder of sound: the pool in float32 with the K and V of one layer, and the buffers of a window."""
    rows = shape.source_positions
    if not rows:
        return 0
    encoder = replace(shape, layers=shape.encoder_layers, source_positions=0, encoder_layers=(), convolutions=(), config=None)
    pages = scratch_blocks(BLOCK, rows) * BLOCK // PAGE
    taken = max(pages * layer.kv_bytes("float32") for layer in shape.encoder_layers)
    taken += sum(reserved(kind, width, rows) for kind, width in layer_buffers(encoder)) + reserved("float", shape.hidden, rows)
    # The first convolution has two rows for each position.
    return taken + 2 * reserved("float", max(linear.inputs for linear in shape.convolutions), 2 * rows)


def buffers_of(shape: ModelShape, load: Load) -> int:
    """Bytes of a program's buffers after a step of `chunk` rows, and of its tables of rotary angles.

    Fused layers as in `backends.native.lowering`: the sum of q, k and v, and the inputs of the linear layers.
    """
    rows, head_rows = load.chunk, min(load.batch, HEAD_ROWS)
    taken = sum(reserved(kind, width, rows) for kind, width in layer_buffers(shape))
    taken += reserved("float", shape.hidden, rows) + reserved("float", shape.hidden, head_rows)
    if not shape.encoder:
        taken += reserved(_form(shape.head), shape.hidden, head_rows)
        taken += reserved("float", shape.vocab_size, head_rows) + reserved("float", -(-shape.vocab_size // TILE), head_rows)
    return taken + _rope_bytes(shape, load.context)


@lru_cache(maxsize=64)
def layer_buffers(shape: ModelShape) -> list[tuple[str, int]]:
    """Format (float, a8, bf16) and width of the buffers that the layers of a model share, besides the hidden rows."""
    made: dict[tuple[str, int, bool], int] = {}
    for layer, _ in layer_counts(shape, ONE, 0):
        for key, count in _buffers(shape.hidden, layer).items():
            made[key] = max(made.get(key, 0), count)
    return [(kind, width) for (kind, width, _), count in made.items() for _ in range(count)]


def _buffers(hidden: int, layer: LayerShape) -> dict[tuple[str, int, bool], int]:
    """Number of buffers of a layer by format, width, and whether threads compute them for themselves."""
    linears = {linear.name: linear for linear in layer.linears}
    made: dict[tuple[str, int, bool], int] = {}
    for name in linears.keys() & {"qkv", "in"}:
        form = _form(linears[name])
        made |= {("float", linears[name].outputs, False): 1, (form, hidden, True): 1}
    if "out" in linears:
        form, width = _form(linears["out"]), linears["out"].inputs
        fused = form == "bf16" or (layer.value_dim and layer.value_dim % 32 == 0)
        made |= {(form, width, False): 1} if fused else {("float", width, False): 1, (form, width, True): 1}
    if layer.post_norms:
        key = ("float", hidden, False)
        made[key] = made.get(key, 0) + 1
    if "down" in linears:
        form, width = _form(linears["down"]), linears["down"].inputs
        if "up" in linears:
            made |= {("float", width, False): 2, (form, width, True): 1}
        else:
            made[form, width, False] = 1
    return made


def _form(linear: Linear) -> str:
    """Format of a linear layer's input: int8 for integers, else bfloat16."""
    return "bf16" if linear.parts[0].label == "BF16" else "a8"


def reserved(kind: str, width: int, rows: int) -> int:
    """Bytes that `Buffer::reserve` takes: whole rows, then whole cache lines, or large pages from 2 MiB on."""
    if kind == "float":
        stride = -(-width // 16) * 16
        row = 4 * (stride + 16 if stride % 512 == 0 else stride)
    else:
        row = -(-width // TILE) * (A8_TILE if kind == "a8" else 2 * TILE)
    size = rows * row
    unit = LARGE_PAGE if size >= LARGE_PAGE else LINE
    return -(-size // unit) * unit


def _rope_bytes(shape: ModelShape, context: int) -> int:
    """Cosines and sines of all positions, for each set of frequencies."""
    if shape.config is None:
        return 8 * (context + MAX_NODES) * (max((layer.key_dim for layer in shape.layers), default=0) // 2)
    ropes = {(layer.rope, layer.head_dim) for layer in shape.config.layers if layer.rope is not None}
    return sum(8 * (context + MAX_NODES) * ((rope.dim or dim) // 2) for rope, dim in ropes)
