"""What a method of compression is, and what it is given: a layer of the model with what is known of its inputs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from math import log10
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headrace.data.config import LayerConfig
from headrace.models.layers.linear import Linear

HELD = 8  # every eighth text is kept out of what is measured, and every error is told on these texts, too


@dataclass(slots=True)
class Inputs:
    """What the inputs [k] of a matrix are like: Σ x xᵀ / n [k, k] over the texts measured, the same over those held out, and
    the mean and the largest |x| [k] of the former. Sums are float32, in the order of the texts."""

    hessian: Tensor
    held: Tensor
    mean: Tensor
    largest: Tensor
    count: int = 0
    held_count: int = 0

    @classmethod
    def empty(cls, k: int) -> "Inputs":
        return cls(torch.zeros(k, k), torch.zeros(k, k), torch.zeros(k), torch.zeros(k))

    def add(self, x: Tensor, held: bool) -> None:
        """Rows x [n, k]."""
        if held:
            self.held.addmm_(x.t(), x)
            self.held_count += len(x)
            return
        self.hessian.addmm_(x.t(), x)
        self.mean += x.abs().sum(0)
        self.largest = torch.maximum(self.largest, x.abs().amax(0))
        self.count += len(x)

    def finish(self) -> None:
        """Sums become means."""
        self.hessian /= max(self.count, 1)
        self.mean /= max(self.count, 1)
        self.held /= max(self.held_count, 1)

    def scale(self, s: Tensor) -> None:
        """As if every input had been x / s: exact, so that a fold needs no second pass."""
        for moment in (self.hessian, self.held):
            moment /= s
            moment /= s[:, None]
        self.mean /= s
        self.largest /= s


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Rows of a kind of weights.kinds that a part of a matrix is stored as: uint8 [n, row bytes]."""

    kind: str
    rows: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputReport:
    """What is said of a matrix (a part of a fused one) after it was rounded. Errors are of its outputs, over the mean square
    of these: `error` on the texts measured, `held` on those held out (None: there were none), `nearest` and `held_nearest` for
    rounding to nearest in the same kind what is not left out (of SparseGPT what Wanda leaves). `lost` and `energy` are sums of
    squares: of the weights' own error and of the weights; `clipping` is the part of the former that lies outside the range of
    blocks or groups, `noise` what errors spread evenly over their steps S add up to, S²/12. `dead` inputs were always 0;
    `damping` 0: rounded to nearest. `largest`: of the inputs on the texts measured, in size. `seconds`: of a fused matrix the
    first part has those of its moments."""

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
        """For JSON: also the weights' error in parts, over their mean square, and both as a ratio in dB (None: no error)."""
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
    """A fused matrix: `parts` are views of linear.weight by name ("" where there is one), `kinds` what each is to be stored as,
    `coded` what has been decided."""

    path: str
    linear: Linear
    parts: dict[str, Tensor]
    kinds: dict[str, str]
    inputs: Inputs
    coded: dict[str, QuantizedRows] = field(default_factory=dict)

    def target(self, part: str, field: str = "weight") -> str:
        """The parameter's part, as plans call it: layers.3.qkv.q.weight."""
        return ".".join(filter(None, (self.path, part, field)))


@dataclass(frozen=True, slots=True)
class ScaleMapping:
    """Where scales may go from a matrix's inputs: `producer` (a norm, or part of a linear) divided, `consumers` multiplied.

    `rule`: "norm" (any scale), "gate" (rows of `up`), "value" (rows of v; a K/V head's scales serve all its queries).
    """

    rule: str
    producer: str
    consumers: tuple[str, ...]


@dataclass(slots=True)
class Visit:
    """A layer, with its weights in memory as float32: holders and matrices by their names in it ("attn_norm", "qkv")."""

    number: int
    layer: LayerConfig
    holders: dict[str, Any]
    matrices: dict[str, Matrix]
    edges: tuple[ScaleMapping, ...]
    outputs: dict[str, OutputReport] = field(default_factory=dict)  # by target
    notes: list[str] = field(default_factory=list)  # what went other than it should
    extra: dict[str, Any] = field(default_factory=dict)  # what else is kept of it, as JSON has it
    cut: dict[str, Tensor] | None = None  # by target what is kept in place of the layer as it stands; its shapes may be smaller
    run: Callable[[], Iterator[tuple[Tensor, Tensor, bool]]] = lambda: iter(())  # chunks: rows in, rows out, whether held out

    def fold(self, edge: ScaleMapping, s: Tensor) -> None:
        """Scales s [outputs of the producer] go from the consumers' inputs into the producer, and products stay what they were.

        Inputs of the consumers are from then on those of the folded model.
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
        """Scales of a producer's outputs as those of the consumers' inputs."""
        if edge.rule != "value":
            return s
        return s.view(self.layer.kv_heads, -1).repeat_interleave(self.layer.heads // self.layer.kv_heads, 0).flatten()

    def shared(self, edge: ScaleMapping, values: Tensor) -> Tensor:
        """Values of the consumers' inputs [k] by what has one scale: [outputs of the producer, inputs that share it]."""
        if edge.rule != "value":
            return values[:, None]
        share = self.layer.heads // self.layer.kv_heads
        return values.view(self.layer.kv_heads, share, -1).transpose(1, 2).reshape(-1, share)


class Compressor(Protocol):
    """A method: changes a visit's weights, which are float32 and know no autograd, and says what they are stored as."""

    def visit(self, visit: Visit) -> None: ...


def apply_methods(visit: Visit, steps: Sequence[Compressor]) -> None:
    """Carry methods out, one after the other."""
    for step in steps:
        step.visit(visit)
