"""Compress a model into a GGUF file or a folder: `predict` returns the report without writing, `compress` writes."""

import json
import shutil
import time
from pathlib import Path

import numpy as np

from headrace.compress.calibration_pass import (
    PassOutput,
    measure_kv,
    run_methods,
    sensitivities,
    start_work,
    too_few_tokens_warning,
)
from headrace.compress.containers.folder import FolderPlan
from headrace.compress.containers.gguf import GGUFPlan
from headrace.compress.healing import Healer
from headrace.compress.judge import judge, judge_embeddings
from headrace.compress.layer_pass import layer_width
from headrace.compress.pipeline import Pipeline
from headrace.compress.plan import CompressionPlan
from headrace.compress.report import Report, report_path
from headrace.compress.stages import copy_report, cut_model, heal_model
from headrace.compress.texts import WINDOW, Texts, draw_texts, passage_hashes
from headrace.compress.work_folder import WRITTEN, WorkFolder
from headrace.data.progress import Progress, human_size
from headrace.models import gguf
from headrace.models.registry import describe
from headrace.startup.opening import open_files
from headrace.weights.atomic_file import atomic_write, file_lock
from headrace.weights.imatrix import write_imatrix
from headrace.weights.parts import stored_as

JUDGED = 8192  # tokens of the texts to judge by; the second half of each text is scored
CONTAINERS: dict[str, type[CompressionPlan]] = {".gguf": GGUFPlan}  # by suffix of OUT; any other name is a folder


def container_of(out: Path) -> type[CompressionPlan]:
    """The container that OUT's suffix names."""
    return CONTAINERS.get(out.suffix, FolderPlan)


def predict(model: str | Path, pipeline: Pipeline | None = None, container: type[CompressionPlan] = GGUFPlan) -> Report:
    """The report of `compress` before anything is read; errors are None."""
    return prepare(model, pipeline or Pipeline(), container).report


def prepare(model: str | Path, pipeline: Pipeline, container: type[CompressionPlan]) -> CompressionPlan:
    """Open a model and plan its compression. Raises ValueError as `compress` does."""
    pipeline.check()
    container.check_format(pipeline)
    return container.prepare(open_files(model), None, pipeline)


def compress(
    model: str | Path,
    out: str | Path,
    pipeline: Pipeline | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    healer: Healer | None = None,
) -> Report:
    """Write a model as OUT: a GGUF file if the name ends in .gguf, otherwise a folder.

    One matrix is in memory at a time, or one layer if the pipeline reads texts. Then the folder OUT.work keeps finished layers,
    so that the same call continues a stopped run, and OUT.report.json gets the report.
    healer: trains the model for the method heal (training.distil.Healing).
    Raises ValueError (WeightError, TokenizerError) before anything is written, also if another process writes OUT;
    and OSError.
    """
    path, pipeline = Path(out), pipeline or Pipeline()
    container = container_of(path)
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is not a folder; create it first")
    with file_lock(path):
        replaced = container.replaceable and overwrite and path.is_file()
        if path.exists() and not (replaced or _continues(path, pipeline)):
            raise ValueError(f"{path} exists; give another name" + (", or --overwrite" if container.replaceable else ""))
        return _compress(model, path, pipeline, progress or Progress(), healer)


def _compress(model: str | Path, path: Path, pipeline: Pipeline, progress: Progress, healer: Healer | None) -> Report:
    """`compress` with OUT locked and free."""
    start = time.perf_counter()
    plan = prepare(model, pipeline, container_of(path))
    original = plan.original
    if path.exists() and path.samefile(original.path):
        raise ValueError(f"{path} is the model that is read; give another name")
    pipeline.check_files(path, original.path)
    _check_space(path, plan.report.bytes)
    plan.report.warnings[:0] = pipeline.warnings
    for line in plan.report.warnings:
        progress.note(line)
    judge_texts: Texts = []
    if pipeline.judge is not None:
        judge_texts = draw_texts(
            original, pipeline.judge, JUDGED, pipeline.seed, progress, WINDOW, pipeline.threads, judging=True
        )
    work: WorkFolder | None = None
    texts: Texts = []
    if pipeline.reads:
        work, texts = start_work(original, pipeline, plan.format_name(pipeline), work_path(path), judge_texts, progress)
        if texts:
            few = too_few_tokens_warning(sum(map(len, texts)), layer_width(describe(original.config)))
            _warn(plan.report, few, progress)
        plan.report.passages = passage_hashes(texts)
        if pipeline.cuts or pipeline.heal is not None:
            plan = _cut(plan, work, texts, judge_texts, progress, healer)
        if pipeline.walks:
            _run_methods(plan, work, texts, progress)
    plan.kv = measure_kv(plan.opened, pipeline, texts, progress)
    if work is not None:
        # Before OUT gets its name, so that a run killed right after that is continued.
        work.write(WRITTEN, {"bytes": plan.report.bytes})
    _write(plan, path, progress)
    if pipeline.judge is not None:
        progress.start("compared with the original")
        if original.config.encoder:
            plan.report.judged = judge_embeddings(original.path, path, judge_texts, pipeline.judge, pipeline.thread_count)
        else:
            plan.report.judged = judge(original.source, open_files(path).source, judge_texts, pipeline.judge)
        progress.finish()
    plan.report.seconds = time.perf_counter() - start
    if work is not None:
        _finish(plan, work, report_path(path))
    return plan.report


