"""A model's weights as the native core multiplies them: stored rows go straight from the open file into packed tiles.

GGUF integers and scales are kept exactly, and bfloat16 is unchanged. float16 and float32 become bfloat16, with a line in the
log, or integers (`quantize`). A tensor with two uses (a tied head) is packed once.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from headrace import core
from headrace.backends.native.tuning import choose_kernels
from headrace.data.progress import Progress
from headrace.models.base import Model
from headrace.models.layers import Biased, Embedding, Holder, ParamSpec, Relative
from headrace.models.registry import describe
from headrace.parallel.ranks.share import Share
from headrace.weights.decode import check_finite, read_floats
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.parts import WeightPart, cut_plan, plan
from headrace.weights.schemes.folder import input_scale
from headrace.weights.source import WeightError, WeightSource

log = logging.getLogger("headrace")

QUANTIZE = ("", "int8", "int4")
# Bytes packed per call, during which Python handles no Ctrl-C and the progress display stands still.
PACKED_AT_ONCE = 64 << 20


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Consecutive outputs of a linear layer, from output `column` on, with the same input format.

    form: format of the input, a8 (int8 with scales) or bf16. order: column i of the input is the value's column order[i]; empty
    for the identity. scale: static scale of int8 inputs from the file, 0 if it has none.
    """

    linear: Any  # _core.PackedLinear
    column: int
    form: str
    order: tuple[int, ...] = ()
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class PackedSize:
    """Size of one part of a parameter after packing.

    path: its holder ("layers.3.qkv"). spec: the parameter, with the axes that ranks split. kind: stored number format as the
    packer reads it; into: integers that it is rounded to, or "". rows, columns: of the part; columns is 0 for vectors and
    small tables, which stay float32.
    """

    path: str
    spec: ParamSpec
    kind: str
    into: str
    rows: int
    columns: int
    nbytes: int


