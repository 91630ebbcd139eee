"""compress: a model written again in fewer bytes. `predict` says what will be written; `compress` writes it."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from headrace.compress.budget import Rung, choose_formats, gguf_ladder
from headrace.compress.calibration_pass import (
    PassOutput,
    measure_kv,
    run_methods,
    sensitivities,
    start_work,
    threads_of,
    too_few_tokens_warning,
)
from headrace.compress.container import tensor_info
from headrace.compress.gguf_plan import Job, prepare
from headrace.compress.grids.encode import encode
from headrace.compress.healing import Healer
from headrace.compress.judge import judge
from headrace.compress.layer_pass import layer_width
from headrace.compress.mixes import mix_named
from headrace.compress.pipeline import Pipeline
from headrace.compress.pruning import prune_rows
from headrace.compress.report import MatrixReport, Report, report_path
from headrace.compress.stages import copy_report, cut_model, heal_model
from headrace.compress.texts import WINDOW, Texts, draw_texts, passage_hashes
from headrace.compress.work_folder import WRITTEN, WorkFolder
from headrace.data.progress import Progress, Silent, human_size
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_files
from headrace.weights.atomic_file import atomic_write, file_lock
from headrace.weights.dequant import dequantize
from headrace.weights.imatrix import write_imatrix
from headrace.weights.kinds import FLOATS
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import WeightPart
from headrace.weights.source import TensorInfo, WeightError
from headrace.weights.write_gguf import Chunks, write_gguf

__all__ = ["MatrixReport", "Pipeline", "Report", "compress", "predict", "prepare"]

CHUNK = 1 << 22  # numbers encoded between two writes
JUDGED = 8192  # tokens of texts to judge by, half of which are scored


def compress(
    model: str | Path,
    out: str | Path,
    pipeline: Pipeline | None = None,
    tell: Progress | None = None,
    overwrite: bool = False,
    healer: Healer | None = None,
) -> Report:
    """Write a model as a GGUF file; matrix by matrix, so that one is in memory at a time, or, where texts are read, a layer.

    Beside OUT stands the folder OUT.work while texts are read: the same call goes on where an earlier one stopped; and then
    OUT's report, as JSON. `healer`: who trains for the method heal (training.healing.Healing). Raises ValueError (WeightError,
    TokenizerError, HubError) for what cannot be, before anything is written, as where another process writes OUT, and OSError.
    """
    path, pipeline = Path(out), pipeline or Pipeline()
    _check_name(path)
    with file_lock(path):
        if path.is_dir() or (path.exists() and not (overwrite or goes_on(path, pipeline))):
            raise ValueError(f"{path} exists; give another name, or --overwrite")
        return _compress(model, path, pipeline, tell or Silent(), healer)


def _compress(model: str | Path, path: Path, pipeline: Pipeline, tell: Progress, healer: Healer | None) -> Report:
    """See `compress`; OUT may be written."""
    start = time.perf_counter()
    job = prepare(model, pipeline)
    if path.exists() and path.samefile(job.opened.path):
        raise ValueError(f"{path} is the model that is read; give another name")
    pipeline.check_files(path, job.opened.path)
    check_room(path, job.report.bytes)
    job.report.warnings[:0] = pipeline.warnings
    for line in job.report.warnings:
        tell.note(line)
    judged, original, work = judging_texts(job.opened, pipeline, tell), job.opened.source, None
    texts: Texts = []
    if pipeline.reads:
        work, texts = start_work(job.opened, pipeline, mix_named(pipeline.format), work_folder(path), judged, tell)
        warn(job.report, too_few_tokens_warning(sum(map(len, texts)), layer_width(describe(job.opened.config))), tell)
        job.report.passages = passage_hashes(texts)
        if pipeline.cuts:
            job = _cut(job, model, pipeline, work, texts, judged, tell, healer)
        if pipeline.walks:
            _walk(job, pipeline, work, texts, tell)
    job.kept = measure_kv(job.opened, pipeline, texts, tell)
    report_path(path).unlink(missing_ok=True)  # which would be of what is replaced
    tell.start(path.name, sum(info.nbytes for info in job.tensors))
    try:
        write_gguf(path, job.entries, job.tensors, _chunks(job, pipeline, tell.advance), job.alignment)
    finally:
        tell.finish()
    if work is not None:
        work.write(WRITTEN, {"bytes": job.report.bytes})
    if pipeline.judge is not None:
        tell.start("beside the original")
        job.report.judged = judge(original, open_files(path).source, judged, pipeline.judge)
        tell.finish()
    job.report.seconds = time.perf_counter() - start
    if work is not None:
        finish(job.report, work, job.made, job.stored, pipeline, report_path(path))
    return job.report


def judging_texts(opened: Opened, pipeline: Pipeline, tell: Progress) -> Texts:
    """Texts to judge by; none where nothing is judged."""
    if pipeline.judge is None:
        return []
    return draw_texts(opened, pipeline.judge, JUDGED, pipeline.seed, tell, WINDOW, pipeline.threads, judging=True)


def _cut(
    job: Job,
    model: str | Path,
    pipeline: Pipeline,
    work: WorkFolder,
    texts: Texts,
    judged: Texts,
    tell: Progress,
    healer: Healer | None,
) -> Job:
    """The same job on the model after its cuts, healed where that is asked for."""
    left = cut_model(job.opened, pipeline.cuts, work, texts, tell, threads_of(pipeline))
    if (how := pipeline.heal) is not None:
        left = heal_model(job.opened, left, how, healer, pipeline.calibrate, judged, work, tell)
    made = prepare(model, pipeline, left.opened)
    copy_report(made.report, job.report, left)
    warn(made.report, left.notes, tell)
    return made


def warn(report: Report, lines: list[str], tell: Progress) -> None:
    """Said at once, and first in the report."""
    for line in lines:
        tell.note(line)
    report.warnings[:0] = lines


def _walk(job: Job, pipeline: Pipeline, work: WorkFolder, texts: Texts, tell: Progress) -> None:
    """Carry out what reads texts; the layers' tensors are then taken from its work."""
    if pipeline.budget is not None:
        errors = sensitivities(job.opened, gguf_ladder, work, texts, tell, threads_of(pipeline))
        job.choose(_within(job, errors, pipeline.budget))
    kinds = {
        part.target: info.kind
        for info in job.tensors
        for part in job.stored.get(info.name, ())
        if part.target.startswith("layers.") and info.kind not in FLOATS
        if pipeline.folds or not job.copied(info)
    }
    job.made = run_methods(job.opened, pipeline, kinds, work, texts, tell)
    report_walk(job.report, job.made, tell)


