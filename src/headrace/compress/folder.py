"""A model rounded, and pruned or cut where that is asked for, written as a folder that Headrace reads, and others where they
know the layout (`weights.quantized.written`)."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from headrace.compress.budget import Rung, choose_formats, integer_ladder
from headrace.compress.calibration_pass import (
    measure_kv,
    run_methods,
    sensitivities,
    start_work,
    threads_of,
    too_few_tokens_warning,
)
from headrace.compress.export import CONFIG, write_json, write_words
from headrace.compress.folder_plan import Job, infos_of, is_matrix, prepare_folder, prepared, quantization_of
from headrace.compress.grids.encode import encode
from headrace.compress.grids.targets import target
from headrace.compress.healing import Healer
from headrace.compress.judge import judge
from headrace.compress.layer_pass import layer_width
from headrace.compress.layouts import grouped
from headrace.compress.pipeline import Pipeline
from headrace.compress.pruning import prune_rows
from headrace.compress.report import MatrixReport, Report, report_path
from headrace.compress.run import CHUNK, check_room, finish, goes_on, judging_texts, report_walk, warn, work_folder
from headrace.compress.stages import copy_report, cut_model, heal_model
from headrace.compress.texts import Texts, passage_hashes
from headrace.compress.work_folder import WRITTEN, WorkFolder
from headrace.data.progress import Progress, Silent
from headrace.models import gguf_keys
from headrace.models.registry import describe
from headrace.startup.opening import open_files
from headrace.weights.atomic_file import file_lock
from headrace.weights.decode import dequantize_numpy
from headrace.weights.describe import COMPRESSED
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import stored_as
from headrace.weights.source import WeightError
from headrace.weights.write_safetensors import write_safetensors

SINGLE = "model.safetensors"


def compress_folder(
    model: str | Path, out: str | Path, pipeline: Pipeline, tell: Progress | None = None, healer: Healer | None = None
) -> Report:
    """Write a model as a folder; matrix by matrix, so that one is in memory at a time, or, where texts are read, a layer. OUT
    gets its name when it is whole. `healer`: who trains for the method heal (training.healing.Healing).

    Raises ValueError (WeightError, TokenizerError, HubError) for what cannot be, before any matrix is read, also where another
    process writes OUT, and OSError.
    """
    path = Path(out)
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it first")
    with file_lock(path):
        if path.exists() and not goes_on(path, pipeline):
            raise ValueError(f"{path} exists; give another name")
        return _compress(model, path, pipeline, tell or Silent(), healer)


def _compress(model: str | Path, path: Path, pipeline: Pipeline, tell: Progress, healer: Healer | None) -> Report:
    """See `compress_folder`; OUT may be written."""
    start = time.perf_counter()
    job = prepare_folder(model, pipeline)
    pipeline.check_files(path, job.origin.path)
    check_room(path, job.report.bytes)
    job.report.warnings[:0] = pipeline.warnings
    for line in job.report.warnings:
        tell.note(line)
    judged, work = judging_texts(job.origin, pipeline, tell), None
    texts: Texts = []
    if pipeline.reads:
        work, texts = start_work(job.origin, pipeline, pipeline.format.lower(), work_folder(path), judged, tell)
        warn(job.report, too_few_tokens_warning(sum(map(len, texts)), layer_width(describe(job.origin.config))), tell)
        job.report.passages = passage_hashes(texts)
        if pipeline.cuts:
            job = _cut(job, work, texts, judged, tell, healer)
        if pipeline.walks:
            _walk(job, work, texts, tell)
    job.kept = measure_kv(job.opened, pipeline, texts, tell)
    _write(job, path, tell)
    if work is not None:
        work.write(WRITTEN, {"bytes": job.report.bytes})
    if pipeline.judge is not None:
        tell.start("beside the original")
        job.report.judged = judge(job.origin.source, open_files(path).source, judged, pipeline.judge)
        tell.finish()
    job.report.seconds = time.perf_counter() - start
    if work is not None:
        names = describe(gguf_keys.named(job.opened.config))
        stored = stored_as(names, "gguf") if pipeline.write_imatrix is not None else {}
        finish(job.report, work, job.made, stored, pipeline, report_path(path))
    return job.report


def _cut(job: Job, work: WorkFolder, texts: Texts, judged: Texts, tell: Progress, healer: Healer | None) -> Job:
    """The same job on the model after its cuts, healed where that is asked for."""
    pipeline = job.pipeline
    left = cut_model(job.origin, pipeline.cuts, work, texts, tell, threads_of(pipeline), words=False)
    if (how := pipeline.heal) is not None:
        left = heal_model(job.origin, left, how, healer, pipeline.calibrate, judged, work, tell, words=False)
    made = prepared(job.origin, left.opened, pipeline)
    copy_report(made.report, job.report, left)
    warn(made.report, left.notes, tell)
    return made


def _walk(job: Job, work: WorkFolder, texts: Texts, tell: Progress) -> None:
    """Carry out what reads texts; the layers' tensors are then taken from its work."""
    pipeline = job.pipeline
    if pipeline.budget is not None:
        ladder = integer_ladder(pipeline.format.lower())
        errors = sensitivities(job.opened, ladder, work, texts, tell, threads_of(pipeline))
        job.choose(_within(job, errors, pipeline.budget))
        job.config["quantization_config"] = quantization_of(job)
        job.measure()
    kinds = {
        part.target: job.formats[name]
        for name, parts in job.stored.items()
        if name in job.layouts and is_matrix(name, parts[0])
        for part in parts
    }
    job.made = run_methods(job.opened, pipeline, kinds, work, texts, tell)
    report_walk(job.report, job.made, tell)


