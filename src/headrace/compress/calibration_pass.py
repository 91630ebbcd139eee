"""Calibration pass: run the methods that read texts over all layers, resume a stopped run, and read its results.

The pass also takes the mean of each layer's keys. The K/V pool stores keys less this mean, so rounding them loses less.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.compress.base import Compressor, OutputReport, Visit, apply_methods
from headrace.compress.budget import Ladder, Sensitivity
from headrace.compress.folding import AWQ, SmoothQuant
from headrace.compress.grids.spec import WITHOUT_GROUPS
from headrace.compress.healing import heal_bytes
from headrace.compress.layer_pass import LIBRARIES, LayerPass, TimeEstimate, layer_width, peak_bytes
from headrace.compress.least_squares import DAMPING
from headrace.compress.pipeline import SELF, Pipeline
from headrace.compress.rounding import Rounding
from headrace.compress.structure import pruned_config
from headrace.compress.texts import (
    WINDOW,
    Texts,
    check_apart,
    draw_texts,
    file_bytes,
    load_texts,
    passage_hashes,
    save_texts,
    writing_bytes,
)
from headrace.compress.work_folder import PLAN, TEXTS, VERSION, WorkFolder
from headrace.data.progress import Moving, Progress
from headrace.kv.layout import kv_shape
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.runner.last_use import by_softmax_alone
from headrace.runner.record import record
from headrace.runner.streamed import OneLayer, Streamed
from headrace.startup.opening import Opened
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kv_settings import KVSettings, kv_settings
from headrace.weights.source import WeightSource

# Calibration tokens for each input of the widest matrix: the default, and the limit below which a warning is given.
ENOUGH, FEW = 4, 2
TOKENS = 4096  # enough for stable means


@dataclass(slots=True)
class PassOutput:
    """Results of a finished pass, read from its work folder.

    kinds: kind of each rounded part, by target. folds: the other parameters of the layers have changed, too.
    tokens: calibration tokens.
    """

    work: WorkFolder
    kinds: dict[str, str]
    folds: bool
    outputs: dict[str, OutputReport]
    notes: list[str]
    tokens: int

    def changed(self, target: str) -> bool:
        """True if the pass has changed this parameter part."""
        return target in self.kinds or (self.folds and target.startswith("layers."))

    def rows(self, target: str) -> torch.Tensor:
        """A rounded part: uint8 [n, row bytes]."""
        return torch.from_numpy(self._tensor(target))

    def values(self, target: str) -> torch.Tensor:
        """A part as float32."""
        stored = self._tensor(target)
        if target in self.kinds:
            stored = dequantize_numpy(stored.reshape(-1), self.kinds[target]).reshape(len(stored), -1)
        return torch.from_numpy(stored)

    def importance(self, target: str) -> np.ndarray:
        """Mean squares of the inputs of a matrix, float32 [k], by the target of one of its parts ("layers.3.qkv.q.weight")."""
        return self._tensor(f"importance.{'.'.join(target.split('.')[:3])}", int(target.split(".")[1]))

    def _tensor(self, name: str, layer: int | None = None) -> np.ndarray:
        return self.work.tensor(int(name.split(".")[1]) if layer is None else layer, name)


def tokens_wanted(pipeline: Pipeline, width: int) -> int:
    return pipeline.tokens or ENOUGH * width


def reading_bytes(pipeline: Pipeline, opened: Opened, cut: bool = False) -> int:
    """Peak memory of reading texts in bytes: writing them, cuts, healing, key means and the pass.

    cut: the model is already cut and healed.
    """
    config = opened.config
    decoder, window, most = describe(config), min(WINDOW, config.max_position), 0
    read = pipeline.text_source if pipeline.reads or pipeline.kv is not None else None
    for text in filter(None, (read, pipeline.judge)):
        most = max(most, LIBRARIES + (writing_bytes(opened, window) if text == SELF else file_bytes(Path(text))))
    if pipeline.measures:
        wanted = tokens_wanted(pipeline, layer_width(decoder))
        rows = 4 * wanted * config.layers[0].q_size if pipeline.kv_heads else 0  # of `out`, before the cut
        most = max(most, rows + peak_bytes(config, decoder, wanted, window, bool(pipeline.cuts)))
    if pipeline.heal is not None and not cut:
        student = reduce(pruned_config, pipeline.cuts, config)
        most = max(most, LIBRARIES + heal_bytes(config, student, pipeline.prune_rounds is not None))
    return most if pipeline.kv is None else max(most, peak_bytes(config, decoder, TOKENS, window))


def too_few_tokens_warning(tokens: int, width: int) -> list[str]:
    """A warning if there are fewer than FEW tokens for each of `width` inputs."""
    if tokens >= FEW * width:
        return []
    return [
        f"{tokens:,} tokens are few to measure {width:,} inputs on: errors fall on them and not on other texts; "
        f"take {ENOUGH * width:,} or at least {FEW * width:,}"
    ]


def start_work(
    opened: Opened, pipeline: Pipeline, mix: str, folder: Path, judged: Texts, progress: Progress
) -> tuple[WorkFolder, Texts]:
    """Start or resume the work folder; returns it with the calibration texts, drawn if missing; none if nothing measures.

    judged: evaluation texts. Raises ValueError if one holds a calibration passage, and as WorkFolder and `draw_texts` do.
    """
    work = WorkFolder(folder)
    work.begin(plan_of(opened, pipeline, mix))
    if not pipeline.measures:
        return work, []
    if not (folder / TEXTS).is_file():
        wanted = tokens_wanted(pipeline, layer_width(describe(opened.config)))
        drawn = draw_texts(opened, pipeline.text_source, wanted, pipeline.seed, progress, WINDOW, pipeline.threads)
        check_apart(passage_hashes(drawn), judged)
        save_texts(work, TEXTS, drawn)
    texts = load_texts(work, TEXTS)
    check_apart(passage_hashes(texts), judged)
    return work, texts


def measure_kv(opened: Opened, pipeline: Pipeline, texts: Texts, progress: Progress) -> KVSettings | None:
    """K/V settings of OUT with the mean keys over `texts`, or over texts drawn for it if there are none; None without --kv."""
    if pipeline.kv is None:
        if (own := kv_settings(opened.source, opened.config)) is not None:
            progress.note(
                f"{opened.path.name} asks for K and V in {own.format}, and what is written does not; for that give --kv"
            )
        return None
    if not texts:
        texts = draw_texts(
            opened, pipeline.text_source, pipeline.tokens or TOKENS, pipeline.seed, progress, WINDOW, pipeline.threads
        )
    return KVSettings(pipeline.kv, mean_keys(opened.source, texts[: -(-TOKENS // len(texts[0]))], progress))


def sensitivities(
    opened: Opened, ladder: Ladder, work: WorkFolder, texts: Texts, progress: Progress, threads: int
) -> dict[str, dict[str, float]]:
    """Output error of each part of the layers' matrices in each format of a ladder, by target. Runs a pass of its own."""
    own_work = WorkFolder(work.folder / "kinds")
    own_work.begin(work.read(PLAN))
    run_pass(LayerPass(opened.source, texts, own_work, {}), [Sensitivity(ladder, threads)], own_work, progress, threads)
    errors: dict[str, dict[str, float]] = {}
    for number in range(opened.config.num_layers):
        errors |= own_work.about(number)["extra"]["errors"]
    return errors


