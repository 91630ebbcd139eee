"""compress: a model written again in fewer bytes. `predict` says what will be written; `compress` writes it."""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.compress.budget import Rung, chosen, kinds_for
from headrace.compress.container import entries, given_tensors, tensor_info
from headrace.compress.judge import judge, judge_bytes
from headrace.compress.measured import Made, begun, few, kv_measured, reading_bytes, sensitivities, threads_of, walked
from headrace.compress.mixes import MIXES, kind_named, mix_named, tensor_kind
from headrace.compress.pruning import is_pruned, pruned, zero_kind
from headrace.compress.report import Matrix, Pipeline, Report
from headrace.compress.stages import cut_model
from headrace.compress.structure import reshaped
from headrace.compress.texts import WINDOW, Texts, passages, texts_of
from headrace.compress.walk import layer_width
from headrace.compress.work import Work
from headrace.data.config import ModelConfig
from headrace.models import gguf_keys
from headrace.models.registry import describe
from headrace.quant.encode import encode
from headrace.quant.keep import Sparsity
from headrace.startup.opening import Opened, open_files
from headrace.weights.dequant import dequantize
from headrace.weights.gguf import DEFAULT_ALIGNMENT, GGUFFile
from headrace.weights.imatrix import read_imatrix, write_imatrix
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import WeightPart, plan, stored_as
from headrace.weights.progress import Progress, Silent, human_size
from headrace.weights.source import TensorInfo, WeightError
from headrace.weights.write_gguf import Chunks, entry, file_size, write_gguf

__all__ = ["Matrix", "Pipeline", "Report", "compress", "predict", "prepare"]

CHUNK = 1 << 22  # numbers encoded between two writes
JUDGED = 8192  # tokens of texts to judge by, half of which are scored


@dataclass(slots=True)
class Job:
    """All that writing takes, with nothing written yet."""

    opened: Opened
    stored: dict[str, list[WeightPart]]  # by tensor of the file to be written
    read: dict[str, WeightPart]  # by target
    tensors: list[TensorInfo]
    given: dict[str, np.ndarray]  # bytes of tensors that no parameter has
    importance: dict[str, np.ndarray]
    entries: list[bytes]
    alignment: int
    pruning: tuple[str, Sparsity] | None = None
    report: Report = field(init=False)
    made: Made | None = None  # what reading texts left

    def choose(self, tensors: list[TensorInfo]) -> None:
        """These kinds are written."""
        self.tensors = tensors
        self.report.matrices = {info.name: Matrix(prod(info.shape), info.kind, info.nbytes) for info in tensors}
        self.report.bytes = file_size(self.entries, tensors, self.alignment)

    def pruned(self, info: TensorInfo) -> bool:
        """Whether some of the tensor's numbers become 0."""
        return self.pruning is not None and is_pruned(info.name, info.shape)

    def copied(self, info: TensorInfo) -> bool:
        """Whether the tensor's bytes in the file read are those that are written."""
        source = self.opened.source
        if self.pruned(info) or (
            self.made is not None and any(self.made.changed(part.target) for part in self.stored.get(info.name, ()))
        ):
            return False
        return isinstance(source, GGUFFile) and info.name in source.names() and source.info(info.name) == info


