"""A model's weights as the native core multiplies them: stored rows go straight from the open file into packed tiles.

GGUF integers and scales are kept exactly. bfloat16 stays what it is; float16 and float32 become bfloat16, which is said
once, or are quantised at load. What is asked for twice (a tied head) is packed once.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from headrace import core
from headrace.data.progress import Progress, Silent
from headrace.models.base import Model
from headrace.models.layers.embedding import Biased, Embedding, Relative
from headrace.models.layers.holder import Holder
from headrace.weights.dequant import check_finite, read_floats
from headrace.weights.kinds import FLOATS
from headrace.weights.parts import WeightPart, plan
from headrace.weights.schemes.folder import input_scale
from headrace.weights.source import WeightError, WeightSource

log = logging.getLogger("headrace")

QUANTIZE = ("", "int8", "int4")
PACKED_AT_ONCE = 64 << 20  # bytes: a moment in which Python does not see a Ctrl-C, and nobody is told anything


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Some outputs of a linear layer: those from `column` on. `form` is the input they take: a8 (int8 with scales) or bf16;
    `order`: its column i is the value's column order[i] (empty: as they stand). `scale`: that int8 inputs have in the file."""

    linear: Any  # _core.PackedLinear
    column: int
    form: str
    order: tuple[int, ...] = ()
    scale: float = 0.0


