"""Methods that read texts: they are carried out on a walk through the model, and what it leaves is taken from its work."""

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
from headrace.compress.healing import heal_bytes
from headrace.compress.layer_pass import LIBRARIES, LayerPass, TimeEstimate, layer_width, peak_bytes
from headrace.compress.mean_keys import TOKENS, mean_keys
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
from headrace.data.progress import Progress
from headrace.data.progress_bar import Moving
from headrace.kv.layout import kv_shape
from headrace.models.registry import describe
from headrace.startup.opening import Opened
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kv_settings import KVSettings, kv_settings

ENOUGH, FEW = 4, 2  # tokens for each input of the widest matrix: what is taken, and below what it is said


@dataclass(slots=True)
class PassOutput:
    """What a walk left: rows of a kind, or float32, for each part of the layers' parameters."""

    work: WorkFolder
    kinds: dict[str, str]  # of what is coded, by target
    folds: bool  # whether other parameters of the layers changed, too
    outputs: dict[str, OutputReport]
    notes: list[str]
    tokens: int

    def changed(self, target: str) -> bool:
        return target in self.kinds or (self.folds and target.startswith("layers."))

    def rows(self, target: str) -> torch.Tensor:
        """uint8 [n, row bytes] of a part that is coded."""
        return torch.from_numpy(self._tensor(target))

    def values(self, target: str) -> torch.Tensor:
        """float32."""
        found = self._tensor(target)
        if target in self.kinds:
            found = dequantize_numpy(found.reshape(-1), self.kinds[target]).reshape(len(found), -1)
        return torch.from_numpy(found)

    def importance(self, target: str) -> np.ndarray:
        """The mean squares of the inputs of a matrix, float32 [k], by a target of a part ("layers.3.qkv.q.weight")."""
        return self._tensor(f"importance.{'.'.join(target.split('.')[:3])}", int(target.split(".")[1]))

    def _tensor(self, name: str, layer: int | None = None) -> np.ndarray:
        return self.work.tensor(int(name.split(".")[1]) if layer is None else layer, name)


def tokens_wanted(pipeline: Pipeline, width: int) -> int:
    return pipeline.tokens or ENOUGH * width


def reading_bytes(pipeline: Pipeline, opened: Opened, cut: bool = False) -> int:
    """The most that reading texts takes in memory, cuts, healing and the mean of keys included, and the model that writes them;
    `cut`: what is left to do once the model is cut and healed."""
    config = opened.config
    decoder, window, most = describe(config), min(WINDOW, config.max_position), 0
    read = pipeline.calibrate if pipeline.reads or pipeline.kv is not None else None
    for text in filter(None, (read, pipeline.judge)):
        most = max(most, LIBRARIES + (writing_bytes(opened, window) if text == SELF else file_bytes(Path(text))))
    if pipeline.reads:
        wanted = tokens_wanted(pipeline, layer_width(decoder))
        rows = 4 * wanted * config.layers[0].q_size if pipeline.kv_heads else 0  # of `out`, before the cut
        most = max(most, rows + peak_bytes(config, decoder, wanted, window))
    if pipeline.heal is not None and not cut:
        most = max(most, LIBRARIES + heal_bytes(config, reduce(pruned_config, pipeline.cuts, config)))
    return most if pipeline.kv is None else max(most, peak_bytes(config, decoder, TOKENS, window))


def too_few_tokens_warning(tokens: int, width: int) -> list[str]:
    """What is said of too few texts."""
    if tokens >= FEW * width:
        return []
    return [
        f"{tokens:,} tokens are few to measure {width:,} inputs on: errors fall on them and not on other texts; "
        f"take {ENOUGH * width:,} or at least {FEW * width:,}"
    ]


def start_work(
    opened: Opened, pipeline: Pipeline, mix: str, folder: Path, judged: Texts, tell: Progress
) -> tuple[WorkFolder, Texts]:
    """The work of a pass, and the texts to measure on, made where they are not there yet; other texts than `judged`.

    Raises ValueError as Work and texts do.
    """
    work = WorkFolder(folder)
    work.begin(plan_of(opened, pipeline, mix))
    if not (folder / TEXTS).is_file():
        wanted = tokens_wanted(pipeline, layer_width(describe(opened.config)))
        made = draw_texts(opened, pipeline.calibrate, wanted, pipeline.seed, tell, WINDOW, pipeline.threads)
        check_apart(passage_hashes(made), judged)
        save_texts(work, TEXTS, made)
    texts = load_texts(work, TEXTS)
    check_apart(passage_hashes(texts), judged)
    return work, texts