def _within(job: Job, errors: dict[str, dict[str, float]], budget: int) -> dict[str, str]:
    """The formats that the budget allows, by stored tensor; errors by target."""
    ladders: dict[str, list[Rung]] = {}
    for name, parts in job.stored.items():
        if name in job.layouts and is_matrix(name, parts[0]):
            each = [errors[part.target] for part in parts]
            ladders[name] = []
            for one in each[0]:
                infos = infos_of(name, parts[0].stored, grouped(one))
                ladders[name].append(Rung(one, sum(found[one] for found in each), sum(info.nbytes for info in infos)))
    fixed = sum(info.nbytes for name in job.stored if name not in ladders for info in job.infos(name))
    return choose_formats(ladders, fixed, budget)


def _write(job: Job, path: Path, tell: Progress) -> None:
    """The folder, which gets its name when it is whole."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    report_path(path).unlink(missing_ok=True)  # which would be of what was there before
    tell.start(path.name, sum(info.nbytes for info in job.tensors))
    try:
        part.mkdir()
        _write_settings(job, part)
        write_safetensors(part / SINGLE, job.tensors, _chunks(job, threads_of(job.pipeline), tell))
        if path.exists():  # what this run had written when it was stopped
            shutil.rmtree(path)
        part.rename(path)
    finally:
        tell.finish()
        shutil.rmtree(part, ignore_errors=True)


def _write_settings(job: Job, folder: Path) -> None:
    """config.json, tokenizer and template. Raises ValueError where the tokenizer read back is another one."""
    write_words(job.origin, folder)
    write_json(folder / CONFIG, job.config)
    write_json(
        folder / COMPRESSED, {"compress": summary(job.pipeline), **({} if job.kept is None else {"kv": job.kept.record()})}
    )


def summary(pipeline: Pipeline) -> str:
    """What was done to a model, in one line: "awq,gptq int4-g128"."""
    cut = f" {pipeline.prunes[1]}" if pipeline.prunes else ""
    return f"{','.join(pipeline.method)}{cut} {pipeline.format.lower()}"


def _chunks(job: Job, threads: int, tell: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors' bytes in order; fills in the report what error each has."""
    for name, parts in job.stored.items():
        try:
            if name in job.layouts:
                rows, error, zeros = _rows(job, name, threads)
                reports = {} if job.made is None else job.made.outputs  # of what a walk saw: a head is none of it
                largest = max((reports[part.target].largest for part in parts if part.target in reports), default=0.0)
                arrays = list(job.layouts[name].tensors(rows, largest).values())
            else:
                data, zeros = _floats(job, name)
                arrays, error = [data], 0.0
        except ValueError as problem:
            raise WeightError(f"{job.opened.path}: {name} {problem}") from None
        for info, data in zip(job.infos(name), arrays, strict=True):
            tell.advance(data.nbytes)
            yield info.name, data
        one = job.report.matrices[name]
        job.report.matrices[name] = MatrixReport(one.weights, one.kind, one.nbytes, error, zeros)
        for part in parts:
            job.opened.source.release(job.read[part.target].source)


def _values(job: Job, name: str) -> np.ndarray:
    """A stored tensor of the model, as the walk left it: float32, one or two sizes."""
    made = job.made

    def read(target: str) -> torch.Tensor:
        if made is not None and made.changed(target):
            return made.values(target)
        return read_part(job.read[target], job.opened.source, torch.float32)

    values: np.ndarray = write_parts(job.stored[name], read).numpy()
    return values


def _floats(job: Job, name: str) -> tuple[np.ndarray, float | None]:
    """The bytes of a tensor that stays floats, and the share of zeros of one that is pruned."""
    values, zeros, how = _values(job, name), None, job.pipeline.prunes
    if how is not None and not job.pipeline.walks and is_matrix(name, job.stored[name][0]):
        values = prune_rows(values, how, job.importance.get(name))
        zeros = float((values == 0).mean())
    return encode(values.reshape(-1, values.shape[-1]), job.kinds[name]), zeros


def _rows(job: Job, name: str, threads: int) -> tuple[np.ndarray, float, float | None]:
    """Rows of a matrix, their square error over squares, and the share of zeros of one that is pruned."""
    made, parts, kind = job.made, job.stored[name], job.layouts[name].kind
    how = job.pipeline.prunes if is_matrix(name, parts[0]) else None
    if made is not None and parts[0].target in made.kinds:
        reports = [made.outputs[part.target] for part in parts]
        rows = write_parts(parts, made.rows).numpy()
        error = sum(one.lost for one in reports) / (sum(one.energy for one in reports) or 1.0)
        return rows, error, float((dequantize_numpy(rows.reshape(-1), kind) == 0).mean()) if how else None
    values, weight, to = _values(job, name), job.importance.get(name), target(job.formats[name])
    step, lost, energy, zeros = max(1, CHUNK // values.shape[1]), 0.0, 0.0, 0

    def encoded(some: np.ndarray) -> np.ndarray:
        return to.encode(some if how is None else prune_rows(some, how, weight), weight, threads)

    rows = np.empty((0, 0), np.uint8) if to.by_row else encoded(values)
    for at in range(0, len(values), step):
        some = values[at : at + step]
        if to.by_row:
            piece = encoded(some)
            rows = rows if at else np.empty((len(values), piece.shape[1]), np.uint8)
            rows[at : at + step] = piece
        read = dequantize_numpy(rows[at : at + step].reshape(-1), kind).reshape(some.shape)
        lost += float(np.square(some - read, dtype=np.float64).sum())
        energy += float(np.square(some, dtype=np.float64).sum())
        zeros += int((read == 0).sum())
    return rows, lost / (energy or 1.0), zeros / values.size if how else None