def _cut(
    plan: CompressionPlan, work: WorkFolder, texts: Texts, judge_texts: Texts, progress: Progress, healer: Healer | None
) -> CompressionPlan:
    """Cut the model if there are cuts, heal it if the pipeline does, and plan the rest for the smaller model."""
    pipeline, vocabulary = plan.pipeline, plan.copies_vocabulary
    left = cut_model(plan.original, pipeline.cuts, work, texts, progress, pipeline.thread_count, vocabulary)
    if (heal := pipeline.heal) is not None:
        left = heal_model(plan.original, left, heal, healer, pipeline.text_source, judge_texts, work, progress, vocabulary)
    rest = plan.prepare(plan.original, left.opened, pipeline)
    copy_report(rest.report, plan.report, left)
    _warn(rest.report, left.notes, progress)
    return rest


def _run_methods(plan: CompressionPlan, work: WorkFolder, texts: Texts, progress: Progress) -> None:
    """Choose formats within a budget, if there is one, and run the methods that read texts, layer by layer."""
    pipeline = plan.pipeline
    if pipeline.budget is not None:
        errors = sensitivities(plan.opened, plan.ladder, work, texts, progress, pipeline.thread_count)
        plan.fit_budget(errors, pipeline.budget)
    output = run_methods(plan.opened, pipeline, plan.pass_formats(), work, texts, progress)
    plan.output = output
    plan.report.tokens, plan.report.outputs = output.tokens, output.outputs
    _warn(plan.report, output.notes, progress)


def _write(plan: CompressionPlan, path: Path, progress: Progress) -> None:
    report_path(path).unlink(missing_ok=True)  # of the OUT that is replaced
    progress.start(path.name, sum(info.nbytes for info in plan.tensors))
    try:
        plan.write(path, plan.chunks(progress))
    finally:
        progress.finish()


def _warn(report: Report, lines: list[str], progress: Progress) -> None:
    """Print warnings, and put them first in the report."""
    for line in lines:
        progress.note(line)
    report.warnings[:0] = lines


def _finish(plan: CompressionPlan, work: WorkFolder, path: Path) -> None:
    """OUT is complete: write the importance matrix and the report, and remove the work folder."""
    pipeline = plan.pipeline
    if pipeline.write_imatrix is not None and plan.output is not None:
        write_imatrix(pipeline.write_imatrix, _importance(plan, plan.output), plan.output.tokens, pipeline.text_source)
    with atomic_write(path) as part:
        part.write_text(json.dumps(plan.report.record(), indent=1), "utf-8")
    (work.folder / WRITTEN).unlink()  # nothing is left to continue
    if not pipeline.keep_work:
        work.remove()


def _importance(plan: CompressionPlan, output: PassOutput) -> dict[str, np.ndarray]:
    """Measured importance of the layers' matrices, by GGUF names."""
    stored = stored_as(describe(gguf.with_gguf_architecture(plan.opened.config)), "gguf")
    return {
        name: output.importance(parts[0].target)
        for name, parts in stored.items()
        if parts[0].target.startswith("layers.") and len(parts[0].stored) > 1
    }


def _check_space(path: Path, needed: int) -> None:
    """Raise ValueError if the disk has fewer bytes free."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise ValueError(f"{path} needs {human_size(needed)} and {human_size(free)} are free in {path.parent}")


def work_path(out: Path) -> Path:
    """The folder that keeps finished layers until OUT is complete and judged."""
    return out.with_name(f"{out.name}.work")


def _continues(out: Path, pipeline: Pipeline) -> bool:
    """True if OUT is complete, of a run that was stopped before its report was."""
    if not pipeline.reads or not (record := work_path(out) / WRITTEN).is_file():
        return False
    return not out.is_file() or out.stat().st_size == json.loads(record.read_bytes()).get("bytes")