def packed_sizes(model: Model, source: WeightSource, quantize: str = "", share: Share | None = None) -> Iterator[PackedSize]:
    """Sizes of a model's parameters after packing, padding included: whole tiles of matrices, float32 vectors.

    share: the rank's part of them. Reads names and shapes only. Raises ValueError for stored kinds that the core has no kernels
    for.
    """
    plans = plan(model, source)
    if share is not None:
        plans = cut_plan(plans, model, share)
    for path, holder in model.holders():
        for field, spec in holder.params().items():
            table = isinstance(holder, Embedding) or spec.rows == "vocab"
            for part in plans[f"{path}.{field}"]:
                n = part.shape[0]
                if len(part.shape) == 1 or isinstance(holder, Biased | Relative):
                    count = -(-math.prod(part.shape) // 16) * 16
                    yield PackedSize(path, spec, "F32", "", count, 0, 4 * count)
                    continue
                kind = source.info(part.source).kind
                as_read = "F32" if part.rewritten else kind
                into = _quantized(kind, quantize, table) if as_read in FLOATS else ""
                first, last = _packed_columns(part, as_read, into)
                columns = last - first
                yield PackedSize(path, spec, as_read, into, n, columns, core.module().packed_bytes(as_read, n, columns, into))


def packed_bytes(model: Model, source: WeightSource, quantize: str = "", share: Share | None = None) -> int:
    """Bytes of a model's parameters after packing. Raises ValueError as `packed_sizes` does."""
    return sum(size.nbytes for size in packed_sizes(model, source, quantize, share))


def total_packed_bytes(models: Sequence[tuple[Model, WeightSource, str]]) -> tuple[int, str]:
    """Bytes of the packed weights of models, each with its `quantize`, and the setting with which they take fewer bytes.

    The setting is empty if no float weights could become integers. Raises ValueError as `packed_bytes` does.
    """
    need = sum(packed_bytes(*one) for one in models)
    fewer = sum(packed_bytes(model, source, quantize or "int8") for model, source, quantize in models)
    return need, "weights in fewer bits (quantize='int8')" if fewer < need else ""


def _quantized(kind: str, quantize: str, table: bool) -> str:
    """The integer type that a stored matrix is rounded to: empty for integers; int8 for token tables and heads."""
    if kind not in FLOATS or not quantize:
        return ""
    return "int8" if table else quantize


def _packed_columns(part: WeightPart, kind: str, into: str) -> tuple[int, int]:
    """Columns that are packed of a part: its own with those around it that share a stored or a packed block."""
    if part.columns is None:
        return 0, math.prod(part.shape[1:])
    block = max(KINDS[kind].block, core.module().block_columns(kind, into))
    first, last = part.columns
    return first // block * block, min(-(-last // block) * block, _all_columns(part))


def _all_columns(part: WeightPart) -> int:
    """Columns of the whole model's matrix."""
    return part.stored[0 if part.transpose else 1]


class WeightsFile(NamedTuple):
    """A file that takes packed weights instead of memory. descriptor: may be closed afterwards. bytes: at least of all weights.

    shared: memory that other processes map, too; otherwise a file on disk, to which all pages are written. filled: another
    process has packed the same weights into it, and this one reads them.
    """

    descriptor: int
    bytes: int
    shared: bool = False
    filled: bool = False


class PackedWeights:
    """Packed parameters of a model from an open file. The first use of a parameter lays it out; `pack` fills it.

    quantize: "", int8 or int4 rounds float weights with one scale per 32 columns; token tables and the head become int8. Raises
    WeightError if the file has no float weights to quantise, or values that are not finite.
    share: the part of the file's parameters to pack; `model` is then the rank's, of `share.narrowed()`.
    file: takes the packed bytes instead of memory.
    """

    def __init__(
        self,
        model: Model,
        source: WeightSource,
        pool: Any,
        quantize: str = "",
        share: Share | None = None,
        file: WeightsFile | None = None,
    ) -> None:
        if quantize not in QUANTIZE:
            raise ValueError(f"quantize must be int8 or int4, not {quantize!r}")
        self.source = source
        self.quantize = quantize
        self.share = share
        self.on_disk = file is not None and not file.shared
        arena = core.module().Arena
        if file is None:
            self.arena = arena()
        elif file.filled:
            self.arena = arena(file.bytes, file.descriptor, filled=True)
        else:
            self.arena = arena(file.bytes, file.descriptor)
        self._pool = pool
        self._packer = core.module().Packer(self.arena)
        # By the packer's number.
        self._packed: list[WeightPart] = []
        whole = model if share is None else describe(share.config)
        self._plans = plan(whole, source)
        if share is not None:
            self._plans = cut_plan(self._plans, whole, share)
        self._paths = {id(holder): path for path, holder in model.holders()}
        self._tables: dict[str, Any] = {}
        self._linears: dict[str, list[PackedPart]] = {}
        self._gated: dict[str, Any] = {}
        self._rounded: set[str] = set()
        # Column order by stored tensor.
        self._orders: dict[str, tuple[int, ...]] = {}
        if quantize and not any(self.source.info(p.source).kind in FLOATS for p in self._matrices()):
            raise WeightError(f"{source.path}: the weights are quantised already; leave quantize={quantize!r} out")

    @property
    def bytes(self) -> int:
        """Bytes of the parameters that are laid out."""
        return int(self.arena.used)

    def pack(self, progress: Progress | None = None) -> None:
        """Fill the parameters that were laid out since the last call, on all threads and mostly without the GIL.

        progress: advances by tensors. Raises WeightError on values that are not finite.
        """
        bar, left = progress or Progress(), self._packer.waiting
        if left:
            bar.start(f"packing {self.source.path.name}", left, unit="tensors")
        while self._packer.waiting:
            bar.advance(left - self._packer.waiting)
            left = self._packer.waiting
            broken = self._packer.run(self._pool, PACKED_AT_ONCE)
            if self.on_disk:
                self.arena.write_back()
            for number in broken:
                raise WeightError(
                    f"{self.source.path}: tensor {self._packed[number].source!r} has values that are NaN or infinite; "
                    "the file is damaged, download it again"
                )

    def summary(self) -> str:
        """One line about weights that were rounded to bfloat16; empty if none were."""
        if not self._rounded or self.quantize:
            return ""
        return f"{' and '.join(sorted(self._rounded))} weights are held as bfloat16; quantize='int8' halves them"

    def path(self, holder: Holder) -> str:
        """The path of a holder in its model: layers.3.qkv."""
        return self._paths[id(holder)]

    def name(self, holder: Holder) -> str:
        """The name of a holder in its block: qkv, out, gate_up, …"""
        return self._paths[id(holder)].rpartition(".")[2]

    def form(self, holder: Holder) -> set[str]:
        """Input formats of a linear layer: {"a8"}, {"bf16"}, or both if its parts differ."""
        return {self._form(part) for part in self._parts(holder, "weight")}

    def order(self, holder: Holder) -> set[tuple[int, ...]]:
        """Column orders of a linear layer's input; {()} for the identity."""
        return {self._order(part) for part in self._parts(holder, "weight")}

    def scale(self, holder: Holder) -> float:
        """Static scale of a linear layer's int8 inputs; 0 if the file has none for all its parts."""
        return input_scale(self.source, [part.source for part in self._parts(holder, "weight")]) or 0.0

    def linear(self, holder: Holder, segment_unit: int = 0) -> list[PackedPart]:
        """A linear layer as packed layers, one for each run of parts with the same input format."""
        path = self._paths[id(holder)]
        if path not in self._linears:
            parts = self._parts(holder, "weight")
            biases = self._biases(holder, parts)
            made, column = [], 0
            for (form, order), run in groupby(
                zip(parts, biases, strict=True), key=lambda pair: (self._form(pair[0]), self._order(pair[0]))
            ):
                tensors = [self._pack(part, bias) for part, bias in run]
                linear = self._packed_linear(tensors, parts[0], segment_unit)
                made.append(PackedPart(linear, column, form, order, self.scale(holder)))
                column += sum(tensor.n for tensor in tensors)
            self._linears[path] = made
        return self._linears[path]

    def _packed_linear(self, tensors: list[Any], part: WeightPart, unit: int) -> Any:
        """A packed layer. part: one of its parts, which have the same columns. unit: of the fixed segments."""
        if self.share is None or part.columns is None:
            return self._new_linear(tensors, segment_unit=unit)
        kind = "F32" if self._read(part) else self.source.info(part.source).kind
        start, _ = _packed_columns(part, kind, self._quantize(part))
        ranks = {"share": (self.share.rank, self.share.world), "columns": _all_columns(part), "start": start}
        return self._new_linear(tensors, segment_unit=unit, **ranks)

    def _new_linear(self, tensors: list[Any], **settings: Any) -> Any:
        """A new packed layer, with the kernels that are faster on this processor."""
        linear = core.module().PackedLinear(tensors, **settings)
        choose_kernels(linear, self._pool)
        return linear

    def gated(self, holder: Holder) -> Any | None:
        """The gate and up parts of a layer, interleaved in one packed layer; None if they must stay apart."""
        path = self._paths[id(holder)]
        parts = self._parts(holder, "weight")
        if len(parts) != 2 or parts[0].shape != parts[1].shape or "bias" in holder.params():
            return None
        if len(self.form(holder)) > 1 or len(self.order(holder)) > 1:
            return None
        if len({(self._quantize(part), self._mapped(part)) for part in parts}) > 1:
            # The packer has one setting for both.
            return None
        if any(part.row_order is not None for part in parts):
            # The packer reads the rows of a pair in file order.
            return None
        if path not in self._gated:
            (gate, gate_kind, _, mapped), (up, up_kind, _, _) = (self._rows(part) for part in parts)
            n, k = parts[0].shape
            quantize = self._quantize(parts[0])
            pair = self._packer.add_pair(gate, gate_kind, up, up_kind, n, k, quantize=quantize, mapped=mapped)
            self._note(*parts, mapped=mapped)
            self._gated[path] = self._new_linear(list(pair), gated=True)
        return self._gated[path]

    def table(self, holder: Holder) -> Any:
        """A packed table whose rows are looked up (tokens, positions). A tied head multiplies it, too."""
        path = self._paths[id(holder)]
        if path not in self._tables:
            (part,) = self._parts(holder, "weight")
            self._tables[path] = self._pack(part, None, wide=True)
        return self._tables[path]

    def head(self, holder: Holder, ids: np.ndarray | None = None) -> PackedPart:
        """The output layer, or its rows `ids`. A tied head shares the packed token table."""
        table = holder.table if isinstance(holder, Biased) else holder
        (part,), bias = self._parts(table, "weight"), self.vector(holder, "bias")
        if bias is not None and isinstance(holder, Biased) and holder.never is not None:
            bias[holder.never] = -np.inf
        if ids is not None:
            tensor = self._pack(part, bias if bias is None else bias[ids], wide=True, ids=ids)
        else:
            tensor = self.table(table) if bias is None else self.table(table).with_bias(bias)
        return PackedPart(self._new_linear([tensor]), 0, self._form(part), self._order(part))

    def vector(self, holder: Holder, field: str = "weight") -> np.ndarray | None:
        """Norm weights or biases, flat float32; None if the holder has no such parameter."""
        if field not in holder.params():
            return None
        return np.concatenate([self._floats(part) for part in self._parts(holder, field)])

    def bias(self, holder: Holder) -> np.ndarray | None:
        """The bias of a linear layer, flat float32; None if it has none."""
        return self.vector(holder, "bias")

    def numbers(self, holder: Embedding | Relative) -> np.ndarray:
        """A small table, [rows, width] float32, unpacked."""
        (part,) = self._parts(holder, "weight")
        return self._numbers(part)

    def rounds_to_bfloat16(self, holder: Holder) -> bool:
        """Whether the file holds this table in bfloat16, so that scales applied to it are rounded to it too."""
        return all(self.source.info(part.source).kind == "BF16" for part in self._parts(holder, "weight"))

    def _matrices(self) -> Iterator[WeightPart]:
        return (part for key, parts in self._plans.items() for part in parts if len(part.shape) == 2)

    def _parts(self, holder: Holder, field: str) -> tuple[WeightPart, ...]:
        return self._plans[f"{self._paths[id(holder)]}.{field}"]

    def _biases(self, holder: Holder, parts: tuple[WeightPart, ...]) -> list[np.ndarray | None]:
        # Ranks with a part of the columns add the bias after the sum.
        if "bias" not in holder.params() or parts[0].columns is not None:
            return [None] * len(parts)
        return [self._floats(part) for part in self._parts(holder, "bias")]

    def _floats(self, part: WeightPart) -> np.ndarray:
        return self._numbers(part).reshape(-1)

    def _numbers(self, part: WeightPart) -> np.ndarray:
        """A part as contiguous float32 [n, …]. Raises WeightError if it has NaN or infinite values."""
        if not part.source:
            return np.zeros(part.shape, np.float32)
        values = read_floats(self.source, part.source)
        check_finite(values, np.float32, part.source, self.source)
        return np.ascontiguousarray(part.take(values))

    def _form(self, part: WeightPart) -> str:
        return "bf16" if self.source.info(part.source).kind in FLOATS and not self.quantize else "a8"

    def _order(self, part: WeightPart) -> tuple[int, ...]:
        if self._read(part):
            return ()
        if part.source not in self._orders:
            columns = self.source.columns(part.source)
            self._orders[part.source] = () if columns is None else tuple(columns.tolist())
        return self._orders[part.source]

    def _quantize(self, part: WeightPart, wide: bool = False) -> str:
        return _quantized(self.source.info(part.source).kind, self.quantize, wide)

    def _read(self, part: WeightPart) -> bool:
        """Whether a part is decoded to float32 before packing. Quantising would hide a NaN, so quantised parts are decoded and
        checked."""
        return part.rewritten or (bool(self.quantize) and self.source.info(part.source).kind in FLOATS)

    def _mapped(self, part: WeightPart) -> bool:
        return not self._read(part) and self.source.mapped(part.source)

    def _rows(self, part: WeightPart) -> tuple[np.ndarray, str, np.ndarray | None, bool]:
        """Stored rows [n, row bytes], their kind, the row order (None: file order), and whether they are memory-mapped."""
        kind = self.source.info(part.source).kind
        if self._read(part):
            return self._numbers(part).view(np.uint8), "F32", None, False
        rows = self.source.raw(part.source)
        if part.rows is not None:
            rows = rows[part.rows[0] : part.rows[1]]
        if part.columns is not None:
            block, block_bytes = KINDS[kind]
            first, last = _packed_columns(part, kind, "")
            rows = rows[:, first // block * block_bytes : last // block * block_bytes]
        order = None if part.row_order is None else np.fromiter(part.row_order, np.int32)
        return rows, kind, order, self._mapped(part)

    def _pack(self, part: WeightPart, bias: np.ndarray | None, wide: bool = False, ids: np.ndarray | None = None) -> Any:
        rows, kind, order, mapped = self._rows(part)
        if ids is not None:
            order = (ids if order is None else order[ids]).astype(np.int32)
        quantize = self._quantize(part, wide)
        first, last = _packed_columns(part, kind, quantize)
        n, k = part.shape[0] if ids is None else len(ids), last - first
        tensor = self._packer.add(rows, kind, n, k, permutation=order, quantize=quantize, bias=bias, mapped=mapped)
        self._note(part, mapped=mapped)
        return tensor

    def _note(self, *parts: WeightPart, mapped: bool) -> None:
        """Record the parts that were passed to the packer. Decoded rows are packed at once, to free their memory."""
        self._packed.extend(parts)
        for part in parts:
            kind = self.source.info(part.source).kind
            if kind in ("F16", "F32"):
                self._rounded.add({"F16": "float16", "F32": "float32"}[kind])
        if not mapped:
            self.pack()
            for part in parts:
                self.source.release(part.source)