def packed_bytes(model: Model, source: WeightSource, quantize: str = "") -> int:
    """What the parameters of a model take once they are packed, padding included: whole tiles of matrices, float32 vectors.

    Raises ValueError for stored kinds that the core has no kernels for.
    """
    plans, total = plan(model, source), 0
    for path, holder in model.holders():
        for field, spec in holder.params().items():
            parts = plans[f"{path}.{field}"]
            table = isinstance(holder, Embedding) or spec.rows == "vocab"
            for part in parts:
                n, kind = part.shape[0], source.info(part.source).kind
                if len(part.shape) == 1 or isinstance(holder, Biased | Relative):
                    total += -(-math.prod(part.shape) // 16) * 16 * 4
                    continue
                as_read = "F32" if part.transpose or part.shift else kind
                into = _quantized(kind, quantize, table) if as_read in FLOATS else ""
                total += core.module().packed_bytes(as_read, n, math.prod(part.shape[1:]), into)
    return total


def weights_room(models: Sequence[tuple[Model, WeightSource, str]]) -> tuple[int, str]:
    """What the weights of models take together, each with its `quantize`, and what to ask for that they take less; empty where
    none of them are floats that would become integers. Raises ValueError as `packed_bytes` does."""
    need = sum(packed_bytes(*one) for one in models)
    fewer = sum(packed_bytes(model, source, quantize or "int8") for model, source, quantize in models)
    return need, "weights in fewer bits (quantize='int8')" if fewer < need else ""


def _quantized(kind: str, quantize: str, table: bool) -> str:
    """What a stored matrix is made into: nothing else where it is integers; tables of tokens and heads int8 at least."""
    if kind not in FLOATS or not quantize:
        return ""
    return "int8" if table else quantize


class PackedWeights:
    """Packs the parameters of a model from an open file: each is laid out when it is first asked for, and filled by `pack`.

    `quantize` ("", "int8", "int4") makes integers of float weights per 32 columns; tables of tokens and the head become
    int8 at least. Raises WeightError where the file has no float weights to quantise, and on values that are not finite.
    """

    def __init__(self, model: Model, source: WeightSource, pool: Any, quantize: str = "") -> None:
        if quantize not in QUANTIZE:
            raise ValueError(f"quantize must be int8 or int4, not {quantize!r}")
        self.source = source
        self.quantize = quantize
        self.arena = core.module().Arena()
        self._pool = pool
        self._packer = core.module().Packer(self.arena)
        self._packed: list[WeightPart] = []  # by the packer's numbers
        self._plans = plan(model, source)
        self._paths = {id(holder): path for path, holder in model.holders()}
        self._tables: dict[str, Any] = {}
        self._linears: dict[str, list[PackedPart]] = {}
        self._gated: dict[str, Any] = {}
        self._rounded: set[str] = set()
        self._orders: dict[str, tuple[int, ...]] = {}  # of stored tensors, each sorted once
        if quantize and not any(self.source.info(p.source).kind in FLOATS for p in self._matrices()):
            raise WeightError(f"{source.path}: the weights are quantised already; leave quantize={quantize!r} out")

    @property
    def bytes(self) -> int:
        """Memory of everything laid out so far."""
        return int(self.arena.used)

    def pack(self, progress: Progress | None = None) -> None:
        """Fill what was laid out since the last call, on all threads and mostly without Python's lock; `progress` is told of
        tensors. Raises WeightError on values that are not finite."""
        bar, left = progress or Silent(), self._packer.waiting
        if left:
            bar.start(f"packing {self.source.path.name}", left, unit="tensors")
        while self._packer.waiting:
            bar.advance(left - self._packer.waiting)
            left = self._packer.waiting
            for number in self._packer.run(self._pool, PACKED_AT_ONCE):
                raise WeightError(
                    f"{self.source.path}: tensor {self._packed[number].source!r} has values that are NaN or infinite; "
                    "the file is damaged, download it again"
                )

    def summary(self) -> str:
        """What was rounded, in one line; empty where nothing was."""
        if not self._rounded or self.quantize:
            return ""
        return f"{' and '.join(sorted(self._rounded))} weights are held as bfloat16; quantize='int8' halves them"

    def name(self, holder: Holder) -> str:
        """What a holder is called in its block: qkv, out, gate_up ..."""
        return self._paths[id(holder)].rpartition(".")[2]

    def form(self, holder: Holder) -> set[str]:
        """The inputs a linear layer takes: {"a8"}, {"bf16"}, or both where its parts differ."""
        return {self._form(part) for part in self._parts(holder, "weight")}

    def order(self, holder: Holder) -> set[tuple[int, ...]]:
        """The orders in which a linear layer takes its input's columns: {()} where they are taken as they stand."""
        return {self._order(part) for part in self._parts(holder, "weight")}

    def scale(self, holder: Holder) -> float:
        """That of a linear layer's int8 inputs in the file; 0 where it has none for all its parts."""
        return input_scale(self.source, [part.source for part in self._parts(holder, "weight")]) or 0.0

    def linear(self, holder: Holder, segment_unit: int = 0) -> list[PackedPart]:
        """A linear layer, as one packed layer for each run of parts that take the same input."""
        path = self._paths[id(holder)]
        if path not in self._linears:
            parts = self._parts(holder, "weight")
            biases = self._biases(holder, parts)
            made, column = [], 0
            for (form, order), run in groupby(
                zip(parts, biases, strict=True), key=lambda pair: (self._form(pair[0]), self._order(pair[0]))
            ):
                tensors = [self._pack(part, bias) for part, bias in run]
                linear = core.module().PackedLinear(tensors, segment_unit=segment_unit)
                made.append(PackedPart(linear, column, form, order, self.scale(holder)))
                column += sum(tensor.n for tensor in tensors)
            self._linears[path] = made
        return self._linears[path]

    def gated(self, holder: Holder) -> Any | None:
        """A layer of a gate and an up part in one stream; None where the parts cannot be: the linear then is unfused."""
        path = self._paths[id(holder)]
        parts = self._parts(holder, "weight")
        if len(parts) != 2 or parts[0].shape != parts[1].shape or "bias" in holder.params():
            return None
        if len(self.form(holder)) > 1 or len(self.order(holder)) > 1:
            return None
        if len({(self._quantize(part), self._mapped(part)) for part in parts}) > 1:
            return None  # the packer takes one setting for both
        if any(part.row_order is not None for part in parts):
            return None  # and rows in the order of the file
        if path not in self._gated:
            (gate, gate_kind, _, mapped), (up, up_kind, _, _) = (self._rows(part) for part in parts)
            n, k = parts[0].shape
            quantize = self._quantize(parts[0])
            pair = self._packer.add_pair(gate, gate_kind, up, up_kind, n, k, quantize=quantize, mapped=mapped)
            self._note(*parts, mapped=mapped)
            self._gated[path] = core.module().PackedLinear(list(pair), gated=True)
        return self._gated[path]

    def table(self, holder: Holder) -> Any:
        """A packed tensor whose rows are looked up (tokens, positions); as a tied head it is multiplied too."""
        path = self._paths[id(holder)]
        if path not in self._tables:
            (part,) = self._parts(holder, "weight")
            self._tables[path] = self._pack(part, None, wide=True)
        return self._tables[path]

    def head(self, holder: Holder, ids: np.ndarray | None = None) -> PackedPart:
        """The output layer, which shares its rows with the table of tokens where they are tied; or the rows `ids` of it."""
        table = holder.table if isinstance(holder, Biased) else holder
        (part,), bias = self._parts(table, "weight"), self.vector(holder, "bias")
        if bias is not None and isinstance(holder, Biased) and holder.never is not None:
            bias[holder.never] = -np.inf
        if ids is not None:
            tensor = self._pack(part, bias if bias is None else bias[ids], wide=True, ids=ids)
        else:
            tensor = self.table(table) if bias is None else self.table(table).with_bias(bias)
        return PackedPart(core.module().PackedLinear([tensor]), 0, self._form(part), self._order(part))

    def vector(self, holder: Holder, field: str = "weight") -> np.ndarray | None:
        """Norm weights, biases, sinks: float32, flat; None where the holder has no such parameter."""
        if field not in holder.params():
            return None
        return np.concatenate([self._floats(part) for part in self._parts(holder, field)])

    def bias(self, holder: Holder) -> np.ndarray | None:
        """That of a linear layer: float32, flat; None where it has none."""
        return self.vector(holder, "bias")

    def numbers(self, holder: Embedding | Relative) -> np.ndarray:
        """A small table as it is [rows, width], float32."""
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
        if "bias" not in holder.params():
            return [None] * len(parts)
        return [self._floats(part) for part in self._parts(holder, "bias")]

    def _floats(self, part: WeightPart) -> np.ndarray:
        return self._numbers(part).reshape(-1)

    def _numbers(self, part: WeightPart) -> np.ndarray:
        """A part as float32 [n, ...], contiguous. Raises WeightError where its tensor holds NaN or infinities."""
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
        """Whether a part is taken as numbers, not as it is stored: quantising would hide a NaN, so what is quantised is read
        and checked."""
        return bool(
            part.transpose or part.shift or part.columns or (self.quantize and self.source.info(part.source).kind in FLOATS)
        )

    def _mapped(self, part: WeightPart) -> bool:
        return not self._read(part) and self.source.mapped(part.source)

    def _rows(self, part: WeightPart) -> tuple[np.ndarray, str, np.ndarray | None, bool]:
        """Rows [n, row bytes], their kind, the order to take them in (None: as they stand), whether they lie in a file."""
        kind = self.source.info(part.source).kind
        if self._read(part):
            return self._numbers(part).view(np.uint8), "F32", None, False
        rows = self.source.raw(part.source)
        if part.rows is not None:
            rows = rows[part.rows[0] : part.rows[1]]
        order = None if part.row_order is None else np.fromiter(part.row_order, np.int32)
        return rows, kind, order, self._mapped(part)

    def _pack(self, part: WeightPart, bias: np.ndarray | None, wide: bool = False, ids: np.ndarray | None = None) -> Any:
        rows, kind, order, mapped = self._rows(part)
        if ids is not None:
            order = (ids if order is None else order[ids]).astype(np.int32)
        n, k = part.shape[0] if ids is None else len(ids), math.prod(part.shape[1:])
        quantize = self._quantize(part, wide)
        tensor = self._packer.add(rows, kind, n, k, permutation=order, quantize=quantize, bias=bias, mapped=mapped)
        self._note(part, mapped=mapped)
        return tensor

    def _note(self, *parts: WeightPart, mapped: bool) -> None:
        """Remember what the packer got; rows of our own are not left to pile up."""
        self._packed.extend(parts)
        for part in parts:
            kind = self.source.info(part.source).kind
            if kind in ("F16", "F32"):
                self._rounded.add({"F16": "float16", "F32": "float32"}[kind])
        if not mapped:
            self.pack()
            for part in parts:
                self.source.release(part.source)