def measure_kv(opened: Opened, pipeline: Pipeline, texts: Texts, tell: Progress) -> KVSettings | None:
    """What the file is to say of K and V, with the mean of keys over `texts`, or, where there are none, over others made for
    it."""
    if pipeline.kv is None:
        if (own := kv_settings(opened.source, kv_shape(opened.config))) is not None:
            tell.note(f"{opened.path.name} asks for K and V in {own.format}, and what is written does not; for that give --kv")
        return None
    if not texts:
        texts = draw_texts(opened, pipeline.calibrate, pipeline.tokens or TOKENS, pipeline.seed, tell, WINDOW, pipeline.threads)
    return KVSettings(pipeline.kv, mean_keys(opened.source, texts[: -(-TOKENS // len(texts[0]))], tell))


def sensitivities(
    opened: Opened, ladder: Ladder, work: WorkFolder, texts: Texts, tell: Progress, threads: int
) -> dict[str, dict[str, float]]:
    """What each format would do to the outputs of each part of the layers' matrices, by target: on a walk of its own."""
    own = WorkFolder(work.folder / "kinds")
    own.begin(work.read(PLAN))
    run_pass(LayerPass(opened.source, texts, own, {}), [Sensitivity(ladder, threads)], own, tell, threads)
    found: dict[str, dict[str, float]] = {}
    for number in range(opened.config.num_layers):
        found |= own.about(number)["extra"]["errors"]
    return found


def run_methods(
    opened: Opened, pipeline: Pipeline, kinds: Mapping[str, str], work: WorkFolder, texts: Texts, tell: Progress
) -> PassOutput:
    """Carry the methods out, from where an earlier run was stopped. `kinds` by target. Raises ValueError as Work does."""
    threads = pipeline.thread_count
    folds: dict[str, Compressor] = {"awq": AWQ(threads), "smoothquant": SmoothQuant()}
    steps = [folds[name] for name in pipeline.method if name in folds]
    steps.append(Rounding("gptq" in pipeline.method, pipeline.act_order, threads, pipeline.prunes))
    run_pass(LayerPass(opened.source, texts, work, kinds), steps, work, tell, threads)
    return read_pass(work, opened.config.num_layers, pipeline.folds)


def run_pass(walk: LayerPass, steps: Sequence[Compressor], work: WorkFolder, tell: Progress, threads: int) -> None:
    """Visit every layer that is left; say what became of it. Torch has `threads` meanwhile."""
    total, before = walk.model.config.num_layers, torch.get_num_threads()
    tell.start("layers", total, work.done, unit="layers")
    clock, last = TimeEstimate(total, work.done), ""
    torch.set_num_threads(threads)
    try:
        for visit in walk:
            if last:
                _report(tell, last, clock)
            apply_methods(visit, steps)
            last = _line(visit, total)
        if last:
            _report(tell, last, clock)
    finally:
        torch.set_num_threads(before)
        tell.finish()


def _report(tell: Progress, line: str, clock: TimeEstimate) -> None:
    taken, left = clock.tick()
    line = f"{line}  {taken:.0f} s, {left / 60:.0f} min left"
    tell.advance(1, line)
    if not isinstance(tell, Moving):
        tell.note(line)


def _line(visit: Visit, total: int) -> str:
    """Of a layer the matrix with the most inputs."""
    if not visit.outputs:
        found = [f"{name} {value:.4f}" for name, value in visit.extra.items() if isinstance(value, float)]
        return f"{visit.number + 1}/{total} {', '.join(found)}".rstrip()
    target, report = max(visit.outputs.items(), key=lambda one: one[1].inputs)
    held = "" if report.held is None else f", held out {report.held:.4f}"
    name = target.removeprefix(f"layers.{visit.number}.").removesuffix(".weight")
    return f"{visit.number + 1}/{total} {name} K {report.inputs} error {report.error:.4f} (rtn {report.nearest:.4f}{held})"


def read_pass(work: WorkFolder, layers: int, folds: bool) -> PassOutput:
    """What a walk that has come to its end left."""
    made = PassOutput(work, {}, folds, {}, [], 0)
    for number in range(layers):
        about = work.about(number)
        made.kinds |= about["kinds"]
        made.outputs |= {target: OutputReport(**one) for target, one in about["told"].items()}
        made.notes += about["notes"]
        made.tokens = about["tokens"]
    return made


def plan_of(opened: Opened, pipeline: Pipeline, mix: str) -> dict[str, Any]:
    """What must be the same for a run to go on where another stopped."""
    calibrate = pipeline.calibrate
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
        "threads": pipeline.thread_count,  # sums have another order on more or fewer
        "version": VERSION,
        **({} if pipeline.heal is None else {"heal": str(pipeline.heal)}),
    }


def _files(opened: Opened) -> list[Path]:
    path = opened.path
    return [path] if path.is_file() else sorted([*path.glob("*.safetensors"), *path.glob("*.json")])


def _sha256(paths: Sequence[Path]) -> str:
    made = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while data := file.read(1 << 20):
                made.update(data)
    return made.hexdigest()
