"""What is asked for, and what was done: plain values."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headrace import native
from headrace.compress.base import OutputReport
from headrace.compress.healing import RATE, Heal, HealReport
from headrace.compress.judge import Judgement
from headrace.compress.pruning import pruning
from headrace.compress.recipe import FOLDS, HEAL, READ, check_known, check_order
from headrace.compress.structure import HEADS, KV_HEADS, LAYERS, NEURONS, Cut, CutReport, cuts_of
from headrace.compress.texts import SELF
from headrace.data.config import ModelConfig
from headrace.kv.layout import kv_shape
from headrace.quant.keep import Sparsity
from headrace.weights.describe import kv_bytes
from headrace.weights.kv_settings import FORMATS

LAYOUTS = ("compressed", "gptq", "awq", "2:4")  # of folders; the first is that of most


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What is done to a model. `method`: some of recipe.METHODS in order (where none rounds: to nearest). `format`: a name
    of mixes.MIXES; of a folder integers (quant.targets.integers_named), stored in a `layout`: one of LAYOUTS, None: 2:4 where
    that is pruned and rounded in groups of 32, else the first. `head`: a kind (of a folder: integers) for the output projection
    alone. `imatrix`: a file of importances, for rtn. `budget`: bytes of all tensors; kinds are then chosen matrix by matrix,
    and `format` is where the choice begins. `sparsity`: what methods that prune make 0, as quant.keep.parse_sparsity reads it.
    `keep_neurons`, `keep_heads` (shares), `drop_layers` and `kv_heads` (counts) are the numbers of the methods that cut, which
    come before all others; `pool` says how K/V heads become one. `heal_steps`: how long what they left is trained, `heal_rate`:
    the highest rate of learning.

    `calibrate`: a file of text, or "self"; `tokens` of it (None: four for each input of the widest matrix). `act_order`: the
    column loop takes important columns first. `judge`: a file of text, "self", or None. `write_imatrix`: where the importance
    that was measured goes. `kv`: what the result asks for as format of K and V (weights.kv_settings.FORMATS), with the mean of
    keys on the same texts. `threads` 0: as many as there are cores for this process."""

    method: tuple[str, ...] = ("rtn",)
    format: str = "Q4_K_M"
    sparsity: str | None = None
    keep_neurons: float | None = None
    keep_heads: float | None = None
    drop_layers: int | None = None
    kv_heads: int | None = None
    pool: str | None = None
    heal_steps: int | None = None
    heal_rate: float | None = None
    layout: str | None = None
    head: str | None = None
    imatrix: Path | None = None
    budget: int | None = None
    calibrate: str = SELF
    tokens: int | None = None
    act_order: bool = True
    judge: str | None = None
    write_imatrix: Path | None = None
    seed: int = 0
    kv: str | None = None
    keep_work: bool = False
    threads: int = 0

    @property
    def folds(self) -> bool:
        """Whether norms and matrices of the layers are scaled."""
        return any(name in FOLDS for name in self.method)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """What is made smaller before all else. Raises ValueError as structure.cuts_of does."""
        numbers = {NEURONS: self.keep_neurons, HEADS: self.keep_heads, LAYERS: self.drop_layers, KV_HEADS: self.kv_heads}
        return cuts_of(self.method, numbers, self.pool)

    @property
    def heal(self) -> Heal | None:
        """How what the cuts left is trained; None: it is not. Raises ValueError where the steps are missing, or the method."""
        if (HEAL in self.method) != (self.heal_steps is not None):
            raise ValueError(f"the method {HEAL} and its steps go together: --method neurons,{HEAL},gptq --heal-steps 200")
        if self.heal_steps is None:
            if self.heal_rate is not None:
                raise ValueError(f"--heal-rate needs the method {HEAL}")
            return None
        rate = RATE if self.heal_rate is None else self.heal_rate
        if self.heal_steps < 1 or not 0 < rate < 1:
            raise ValueError("--heal-steps is 1 or more, and --heal-rate between 0 and 1")
        return Heal(self.heal_steps, rate, self.seed, self.threads or native.processors())

    @property
    def reads(self) -> bool:
        """Whether texts are read."""
        return self.walks or bool(self.cuts)

    @property
    def walks(self) -> bool:
        """Whether texts are read after all cuts."""
        reads = bool(set(self.method) & set(READ)) or ("wanda" in self.method and self.imatrix is None)
        return reads or self.write_imatrix is not None or self.budget is not None

    @property
    def prunes(self) -> tuple[str, Sparsity] | None:
        """The method that prunes and what is to go; None where nothing is pruned. Raises ValueError as pruning.pruning does."""
        return pruning(self.method, self.sparsity)

    def check(self) -> None:
        """Raise ValueError for methods that are not known or cannot follow one another."""
        check_known(self.method)
        check_order(self.method)
        if self.kv is not None and self.kv not in FORMATS:
            raise ValueError(f"K and V are kept as {' or '.join(FORMATS)}, not {self.kv!r}")
        cuts, prunes, _ = self.cuts, self.prunes, self.heal
        if self.layout is not None and self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout {self.layout!r}; known are {', '.join(LAYOUTS)}")
        if self.imatrix is not None and (cuts or self.walks):
            raise ValueError(f"--imatrix is for rtn alone; {','.join(self.method)} measures importance itself: leave it out")
        if prunes and self.budget is not None:
            raise ValueError("--budget may choose kinds in which 0 does not stay 0; leave it out, or --sparsity")

    def check_files(self, out: Path, model: Path) -> None:
        """Raise ValueError where the importance would be written over what is read, or over OUT."""
        if (name := self.write_imatrix) is not None and name.resolve() in (out.resolve(), model.resolve()):
            raise ValueError(f"--write-imatrix {name} would replace that file; give another name")


def report_path(out: Path) -> Path:
    """Where the report of OUT lies: beside it. A file and a folder that differ by their ending alone have one each."""
    return out.with_name(f"{out.name}.report.json")


@dataclass(frozen=True, slots=True)
class Matrix:
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
    matrices: dict[str, Matrix]
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
