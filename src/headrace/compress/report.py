"""What compress did: plain values, and the JSON file next to OUT."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.compress.base import OutputReport
from headrace.compress.healing import HealReport
from headrace.compress.judge import Judgement
from headrace.compress.structure import CutReport
from headrace.data.config import ModelConfig
from headrace.kv.layout import kv_shape
from headrace.weights.describe import kv_bytes


def report_path(out: Path) -> Path:
    """Where the report of OUT lies: beside it. A file and a folder that differ by their ending alone have one each."""
    return out.with_name(f"{out.name}.report.json")


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """What became of a tensor: its numbers, kind and bytes; mean square error over mean square (0 where it was copied), and,
    where it was pruned, the share of its numbers that are 0."""

    weights: int
    kind: str
    nbytes: int
    error: float | None = None  # None: not written yet
    zeros: float | None = None


@dataclass(frozen=True, slots=True)
class KVReport:
    """K and V of a token, in all layers, as the core keeps them: `bytes` in the `format` that OUT asks for (bfloat16 where it
    asks for none), and `before` those of the model read, in bfloat16."""

    format: str
    bytes: int
    before: int


def kv_report(before: ModelConfig, after: ModelConfig, format: str | None) -> KVReport:
    """Of a model and what is made of it. Raises ValueError as `kv_shape` does."""

    def sizes(config: ModelConfig) -> dict[str, int]:
        layers, heads, head_dim = kv_shape(config)
        return kv_bytes(layers * heads, 2 * head_dim) or {}

    return KVReport(format or "bfloat16", sizes(after)[format or "float16"], sizes(before)["float16"])


@dataclass(slots=True)
class Report:
    """What was written, or will be. `largest`: bytes in memory besides the mapped model and the program itself, at the most.

    `cuts`: what became smaller; `healed`: what training it again came to. `told` by part of a matrix ("layers.3.qkv.q.weight"),
    where texts were read; `tokens` measured on, and those held out; `passages`: hashes of what these texts are
    (texts.passages)."""

    bytes: int
    matrices: dict[str, MatrixReport]
    warnings: list[str]
    largest: int
    kv: KVReport
    seconds: float = 0.0
    tokens: int = 0
    outputs: dict[str, OutputReport] = field(default_factory=dict)
    cuts: list[CutReport] = field(default_factory=list)
    healed: HealReport | None = None
    judged: Judgement | None = None
    passages: list[str] = field(default_factory=list)

    @property
    def weights(self) -> int:
        return sum(one.weights for one in self.matrices.values())

    @property
    def bits(self) -> float:
        """Bits a weight, scales included, without metadata."""
        return 8 * sum(one.nbytes for one in self.matrices.values()) / self.weights

    @property
    def error(self) -> float | None:
        """Square error over squares, a mean over the weights that were rounded; None before that."""
        if any(one.error is None for one in self.matrices.values()):
            return None
        rounded = [(one.error, one.weights) for one in self.matrices.values() if one.error]
        return sum(error * weights for error, weights in rounded) / max(sum(weights for _, weights in rounded), 1)

    @property
    def zeros(self) -> float | None:
        """The share of zeros among the weights of pruned matrices; None where there are none."""
        cut = [(one.zeros, one.weights) for one in self.matrices.values() if one.zeros is not None]
        return sum(zeros * weights for zeros, weights in cut) / sum(weights for _, weights in cut) if cut else None

    @property
    def kinds(self) -> dict[str, int]:
        """Tensors of each kind."""
        return dict(Counter(one.kind for one in self.matrices.values()).most_common())

    def record(self) -> dict[str, Any]:
        """For JSON."""
        made: dict[str, Any] = {
            "bytes": self.bytes,
            "weights": self.weights,
            "bits": self.bits,
            "kinds": self.kinds,
            "warnings": self.warnings,
            "memory": self.largest,
            "kv": asdict(self.kv),
            "error": self.error,
            "zeros": self.zeros,
            "seconds": round(self.seconds, 3),
            "matrices": {
                name: {"kind": one.kind, "bytes": one.nbytes, "error": one.error, "zeros": one.zeros}
                for name, one in self.matrices.items()
            },
        }
        if self.cuts:
            made |= {"tokens": self.tokens, "cuts": [asdict(cut) for cut in self.cuts]}
        if self.healed is not None:
            made["healed"] = asdict(self.healed)
        if self.outputs:
            made |= {"tokens": self.tokens, "outputs": {target: one.record() for target, one in self.outputs.items()}}
        if self.passages:
            made["passages"] = self.passages
        if self.judged is not None:
            made["judged"] = asdict(self.judged)
        return made