def compress(
    model: str | Path, out: str | Path, pipeline: Pipeline | None = None, tell: Progress | None = None, overwrite: bool = False
) -> Report:
    """Write a model as a GGUF file; matrix by matrix, so that one is in memory at a time, or, where texts are read, a layer.

    Beside OUT stands the folder OUT.work while texts are read: the same call goes on where an earlier one stopped; and then
    OUT's report, as JSON. Raises ValueError (WeightError, TokenizerError, HubError) for what cannot be, before anything is
    written, and OSError.
    """
    tell, path, start = tell or Silent(), Path(out), time.perf_counter()
    _check_out(path, overwrite)
    pipeline = pipeline or Pipeline()
    job = prepare(model, pipeline)
    if path.exists() and path.samefile(job.opened.path):
        raise ValueError(f"{path} is the model that is read; give another name")
    check_room(path, job.report.bytes)
    for line in job.report.warnings:
        tell.note(line)
    judged, original, work = judging_texts(job.opened, pipeline, tell), job.opened.source, None
    texts: Texts = []
    if pipeline.reads:
        work, texts = begun(job.opened, pipeline, mix_named(pipeline.format), work_folder(path), judged, tell)
        warn(job.report, few(sum(map(len, texts)), layer_width(describe(job.opened.config))), tell)
        job.report.passages = passages(texts)
        if pipeline.cuts:
            job = _cut(job, model, pipeline, work, texts, tell)
        if pipeline.walks:
            _walk(job, pipeline, work, texts, tell)
    if (kept := kv_measured(job.opened, pipeline, texts, tell)) is not None:
        job.entries += [entry(key, value) for key, value in kept.metadata().items()]
        job.report.bytes = file_size(job.entries, job.tensors, job.alignment)
    tell.start(path.name, sum(info.nbytes for info in job.tensors))
    try:
        write_gguf(path, job.entries, job.tensors, _chunks(job, pipeline, tell.advance), job.alignment)
    finally:
        tell.finish()
    if pipeline.judge is not None:
        tell.start("beside the original")
        job.report.judged = judge(original, open_files(path).source, judged, pipeline.judge)
        tell.finish()
    job.report.seconds = time.perf_counter() - start
    if work is not None:
        finish(job.report, work, job.made, job.stored, pipeline, path.with_suffix(".report.json"))
    return job.report


def judging_texts(opened: Opened, pipeline: Pipeline, tell: Progress) -> Texts:
    """Texts to judge by; none where nothing is judged."""
    if pipeline.judge is None:
        return []
    return texts_of(opened, pipeline.judge, JUDGED, pipeline.seed, tell, WINDOW, pipeline.threads, judging=True)


def _cut(job: Job, model: str | Path, pipeline: Pipeline, work: Work, texts: Texts, tell: Progress) -> Job:
    """The same job on the model after its cuts."""
    left = cut_model(job.opened, pipeline.cuts, work, texts, tell, threads_of(pipeline))
    made = prepare(model, pipeline, left.opened)
    made.report.warnings, made.report.largest = job.report.warnings, max(job.report.largest, made.report.largest)
    made.report.cuts, made.report.tokens, made.report.passages = left.cuts, left.tokens, job.report.passages
    warn(made.report, left.notes, tell)
    return made


def warn(report: Report, lines: list[str], tell: Progress) -> None:
    """Said at once, and first in the report."""
    for line in lines:
        tell.note(line)
    report.warnings[:0] = lines


def _walk(job: Job, pipeline: Pipeline, work: Work, texts: Texts, tell: Progress) -> None:
    """Carry out what reads texts; the layers' tensors are then taken from its work."""
    if pipeline.budget is not None:
        errors = sensitivities(job.opened, kinds_for, work, texts, tell, threads_of(pipeline))
        job.choose(_within(job, errors, pipeline.budget))
    kinds = {
        part.target: info.kind
        for info in job.tensors
        for part in job.stored.get(info.name, ())
        if part.target.startswith("layers.") and info.kind not in FLOATS
        if pipeline.folds or not job.copied(info)
    }
    job.made = walked(job.opened, pipeline, kinds, work, texts, tell)
    report_walk(job.report, job.made, tell)


def _within(job: Job, errors: dict[str, dict[str, float]], budget: int) -> list[TensorInfo]:
    """The tensors with the kinds that the budget allows; errors by target."""
    ladders: dict[str, list[Rung]] = {}
    for info in job.tensors:
        parts = [part.target for part in job.stored.get(info.name, ())]
        if parts and all(part in errors for part in parts) and (kinds := kinds_for(info.shape[-1])):
            sizes = {kind: tensor_info(info.name, info.shape, kind).nbytes for kind in kinds}
            ladders[info.name] = [Rung(kind, sum(errors[part][kind] for part in parts), sizes[kind]) for kind in kinds]
    found = chosen(ladders, sum(info.nbytes for info in job.tensors if info.name not in ladders), budget)
    return [tensor_info(info.name, info.shape, found[info.name]) if info.name in found else info for info in job.tensors]