def run_methods(
    opened: Opened, pipeline: Pipeline, kinds: Mapping[str, str], work: WorkFolder, texts: Texts, progress: Progress
) -> PassOutput:
    """Run the pipeline's methods, or resume them. kinds: by target. Raises ValueError as WorkFolder does."""
    threads = pipeline.thread_count
    folder_format = WITHOUT_GROUPS.get(pipeline.format)
    static = folder_format is not None and folder_format.static
    folds: dict[str, Compressor] = {
        "awq": AWQ(threads),
        "smoothquant": SmoothQuant(pipeline.migration, static=static, threads=threads),
    }
    steps = [folds[name] for name in pipeline.method if name in folds]
    damping = DAMPING if pipeline.damp is None else pipeline.damp
    gptq = "gptq" in pipeline.method
    steps.append(Rounding(gptq, pipeline.act_order, threads, pipeline.prunes, damping, pipeline.true_sequential))
    run_pass(LayerPass(opened.source, texts, work, kinds), steps, work, progress, threads)
    return read_pass(work, opened.config.num_layers, pipeline.folds)


def run_pass(walk: LayerPass, steps: Sequence[Compressor], work: WorkFolder, progress: Progress, threads: int) -> None:
    """Apply methods to every unfinished layer and report each. Torch uses `threads` threads meanwhile."""
    total, before = walk.model.config.num_layers, torch.get_num_threads()
    progress.start("layers", total, work.done, unit="layers")
    clock, last = TimeEstimate(total, work.done), ""
    torch.set_num_threads(threads)
    try:
        for visit in walk:
            if last:
                _report(progress, last, clock)
            apply_methods(visit, steps)
            last = _line(visit, total)
        if last:
            _report(progress, last, clock)
    finally:
        torch.set_num_threads(before)
        progress.finish()


