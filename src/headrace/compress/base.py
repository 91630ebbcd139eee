"""Interface of compression methods: a layer of the model with the statistics of its inputs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import log10
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from headrace.data.config import LayerConfig
from headrace.models.layers import Allocator, Linear

HELD = 8  # every eighth text is held out: errors are also measured on these texts
# Parts of the texts: methods are fitted on the first, errors reported on the second, the damping of a cut chosen on the third.
FITTED, REPORTED, CHOSEN = range(3)


@dataclass(slots=True)
class Inputs:
    """Statistics of the inputs x [k] of a matrix. Sums are float32, in the order of the texts.

    hessian: mean of x xᵀ [k, k] over the calibration texts; held: the same over the held-out texts.
    mean, largest: mean and maximum of |x| [k] over the calibration texts. count, held_count: rows added.
    choice, choice_count: as held, over every second held-out text, which then is not in `held`; None if not measured.
    """

    hessian: Tensor
    held: Tensor
    mean: Tensor
    largest: Tensor
    count: int = 0
    held_count: int = 0
    choice: Tensor | None = None
    choice_count: int = 0

    @classmethod
    def empty(cls, k: int, choice: bool = False) -> "Inputs":
        inputs = cls(torch.zeros(k, k), torch.zeros(k, k), torch.zeros(k), torch.zeros(k))
        inputs.choice = torch.zeros(k, k) if choice else None
        return inputs

    def add(self, x: Tensor, part: int) -> None:
        """Add rows x [n, k] of texts of a part: FITTED, REPORTED or CHOSEN."""
        if part == CHOSEN and self.choice is not None:
            self.choice.addmm_(x.t(), x)
            self.choice_count += len(x)
            return
        if part != FITTED:
            self.held.addmm_(x.t(), x)
            self.held_count += len(x)
            return
        self.hessian.addmm_(x.t(), x)
        self.mean += x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.count += len(x)

    def finish(self) -> None:
        """Turn sums into means."""
        self.hessian /= max(self.count, 1)
        self.mean /= max(self.count, 1)
        self.held /= max(self.held_count, 1)
        if self.choice is not None:
            self.choice /= max(self.choice_count, 1)

    def scale(self, s: Tensor) -> None:
        """Change the statistics as if every input had been x / s. Exact, so that folding scales needs no second pass."""
        for moment in (self.hessian, self.held):
            moment /= s
            moment /= s[:, None]
        self.mean /= s
        self.largest /= s


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """A part of a matrix as rows of a kind (weights.kinds): uint8 [n, row bytes]."""

    kind: str
    rows: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputReport:
    """Errors of a matrix, or of a part of a fused one, after rounding.

    Output errors, relative to the mean square of the outputs:
    error: on the calibration texts. held: on the held-out texts, None without these.
    nearest, held_nearest: the same for rounding to nearest in the same kind, after the same pruning (SparseGPT: after Wanda).

    Sums over the weights: lost: squared errors. energy: squared weights. clipping: the part of `lost` of weights outside the
    range of their block or group. noise: S²/12 for steps S.

    dead: number of inputs that are always 0. damping: share of the mean of the Hessian's diagonal that was added to it; 0 for
    rounding to nearest. largest: max |x| of the inputs. seconds: of the computation; the first part of a fused matrix includes
    the Hessian's.
    """

    kind: str
    weights: int
    inputs: int
    error: float
    held: float | None
    nearest: float
    held_nearest: float | None
    lost: float
    energy: float
    clipping: float = 0.0
    noise: float = 0.0
    dead: int = 0
    damping: float = 0.0
    largest: float = 0.0
    seconds: float = 0.0

    def record(self) -> dict[str, Any]:
        """For JSON; adds the relative rounding error and the signal-to-noise ratio in dB (None: no error)."""
        energy = self.energy or 1.0
        return {
            **asdict(self),
            "rounding": (self.lost - self.clipping) / energy,
            "clipping": self.clipping / energy,
            "noise": self.noise / energy,
            "sqnr": 10 * log10(self.energy / self.lost) if self.lost and self.energy else None,
        }


@dataclass(slots=True)
class Matrix:
    """A linear layer, maybe fused.

    parts: views of linear.weight by name ("" if it is one). kinds: format of each part. coded: finished rows.
    """

    path: str
    linear: Linear
    parts: dict[str, Tensor]
    kinds: dict[str, str]
    inputs: Inputs
    coded: dict[str, QuantizedRows] = field(default_factory=dict)

    def target(self, part: str, field: str = "weight") -> str:
        """Name of a parameter part in plans: layers.3.qkv.q.weight."""
        return ".".join(filter(None, (self.path, part, field)))


@dataclass(frozen=True, slots=True)
class ScaleMapping:
    """Where per-channel scales may move: `producer` (a norm, or rows of a linear layer) is divided, `consumers` are multiplied.

    rule: "norm" (any scale), "gate" (rows of `up`), "value" (rows of v; a K/V head's scales serve all its query heads).
    """

    rule: str
    producer: str
    consumers: tuple[str, ...]


@dataclass(slots=True)
class Visit:
    """A layer with its weights in memory as float32; holders and matrices by their names in it ("attn_norm", "qkv").

    outputs: reports by target. notes: warnings for the user. extra: further results as JSON. cut: tensors by target that
    replace the layer's, maybe smaller. run: yields chunks of (rows in, rows out, part of the texts) for the current
    weights, first those of the calibration texts. measure: measures the inputs of some matrices again with the current weights.
    order: names of the matrices in the order of the layer's products.
    """

    number: int
    layer: LayerConfig
    holders: dict[str, Any]
    matrices: dict[str, Matrix]
    edges: tuple[ScaleMapping, ...]
    outputs: dict[str, OutputReport] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    cut: dict[str, Tensor] | None = None
    run: Callable[[], Iterator[tuple[Tensor, Tensor, int]]] = lambda: iter(())
    measure: Callable[[Sequence[str]], None] = lambda names: None
    order: tuple[str, ...] = ()

    def fold(self, edge: ScaleMapping, s: Tensor) -> None:
        """Move scales s [outputs of the producer] from the consumers' inputs into the producer; products stay unchanged.

        The consumers' input statistics become those of the folded model.
        """
        producer = self.holders[edge.producer]
        if edge.rule == "norm":
            producer.weight /= s
            if producer.bias is not None:
                producer.bias /= s
        else:
            part = "up" if edge.rule == "gate" else "v"
            self.matrices[edge.producer].parts[part] /= s[:, None]
            if producer.bias is not None:
                first = sum(rows for _, rows in producer.parts[: [name for name, _ in producer.parts].index(part)])
                producer.bias[first : first + len(s)] /= s
        s = self.columns(edge, s)
        for name in edge.consumers:
            matrix = self.matrices[name]
            matrix.linear.weight *= s
            matrix.inputs.scale(s)

    def columns(self, edge: ScaleMapping, s: Tensor) -> Tensor:
        """Scales of a producer's outputs as scales of the consumers' inputs."""
        if edge.rule != "value":
            return s
        return s.view(self.layer.kv_heads, -1).repeat_interleave(self.layer.heads // self.layer.kv_heads, 0).flatten()

    def shared(self, edge: ScaleMapping, values: Tensor) -> Tensor:
        """Values of the consumers' inputs [k], grouped by the scale that they share: [outputs of the producer, inputs]."""
        if edge.rule != "value":
            return values[:, None]
        share = self.layer.heads // self.layer.kv_heads
        return values.view(self.layer.kv_heads, share, -1).transpose(1, 2).reshape(-1, share)


class InputObserver:
    """LinearMethod that passes its inputs to `observe` and multiplies as usual. It is set on layers that are already filled.

    observe: receives the inputs [rows, k] of each multiplication.
    """

    def __init__(self, observe: Callable[[Tensor], None]) -> None:
        self._observe = observe

    def create(self, layer: Any, n_in: int, n_out: int, allocator: Allocator) -> None:
        raise AssertionError("set on filled layers only")

    def finish(self, layer: Any) -> None:
        raise AssertionError("set on filled layers only")

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        self._observe(x)
        return linear(x, layer.weight, bias)


class Compressor(Protocol):
    """A method: changes a visit's weights (float32, no autograd) and sets the rows that they are stored as."""

    def visit(self, visit: Visit) -> None: ...


def apply_methods(visit: Visit, steps: Sequence[Compressor]) -> None:
    """Run methods in order."""
    for step in steps:
        step.visit(visit)