def _within(job: Job, errors: dict[str, dict[str, float]], budget: int) -> list[TensorInfo]:
    """The tensors with the kinds that the budget allows; errors by target."""
    ladders: dict[str, list[Rung]] = {}
    for info in job.tensors:
        parts = [part.target for part in job.stored.get(info.name, ())]
        if parts and all(part in errors for part in parts) and (kinds := gguf_ladder(info.shape[-1])):
            sizes = {kind: tensor_info(info.name, info.shape, kind).nbytes for kind in kinds}
            ladders[info.name] = [Rung(kind, sum(errors[part][kind] for part in parts), sizes[kind]) for kind in kinds]
    found = choose_formats(ladders, sum(info.nbytes for info in job.tensors if info.name not in ladders), budget)
    return [tensor_info(info.name, info.shape, found[info.name]) if info.name in found else info for info in job.tensors]


def report_walk(report: Report, made: PassOutput, tell: Progress) -> None:
    """What a walk told goes into the report, and what went other than it should to its head."""
    report.tokens, report.outputs = made.tokens, made.outputs
    warn(report, made.notes, tell)


def finish(
    report: Report,
    work: WorkFolder,
    made: PassOutput | None,
    stored: dict[str, list[WeightPart]],
    pipeline: Pipeline,
    path: Path,
) -> None:
    """The file is whole: write what else is wanted, and let the work go. `stored`: by tensors of a GGUF file."""
    if pipeline.write_imatrix is not None and made is not None:
        measured = {
            name: made.importance(parts[0].target)
            for name, parts in stored.items()
            if parts[0].target.startswith("layers.") and len(parts[0].stored) > 1
        }
        write_imatrix(pipeline.write_imatrix, measured, made.tokens, pipeline.calibrate)
    with atomic_write(path) as part:
        part.write_text(json.dumps(report.record(), indent=1), "utf-8")
    (work.folder / WRITTEN).unlink()  # nothing is left to go on with
    if not pipeline.keep_work:
        work.remove()


