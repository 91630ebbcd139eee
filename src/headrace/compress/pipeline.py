"""Settings of one compress command, and their checks before a model is opened. Needs no torch.

The order of methods is: cut, heal, fold scales, prune, round. Each works on the result of the ones before it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from headrace import core
from headrace.compress.grids.keep import GLOBAL, Sparsity
from headrace.compress.pruning import PRUNES, SPARSEGPT, PruningSchedule, parse_pruning
from headrace.compress.structure import HEADS, KV_HEADS, LAYERS, NEURONS, STRUCTURES, Cut, parse_cuts
from headrace.weights.kinds import FLOATS
from headrace.weights.kv_settings import FORMATS

SELF = "self"  # texts that the model writes itself
ALPHA, AUTO = 0.8, "auto"  # of SmoothQuant: the default, and a choice in each layer
RATE = 1e-4  # default peak learning rate of heal
LAYOUTS = ("compressed", "gptq", "awq", "2:4")  # of folders; the first is the default
HEAL = "heal"
FOLDS = ("awq", "smoothquant")
WEIGHTED = "weighted"  # to nearest, with scales searched by importance
ROUNDS = ("rtn", WEIGHTED, "gptq")
STAGES = (STRUCTURES, (HEAL,), FOLDS, PRUNES, ROUNDS)  # in order: any number of the first, at most one of each other
METHODS = (*ROUNDS, *FOLDS, *PRUNES, *STRUCTURES, HEAL)
READ = (WEIGHTED, "gptq", *FOLDS, SPARSEGPT)  # methods that read texts
EXAMPLES = "awq,gptq or neurons,heal,wanda,gptq"


@dataclass(frozen=True, slots=True)
class Heal:
    """Training of a cut model: `steps` of healing.BATCH texts; `rate` is the peak learning rate.

    pruning: rounds of pruning by magnitude during the training, if any.
    """

    steps: int
    rate: float
    seed: int
    threads: int
    pruning: PruningSchedule | None = None

    def __str__(self) -> str:
        rounds = "" if self.pruning is None else f", pruned in {self.pruning.rounds} rounds"
        return f"{self.steps} steps at {self.rate:g}{rounds}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Settings of one compression: methods, formats and cuts.

    method: names of recipe.METHODS in order; without a rounding method, rounding to nearest. format: a mix of GGUF
    (mixes.MIXES), or integers of a folder (grids.spec.integers_named). layout: scheme of a folder, one of LAYOUTS; None: 2:4
    if pruned to 2:4 and in groups of 32, otherwise the first. head: format of the output projection alone. imatrix: importance
    file for rtn. budget: bytes of all tensors; formats are then chosen matrix by matrix, starting from `format`. sparsity: as
    grids.keep.parse_sparsity reads it. keep_neurons, keep_heads (shares), drop_layers, kv_heads (counts): numbers of the
    methods that cut; pool: how K/V heads are merged. heal_steps, heal_rate: length and peak learning rate of the training after
    cuts. prune_rounds: rounds in which magnitude prunes during that training (training.gradual); None: once, after it.

    calibrate: a text file, or "self" (the model writes them); None: "self" for methods that read texts. If texts are named and
    there are neither cuts nor training, rtn searches scales by importance, as `weighted` does. tokens: calibration tokens;
    None: four for each input of the widest matrix. act_order: GPTQ takes important columns first. damp: share of the Hessian's
    mean diagonal that GPTQ and SparseGPT add to it (None: least_squares.DAMPING). true_sequential: they measure the inputs of a
    matrix with the matrices before it rounded. alpha: of SmoothQuant, a number or "auto" (chosen in each layer). judge: a text
    file, "self", or None. write_imatrix: file for the measured importance. kv: K/V format that OUT asks for
    (weights.kv_settings.FORMATS), with key means over the same texts.
    keep_work: the work folder stays after the run. threads: 0: one for each core.
    """

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
    prune_rounds: int | None = None
    layout: str | None = None
    head: str | None = None
    imatrix: Path | None = None
    budget: int | None = None
    calibrate: str | None = None
    tokens: int | None = None
    act_order: bool = True
    damp: float | None = None
    true_sequential: bool = False
    alpha: str | None = None
    judge: str | None = None
    write_imatrix: Path | None = None
    seed: int = 0
    kv: str | None = None
    keep_work: bool = False
    threads: int = 0

    @property
    def thread_count(self) -> int:
        """CPU threads: as given, otherwise one for each core that this process may use."""
        return self.threads or core.processors()

    @property
    def text_source(self) -> str:
        """Where calibration texts come from: a file, or "self"."""
        return self.calibrate or SELF

    @property
    def migration(self) -> float | None:
        """SmoothQuant's alpha, 0 to 1; None: chosen in each layer. Raises ValueError if it is out of range."""
        if self.alpha == AUTO:
            return None
        try:
            alpha = ALPHA if self.alpha is None else float(self.alpha)
        except ValueError:
            alpha = -1.0
        if not 0 <= alpha <= 1:
            raise ValueError(f"--alpha {self.alpha}: give a number from 0 to 1, or {AUTO}")
        return alpha

    @property
    def folds(self) -> bool:
        """True if scales are folded into norms and matrices of the layers."""
        return any(name in FOLDS for name in self.method)

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Cuts, which come first. Raises ValueError as structure.parse_cuts does."""
        numbers = {NEURONS: self.keep_neurons, HEADS: self.keep_heads, LAYERS: self.drop_layers, KV_HEADS: self.kv_heads}
        return parse_cuts(self.method, numbers, self.pool)

    @property
    def heal(self) -> Heal | None:
        """Training after the cuts, or None. Raises ValueError if the method, its steps and rate do not go together, or a number
        is out of range."""
        if (HEAL in self.method) != (self.heal_steps is not None):
            raise ValueError(f"the method {HEAL} and its steps go together: --method neurons,{HEAL},gptq --heal-steps 200")
        if self.heal_steps is None:
            if self.heal_rate is not None:
                raise ValueError(f"--heal-rate needs the method {HEAL}")
            return None
        rate = RATE if self.heal_rate is None else self.heal_rate
        if self.heal_steps < 1 or not 0 < rate < 1:
            raise ValueError("--heal-steps is 1 or more, and --heal-rate between 0 and 1")
        pruning = None
        if self.prune_rounds is not None and self.prunes is not None:
            pruning = PruningSchedule(self.prunes[1], self.prune_rounds)
        return Heal(self.heal_steps, rate, self.seed, self.thread_count, pruning)

    @property
    def reads(self) -> bool:
        """True if texts are read: by a cut, by a training, or after all cuts (`walks`)."""
        return self.measures or HEAL in self.method

    @property
    def measures(self) -> bool:
        """True if inputs are measured on calibration texts: by a cut, or after all cuts (`walks`)."""
        return self.walks or bool(self.cuts)

    @property
    def walks(self) -> bool:
        """True if a layer pass reads texts after all cuts: for a method, the importance file or the budget."""
        reads = bool(set(self.method) & set(READ)) or ("wanda" in self.method and self.imatrix is None)
        trains = bool(self.cuts) or HEAL in self.method
        weighted = self.calibrate is not None and not trains and self.format.upper() not in FLOATS
        return reads or weighted or self.write_imatrix is not None or self.budget is not None

    @property
    def prunes(self) -> tuple[str, Sparsity] | None:
        """Pruning method and sparsity, or None. Raises ValueError as pruning.parse_pruning does."""
        return parse_pruning(self.method, self.sparsity)

    def check(self) -> None:
        """Raise ValueError for unknown methods, and for settings that cannot be combined."""
        check_known(self.method)
        check_order(self.method, self.prune_rounds is not None)
        self._check_rounds()
        if self.kv is not None and self.kv not in FORMATS:
            raise ValueError(f"K and V are kept as {' or '.join(FORMATS)}, not {self.kv!r}")
        cuts, prunes, _ = self.cuts, self.prunes, self.heal
        if prunes and prunes[1].per == GLOBAL and (prunes[0] != "magnitude" or self.walks):
            raise ValueError(
                f"--sparsity {self.sparsity} needs the method magnitude, without texts; use layer:{prunes[1].share:g}"
            )
        if self.layout is not None and self.layout not in LAYOUTS:
            raise ValueError(f"unknown layout {self.layout!r}; known are {', '.join(LAYOUTS)}")
        self._check_options()
        if self.imatrix is not None and (cuts or replace(self, calibrate=None).walks):
            raise ValueError(f"--imatrix is for rtn alone; {','.join(self.method)} measures importance itself: leave it out")
        if self.imatrix is not None and self.calibrate is not None:
            raise ValueError("--imatrix and --calibrate both give the importance of inputs; leave one out")
        if prunes and self.budget is not None:
            raise ValueError("--budget may choose kinds in which 0 does not stay 0; leave it out, or --sparsity")

    def _check_rounds(self) -> None:
        """Raise ValueError for rounds of pruning without training or magnitude, or more of them than half of the steps."""
        rounds = self.prune_rounds
        if rounds is None:
            return
        if HEAL not in self.method:
            raise ValueError(
                f"--prune-rounds {rounds}: without training between them rounds remove the weights that one round removes; "
                f"train with --method {HEAL},magnitude --heal-steps 200, or leave it out"
            )
        if "magnitude" not in self.method:
            raise ValueError(f"--prune-rounds {rounds} needs the method magnitude, as in --method {HEAL},magnitude")
        most = rounds if self.heal_steps is None else max(1, self.heal_steps // 2)
        if not 1 <= rounds <= most:
            raise ValueError(f"--prune-rounds {rounds}: give 1 to {most}, half of the steps of --heal-steps")

    def _check_options(self) -> None:
        """Raise ValueError for options without their method, or out of range."""
        if not {"gptq", SPARSEGPT} & set(self.method) and (self.damp is not None or self.true_sequential):
            raise ValueError(f"{'--true-sequential' if self.true_sequential else '--damp'} needs the method gptq or sparsegpt")
        if self.damp is not None and not 0 < self.damp < 1:
            raise ValueError(f"--damp {self.damp:g}: give a share between 0 and 1, such as 0.01")
        if self.alpha is not None and "smoothquant" not in self.method:
            raise ValueError("--alpha needs the method smoothquant")
        _ = self.migration

    @property
    def warnings(self) -> list[str]:
        """Settings that make the result look better than it is."""
        texts = [name for name in (self.calibrate, self.judge) if name is not None and name != SELF]
        if self.reads and len(texts) == 2 and Path(texts[0]).resolve() == Path(texts[1]).resolve():
            return [
                f"--judge {self.judge} is the file of --calibrate: other passages of it are judged, but they resemble those "
                "measured on, so the loss looks smaller than on other text; judge on another file"
            ]
        return []

    def check_files(self, out: Path, model: Path) -> None:
        """Raise ValueError if the importance file would replace the model or OUT."""
        if (name := self.write_imatrix) is not None and name.resolve() in (out.resolve(), model.resolve()):
            raise ValueError(f"--write-imatrix {name} would replace that file; give another name")


def check_known(methods: Sequence[str]) -> None:
    """Raise ValueError for unknown methods."""
    if unknown := [name for name in methods if name not in METHODS]:
        raise ValueError(f"unknown method {unknown[0]!r}; known are {', '.join(METHODS)}")
    if not methods:
        raise ValueError(f"no method is named; known are {', '.join(METHODS)}")


def check_order(methods: Sequence[str], in_rounds: bool = False) -> None:
    """Raise ValueError for methods that cannot follow one another. in_rounds: the training prunes, so it needs no cut."""
    reasons = (_why_not(before, after) for before, after in pairwise(methods))
    alone = f"{HEAL} trains what a cut has left" if methods[0] == HEAL and not in_rounds else ""
    if alone and "magnitude" in methods:
        alone += ", or prunes in rounds (--prune-rounds)"
    if why := next(filter(None, (*reasons, alone)), ""):
        raise ValueError(f"{','.join(methods)} cannot be: {why}; {_instead(methods)}")


def _why_not(before: str, after: str) -> str:
    """Why `after` may not follow `before`; empty if it may."""
    first, then = (next(at for at, stage in enumerate(STAGES) if name in stage) for name in (before, after))
    if after in STRUCTURES and first > then:
        return f"{after} makes matrices smaller before they change"
    if after == HEAL and first >= then:
        return "a model is healed once" if before == HEAL else f"{HEAL} trains before inputs are scaled and weights rounded"
    if after in FOLDS and first >= then:
        if before in PRUNES:
            return f"{after} scales before weights are left out"
        return f"{after} scales what is neither scaled nor rounded yet"
    if after in PRUNES and first >= then:
        if before in PRUNES:
            return "weights are left out once"
        return "weights are left out before others are rounded, by rtn or gptq; sparsegpt does both"
    if after in ROUNDS and before == SPARSEGPT:
        return "weights are left out before others are rounded, by rtn or gptq; sparsegpt does both"
    if after in ROUNDS and first >= then:
        return "what is rounded is not rounded again"
    return ""


def _instead(methods: Sequence[str]) -> str:
    """Advice: the same methods in the order of the stages, if that is valid."""
    kept = [name for name in methods if not (name in ROUNDS and SPARSEGPT in methods)]
    order = sorted(kept, key=lambda name: next(at for at, stage in enumerate(STAGES) if name in stage))
    right = order[0] != HEAL and not any(_why_not(*pair) for pair in pairwise(order))
    return f"use {','.join(order)}" if right else f"take one of each kind, as in {EXAMPLES}"
