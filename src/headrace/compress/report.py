"""Report of a compression: plain values, and the JSON file next to OUT."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace.compress.base import OutputReport
from headrace.compress.healing import HealReport
from headrace.compress.judge import EmbeddingJudgement, Judgement
from headrace.compress.structure import CutReport
from headrace.data.config import ModelConfig
from headrace.kv.layout import kv_shape
from headrace.weights.describe import kv_bytes


def report_path(out: Path) -> Path:
    """Path of OUT's report. A file and a folder that differ only in their suffix have separate reports."""
    return out.with_name(f"{out.name}.report.json")


@dataclass(frozen=True, slots=True)
class MatrixReport:
    """A tensor as written: numbers, format and bytes.

    error: squared weight error over squared weights (0: copied; None: not written yet). zeros: share of zeros, if it was
    pruned.
    """

    weights: int
    kind: str
    nbytes: int
    error: float | None = None  # None: not written yet
    zeros: float | None = None


@dataclass(frozen=True, slots=True)
class KVReport:
    """Bytes of K and V of one token over all layers in the core: `bytes` in the format that OUT asks for (else bfloat16),
    `before` of the model read, in bfloat16.
    """

    format: str
    bytes: int
    before: int


def kv_report(before: ModelConfig, after: ModelConfig, format: str | None) -> KVReport:
    """K/V sizes of a model before and after compression; 0 for encoders. Raises ValueError as `kv_shape` does."""
    if before.encoder:
        return KVReport("bfloat16", 0, 0)

    def sizes(config: ModelConfig) -> dict[str, int]:
        layers, heads, head_dim = kv_shape(config)
        return kv_bytes(layers * heads, 2 * head_dim) or {}

    return KVReport(format or "bfloat16", sizes(after)[format or "float16"], sizes(before)["float16"])


@dataclass(slots=True)
class Report:
    """Result of one compression, or with `--dry-run` its estimate.

    largest: peak memory in bytes, besides the mapped model and the program itself.
    outputs: by parameter part ("layers.3.qkv.q.weight"), if texts were read. tokens: calibration tokens without held-out ones.
    passages: hashes of the calibration texts (texts.passage_hashes). cuts, healed, judged: reports of these steps.
    """

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
    judged: Judgement | EmbeddingJudgement | None = None
    passages: list[str] = field(default_factory=list)

    @property
    def weights(self) -> int:
        return sum(one.weights for one in self.matrices.values())

    @property
    def bits(self) -> float:
        """Bits a weight, with scales and without metadata."""
        return 8 * sum(one.nbytes for one in self.matrices.values()) / self.weights

    @property
    def error(self) -> float | None:
        """Squared error over squares, averaged over the rounded weights; None before writing."""
        if any(one.error is None for one in self.matrices.values()):
            return None
        rounded = [(one.error, one.weights) for one in self.matrices.values() if one.error]
        return sum(error * weights for error, weights in rounded) / max(sum(weights for _, weights in rounded), 1)

    @property
    def zeros(self) -> float | None:
        """Share of zeros among the weights of pruned matrices; None if nothing was pruned."""
        pruned = [(one.zeros, one.weights) for one in self.matrices.values() if one.zeros is not None]
        return sum(zeros * weights for zeros, weights in pruned) / sum(weights for _, weights in pruned) if pruned else None

    @property
    def kinds(self) -> dict[str, int]:
        """Number of tensors in each format."""
        return dict(Counter(one.kind for one in self.matrices.values()).most_common())

    def record(self) -> dict[str, Any]:
        """For JSON."""
        record: dict[str, Any] = {
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
            record |= {"tokens": self.tokens, "cuts": [asdict(cut) for cut in self.cuts]}
        if self.healed is not None:
            record["healed"] = asdict(self.healed)
        if self.outputs:
            record |= {"tokens": self.tokens, "outputs": {target: one.record() for target, one in self.outputs.items()}}
        if self.passages:
            record["passages"] = self.passages
        if self.judged is not None:
            record["judged"] = asdict(self.judged)
        return record