def _report(progress: Progress, line: str, clock: TimeEstimate) -> None:
    taken, left = clock.tick()
    line = f"{line}  {taken:.0f} s, {left / 60:.0f} min left"
    progress.advance(1, line)
    if not isinstance(progress, Moving):
        progress.note(line)


def _line(visit: Visit, total: int) -> str:
    """Progress line of a layer: errors of its widest matrix."""
    if not visit.outputs:
        values = [f"{name} {value:.4f}" for name, value in visit.extra.items() if isinstance(value, float)]
        return f"{visit.number + 1}/{total} {', '.join(values)}".rstrip()
    target, report = max(visit.outputs.items(), key=lambda one: one[1].inputs)
    held = "" if report.held is None else f", held out {report.held:.4f}"
    name = target.removeprefix(f"layers.{visit.number}.").removesuffix(".weight")
    return f"{visit.number + 1}/{total} {name} K {report.inputs} error {report.error:.4f} (rtn {report.nearest:.4f}{held})"


def read_pass(work: WorkFolder, layers: int, folds: bool) -> PassOutput:
    """Results of a pass whose layers are all finished."""
    output = PassOutput(work, {}, folds, {}, [], 0)
    for number in range(layers):
        about = work.about(number)
        output.kinds |= about["kinds"]
        output.outputs |= {target: OutputReport(**one) for target, one in about["told"].items()}
        output.notes += about["notes"]
        output.tokens = about["tokens"]
    return output


def plan_of(opened: Opened, pipeline: Pipeline, mix: str) -> dict[str, Any]:
    """Settings that must be equal for a run to resume another."""
    calibrate = pipeline.text_source
    if calibrate != SELF:
        calibrate = f"{Path(calibrate).name} {_sha256([Path(calibrate)])}"
    return {
        "model": _sha256(_files(opened)),
        "method": ",".join(pipeline.method),
        "format": mix,
        "budget": "none" if pipeline.budget is None else f"{pipeline.budget:,} bytes",
        "head": pipeline.head or "as the format has it",
        "layout": pipeline.layout or "the usual one",
        "sparsity": pipeline.sparsity or "none",
        "cuts": ", ".join(map(str, pipeline.cuts)) or "none",
        "act-order": pipeline.act_order,
        "calibrate": calibrate,
        "tokens": pipeline.tokens or "auto",
        "seed": pipeline.seed,
        # The order of sums depends on it.
        "threads": pipeline.thread_count,
        "version": VERSION,
        **({} if pipeline.heal is None else {"heal": str(pipeline.heal)}),
        **({} if pipeline.damp is None else {"damp": pipeline.damp}),
        **({} if pipeline.alpha is None else {"alpha": pipeline.alpha}),
        **({"true-sequential": True} if pipeline.true_sequential else {}),
    }


def _files(opened: Opened) -> list[Path]:
    path = opened.path
    return [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.json")])


def _sha256(paths: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                digest.update(data)
    return digest.hexdigest()


class KeySums(OneLayer):
    """One-layer K/V pool that also sums the keys that layers store."""

    def __init__(self, model: Model, tokens: int, dtype: torch.dtype) -> None:
        super().__init__(model, tokens, dtype)
        layers, heads, head_dim = kv_shape(model.config)
        self.sums = torch.zeros(layers, heads, head_dim, dtype=torch.float64)
        self.counts = torch.zeros(layers, 1, 1, dtype=torch.float64)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self.sums[layer] += k.double().sum(0)
        self.counts[layer] += len(k)
        super().write(layer, slots, k, v)


def mean_keys(source: WeightSource, texts: Sequence[Sequence[int]], progress: Progress | None = None) -> np.ndarray:
    """Mean of each layer's keys after norm and rotary embedding: float32 [layers, KV heads * head size].

    0 for layers whose scores are used by more than softmax, which a constant would change. Computed layer by layer in float32.
    """
    pools: list[KeySums] = []

    def pool(model: Model, tokens: int, dtype: torch.dtype) -> OneLayer:
        pools.append(KeySums(model, tokens, dtype))
        return pools[-1]

    progress = progress or Progress()
    progress.start("the mean of keys", len(texts), unit="texts")
    streamed = Streamed(source, pool=pool)
    for _ in streamed.logits(texts, 1):
        progress.advance(1)
    progress.finish()
    (means,) = pools
    centre = means.sums / means.counts.clamp_min(1)
    for segment in record(streamed.model, embeds=False).layers:
        for node in segment.nodes:
            if node.op == "attention" and not by_softmax_alone(node):
                centre[node.settings["layer"]] = 0
    rows: np.ndarray = centre.flatten(1).float().numpy()
    return rows