def report_walk(report: Report, made: Made, tell: Progress) -> None:
    """What a walk told goes into the report, and what went other than it should to its head."""
    report.tokens, report.outputs = made.tokens, made.outputs
    warn(report, made.notes, tell)


def finish(
    report: Report, work: Work, made: Made | None, stored: dict[str, list[WeightPart]], pipeline: Pipeline, path: Path
) -> None:
    """The file is whole: write what else is wanted, and let the work go. `stored`: by tensors of a GGUF file."""
    if pipeline.write_imatrix is not None and made is not None:
        measured = {
            name: made.importance(parts[0].target)
            for name, parts in stored.items()
            if parts[0].target.startswith("layers.") and len(parts[0].stored) > 1
        }
        write_imatrix(pipeline.write_imatrix, measured, made.tokens, pipeline.calibrate)
    path.write_text(json.dumps(report.record(), indent=1), "utf-8")
    if not pipeline.keep_work:
        work.remove()


def check_room(path: Path, needed: int) -> None:
    """Raise ValueError where the disk has less."""
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise ValueError(f"{path} takes {human_size(needed)} and {human_size(free)} are free in {path.parent}")


def work_folder(out: Path) -> Path:
    """Where what is done is kept until OUT is whole."""
    return out.with_name(f"{out.name}.work")


def predict(model: str | Path, pipeline: Pipeline | None = None) -> Report:
    """What `compress` would write; errors are not known."""
    return prepare(model, pipeline or Pipeline()).report


def prepare(model: str | Path, pipeline: Pipeline, cut: Opened | None = None) -> Job:
    """Everything but the numbers: names, kinds, metadata; `cut`: the model after its cuts. Raises as `compress` does."""
    pipeline.check()
    if pipeline.layout is not None:
        raise ValueError("layouts are of folders: leave --layout out, or give a name that does not end in .gguf")
    mix = mix_named(pipeline.format)
    head = kind_named(pipeline.head) if pipeline.head is not None else None
    importance = read_imatrix(pipeline.imatrix) if pipeline.imatrix is not None else {}
    opened = cut or open_files(model)
    source, config = opened.source, opened.config
    if config.encoder:
        raise WeightError(f"{opened.path}: encoders ({config.architecture}) are not written as GGUF; use them as they are")
    target = config if isinstance(source, GGUFFile) else gguf_keys.stored_config(config)
    whole = set(stored_as(describe(target), "gguf"))
    if cut is None:
        target = reduce(reshaped, pipeline.cuts, target)
    stored = stored_as(describe(target), "gguf")
    read = {part.target: part for parts in plan(describe(config), source).values() for part in parts}
    given = given_tensors(opened, whole, target)
    if importance and not set(importance) & set(stored):
        raise WeightError(f"{pipeline.imatrix}: has the importance of none of this model's matrices; is it another model's?")

    def kind(name: str, shape: tuple[int, ...]) -> str:
        found = tensor_kind(mix, name, shape[-1], target, bool(importance), head)
        if not pipeline.prunes or not is_pruned(name, shape):
            return found
        if pipeline.walks and found in FLOATS:
            raise ValueError(f"{','.join(pipeline.method)} prunes what it rounds: choose a format of integers, as Q4_0 or Q8_0")
        return zero_kind(found)

    tensors = [tensor_info(name, parts[0].stored, kind(name, parts[0].stored)) for name, parts in stored.items()]
    tensors += [info for info, _ in given.values()]
    if isinstance(source, GGUFFile):
        places = {name: place for place, name in enumerate(source.names())}
        tensors.sort(key=lambda info: places.get(info.name, -1))
    keys = entries(opened, target, _format_entries(pipeline, mix))
    metadata = source.metadata if isinstance(source, GGUFFile) else {}
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    bytes_given = {name: data for name, (_, data) in given.items()}
    job = Job(opened, stored, read, tensors, bytes_given, importance, keys, alignment, pipeline.prunes)
    largest = max((4 * prod(info.shape) for info in tensors if not job.copied(info)), default=0)
    largest = max(largest, reading_bytes(pipeline, config))
    if pipeline.judge is not None:
        largest = max(largest, judge_bytes(config, WINDOW))
    job.report = Report(0, {}, [], largest)
    job.choose(tensors)
    job.report.warnings = _warnings(job, mix, config)
    if pipeline.budget is not None:
        job.report.warnings.append(f"kinds are chosen matrix by matrix when texts are read; {mix} is where that begins")
    return job