def check_room(path: Path, needed: int) -> None:
    """Raise ValueError where the disk has less."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise ValueError(f"{path} takes {human_size(needed)} and {human_size(free)} are free in {path.parent}")


def work_folder(out: Path) -> Path:
    """Where what is done is kept until OUT is whole, and was judged."""
    return out.with_name(f"{out.name}.work")


def goes_on(out: Path, pipeline: Pipeline) -> bool:
    """Whether OUT is what a run wrote that was stopped after it: the same command goes on."""
    return pipeline.reads and (work_folder(out) / WRITTEN).is_file()


def predict(model: str | Path, pipeline: Pipeline | None = None) -> Report:
    """What `compress` would write; errors are not known."""
    return prepare(model, pipeline or Pipeline()).report


def _check_name(path: Path) -> None:
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: models are written as one GGUF file; give a name that ends in .gguf")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it first")


def _chunks(job: Job, pipeline: Pipeline, advance: Callable[[int], None]) -> Chunks:
    """The tensors' bytes in order; fills in the report what error each has."""
    threads = threads_of(pipeline)
    for info in job.tensors:
        error, zeros = 0.0, 0
        for data, lost, none in _encoded(job, info, threads):
            error, zeros = error + lost, zeros + none
            advance(data.nbytes)
            yield info.name, data
        one = job.report.matrices[info.name]
        share = zeros / one.weights if job.pruned(info) else None
        job.report.matrices[info.name] = MatrixReport(one.weights, one.kind, one.nbytes, error, share)


def _encoded(job: Job, info: TensorInfo, threads: int) -> Iterator[tuple[np.ndarray, float, int]]:
    """Bytes of some rows after others, their part of the error, and how many numbers are 0."""
    source = job.opened.source
    if info.name in job.given:
        yield job.given[info.name], 0.0, 0
        return
    if job.copied(info):
        yield source.raw(info.name), 0.0, 0
        source.release(info.name)
        return
    parts, made = job.stored[info.name], job.made
    if made is not None and parts[0].target in made.kinds:
        yield from _coded(job, made, parts)
        return

    def read(target: str) -> torch.Tensor:
        if made is not None and made.changed(target):
            return made.values(target)
        return read_part(job.read[target], source, torch.float32)

    values = write_parts(parts, read).numpy()
    rows = values.reshape(-1, values.shape[-1])
    energy = sum(float(np.square(rows[at : at + 1024], dtype=np.float64).sum()) for at in range(0, len(rows), 1024)) or 1.0
    step = max(1, CHUNK // rows.shape[1])
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        weight = job.importance.get(info.name)
        try:
            left = prune_rows(some, job.pruning, weight) if job.pruning and job.pruned(info) else some
            data = encode(left, info.kind, weight, threads)
        except ValueError as error:
            raise WeightError(f"{job.opened.path}: {info.name} {error}") from None
        values_made = dequantize(data.reshape(-1), info.kind).reshape(some.shape)
        yield data, float(np.square(some - values_made, dtype=np.float64).sum()) / energy, int((values_made == 0).sum())
    for part in parts:
        source.release(job.read[part.target].source)


def _coded(job: Job, made: PassOutput, parts: list[WeightPart]) -> Iterator[tuple[np.ndarray, float, int]]:
    """What the walk left of a tensor."""
    reports = [job.report.outputs[part.target] for part in parts]
    lost = sum(one.lost for one in reports) / (sum(one.energy for one in reports) or 1.0)
    rows = write_parts(parts, made.rows).numpy()
    zeros = int((dequantize(rows.reshape(-1), made.kinds[parts[0].target]) == 0).sum()) if job.pruning else 0
    yield rows, lost, zeros