def _check_out(path: Path, overwrite: bool) -> None:
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: models are written as one GGUF file; give a name that ends in .gguf")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it first")
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"{path} exists; give another name, or --overwrite")


def _format_entries(pipeline: Pipeline, mix: str) -> dict[str, Any]:
    """What the metadata says of number formats."""
    cut = f" {pipeline.prunes[1]}" if pipeline.prunes else ""
    ours = {
        "general.quantization_version": 2,
        "general.file_type": MIXES[mix][1],
        "headrace.compress": f"{','.join(pipeline.method)}{cut} {mix}",
    }
    return ours if pipeline.imatrix is None else ours | {"quantize.imatrix.file": pipeline.imatrix.name}


def _warnings(job: Job, mix: str, config: ModelConfig) -> list[str]:
    source, found = job.opened.source, []
    again = Counter(
        source.info(job.read[parts[0].target].source).kind
        for info in job.tensors
        if not job.copied(info) and (parts := job.stored.get(info.name))
    )
    rounded = {kind: count for kind, count in again.items() if kind not in FLOATS}
    if rounded:
        kinds = ", ".join(f"{count} {kind}" for kind, count in rounded.items())
        found.append(
            f"{job.opened.path.name} is quantised already ({kinds}): what it lost stays lost, and rounding again loses more; "
            "begin with weights in 16 bits where there are any"
        )
    narrow = [info for info in job.tensors if info.shape[-1] % 256 and len(info.shape) > 1 and info.kind != "F32"]
    if narrow and KINDS[MIXES[mix][0]].block == 256:
        widths = ", ".join(map(str, sorted({info.shape[-1] for info in narrow})))
        kinds = ", ".join(sorted({info.kind for info in narrow}))
        found.append(f"rows of {widths} numbers are no multiple of 256, which K-quants need: such matrices get {kinds}")
    without = [info.name for info in job.tensors if info.kind not in FLOATS and info.name not in job.importance]
    if job.importance and without:
        some = ", ".join([*without[:2], *(["…"] if len(without) > 2 else [])])
        found.append(f"no importance for {len(without)} matrices ({some}): all their inputs count alike")
    return found


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
        job.report.matrices[info.name] = Matrix(one.weights, one.kind, one.nbytes, error, share)


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
            left = pruned(some, job.pruning, weight) if job.pruning and job.pruned(info) else some
            data = encode(left, info.kind, weight, threads)
        except ValueError as error:
            raise WeightError(f"{job.opened.path}: {info.name} {error}") from None
        values_made = dequantize(data.reshape(-1), info.kind).reshape(some.shape)
        yield data, float(np.square(some - values_made, dtype=np.float64).sum()) / energy, int((values_made == 0).sum())
    for part in parts:
        source.release(job.read[part.target].source)


def _coded(job: Job, made: Made, parts: list[WeightPart]) -> Iterator[tuple[np.ndarray, float, int]]:
    """What the walk left of a tensor."""
    reports = [job.report.outputs[part.target] for part in parts]
    lost = sum(one.lost for one in reports) / (sum(one.energy for one in reports) or 1.0)
    rows = write_parts(parts, made.rows).numpy()
    zeros = int((dequantize(rows.reshape(-1), made.kinds[parts[0].target]) == 0).sum()) if job.pruning else 0
    yield rows, lost, zeros
