"""A model rounded, and pruned where that is asked for, written as a folder that Headrace reads, and others where they know the
layout (`weights.quantized.written`)."""

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from headrace.compress.centre import TOKENS
from headrace.compress.export import CONFIG, settings_of, write_json, write_words
from headrace.compress.judge import judge, judge_bytes
from headrace.compress.layouts import layout_of
from headrace.compress.measured import Made, begun, few, kv_measured, threads_of, tokens_wanted, walked
from headrace.compress.pruning import pruned
from headrace.compress.report import Matrix, Pipeline, Report
from headrace.compress.run import CHUNK, check_room, finish, judging_texts, report_walk, warn, work_folder
from headrace.compress.texts import WINDOW, Texts
from headrace.compress.walk import layer_width, peak_bytes
from headrace.data.config import ModelConfig
from headrace.models.gguf_keys import named
from headrace.models.registry import describe
from headrace.quant.encode import encode
from headrace.quant.targets import target
from headrace.startup.opening import Opened, open_files
from headrace.weights.decode import dequantize_numpy
from headrace.weights.describe import COMPRESSED
from headrace.weights.gguf import GGUFFile
from headrace.weights.imatrix import read_imatrix
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.kv_settings import KVSettings
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import WeightPart, plan, stored_as
from headrace.weights.progress import Progress, Silent
from headrace.weights.quantized.written import Layout, TwoFour
from headrace.weights.source import TensorInfo, WeightError
from headrace.weights.write_safetensors import safetensors_header, write_safetensors

SINGLE = "model.safetensors"
_MATRIX = re.compile(r"(?:.*\.)?layers\.\d+\.[\w.]+\.weight")


@dataclass(slots=True)
class Job:
    """All that writing takes, with nothing written yet."""

    opened: Opened
    pipeline: Pipeline
    layout: Layout
    kinds: dict[str, str]  # by stored tensor, of those that stay floats
    stored: dict[str, list[WeightPart]]
    read: dict[str, WeightPart]  # by target
    importance: dict[str, np.ndarray]  # by stored tensor
    tensors: list[TensorInfo]
    report: Report
    made: Made | None = None  # what reading texts left
    kept: KVSettings | None = None  # of K and V

    def rounded(self, name: str) -> bool:
        """Whether a stored tensor becomes integers."""
        return name not in self.kinds


def compress_folder(model: str | Path, out: str | Path, pipeline: Pipeline, tell: Progress | None = None) -> Report:
    """Write a model as a folder; matrix by matrix, so that one is in memory at a time. OUT gets its name when it is whole.

    Raises ValueError (WeightError, TokenizerError, HubError) for what cannot be, before any matrix is read, and OSError.
    """
    tell, path, start = tell or Silent(), Path(out), time.perf_counter()
    if path.exists():
        raise ValueError(f"{path} exists; give another name")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it first")
    job = prepare_folder(model, pipeline)
    check_room(path, job.report.bytes)
    for line in job.report.warnings:
        tell.note(line)
    judged, work = judging_texts(job.opened, pipeline, tell), None
    texts: Texts = []
    if pipeline.walks:
        work, texts = begun(job.opened, pipeline, pipeline.format.lower(), work_folder(path), judged, tell)
        warn(job.report, few(sum(map(len, texts)), layer_width(describe(job.opened.config))), tell)
        kinds = {part.target: pipeline.format for name, parts in job.stored.items() if job.rounded(name) for part in parts}
        job.made = walked(job.opened, pipeline, kinds, work, texts, tell)
        report_walk(job.report, job.made, tell)
    job.kept = kv_measured(job.opened, pipeline, texts, tell)
    _write(job, path, tell)
    if pipeline.judge is not None:
        tell.start("beside the original")
        job.report.judged = judge(job.opened.source, open_files(path).source, judged, pipeline.judge)
        tell.finish()
    job.report.seconds = time.perf_counter() - start
    if work is not None:
        stored = stored_as(describe(named(job.opened.config)), "gguf") if pipeline.write_imatrix is not None else {}
        finish(job.report, work, job.made, stored, pipeline, path.with_name(f"{path.name}.report.json"))
    return job.report


def _write(job: Job, path: Path, tell: Progress) -> None:
    """The folder, which gets its name when it is whole."""
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    tell.start(path.name, sum(info.nbytes for info in job.tensors))
    try:
        part.mkdir()
        _write_settings(job, part)
        write_safetensors(part / SINGLE, job.tensors, _chunks(job, threads_of(job.pipeline), tell))
        part.rename(path)
    finally:
        tell.finish()
        shutil.rmtree(part, ignore_errors=True)


def prepare_folder(model: str | Path, pipeline: Pipeline) -> Job:
    """Everything but the numbers. Raises as `compress_folder` does."""
    pipeline.check()
    if pipeline.cuts:
        raise ValueError(f"{pipeline.cuts[0].method} makes a .gguf file; give it such a name first, then make a folder of that")
    layout = layout_of(pipeline)
    _check(pipeline)
    given = read_imatrix(pipeline.imatrix) if pipeline.imatrix is not None else {}
    opened = open_files(model)
    config = opened.config
    if config.encoder:
        raise WeightError(f"{opened.path}: encoders ({config.architecture}) are not rounded; use them as they are")
    decoder = describe(config)
    stored = stored_as(decoder, "safetensors")
    if any(parts[0].transpose for parts in stored.values()):
        raise WeightError(f"{opened.path}: folders of {config.architecture} hold matrices by columns; write a .gguf file")
    read = {part.target: part for parts in plan(decoder, opened.source).values() for part in parts}
    kinds = {
        name: _float_kind(parts[0], opened, read, pipeline.folds)
        for name, parts in stored.items()
        if not (_is_matrix(name, parts[0]) and layout.fits(*parts[0].stored))
    }
    if len(kinds) == len(stored):
        widths = ", ".join(str(width) for width in sorted({p[0].stored[1] for n, p in stored.items() if _is_matrix(n, p[0])}))
        raise WeightError(f"{opened.path}: rows of {widths} numbers are no whole groups of {pipeline.format}: choose another")
    tensors, matrices = [], {}
    for name, parts in stored.items():
        infos = _infos(name, parts[0].stored, kinds.get(name), layout)
        tensors += infos
        matrices[name] = Matrix(prod(parts[0].stored), kinds.get(name, _called(pipeline, layout)), sum(i.nbytes for i in infos))
    most = max(prod(parts[0].stored) for parts in stored.values())
    largest = 4 * most + most * KINDS[layout.kind].nbytes // KINDS[layout.kind].block
    if pipeline.walks:
        tokens = tokens_wanted(pipeline, layer_width(decoder))
        largest = max(largest, peak_bytes(config, decoder, tokens, min(WINDOW, config.max_position)))
    if pipeline.kv is not None:
        largest = max(largest, peak_bytes(config, decoder, TOKENS, min(WINDOW, config.max_position)))
    if pipeline.judge is not None:
        largest = max(largest, judge_bytes(config, WINDOW))
    size = len(safetensors_header(tensors)) + sum(info.nbytes for info in tensors)
    report = Report(size, matrices, _warnings(opened, stored, kinds, pipeline), largest)
    return Job(opened, pipeline, layout, kinds, stored, read, _by_stored(given, stored, config), tensors, report)


def _check(pipeline: Pipeline) -> None:
    """Raise ValueError for what is of GGUF files alone."""
    if pipeline.head is not None:
        raise ValueError("a folder keeps tables of tokens and the head as they are; leave head out")
    if pipeline.budget is not None:
        raise ValueError("--budget chooses among kinds of GGUF; leave it out, or give a name that ends in .gguf")


def _called(pipeline: Pipeline, layout: Layout) -> str:
    """What the report calls the numbers of matrices."""
    return layout.sparse if isinstance(layout, TwoFour) else pipeline.format.lower()


def _float_kind(part: WeightPart, opened: Opened, read: dict[str, WeightPart], folds: bool) -> str:
    """What is a float stays as it is, other numbers become floats, and so do vectors that scales are folded into."""
    kind = opened.source.info(read[part.target].source).kind
    if folds and len(part.stored) == 1:
        return "F32"
    return kind if kind in FLOATS else "BF16" if len(part.stored) > 1 else "F32"


def _is_matrix(name: str, part: WeightPart) -> bool:
    return len(part.stored) == 2 and _MATRIX.fullmatch(name) is not None


def _infos(name: str, shape: tuple[int, ...], kind: str | None, layout: Layout) -> list[TensorInfo]:
    """The tensors of a folder that stand for one of the model; `kind`: of floats."""
    if kind is not None:
        return [TensorInfo(name, shape, kind, prod(shape) * KINDS[kind].nbytes)]
    matrix = name.removesuffix("weight")
    return [TensorInfo(f"{matrix}{one.name}", one.shape, one.type, one.nbytes) for one in layout.fields(*shape)]


def _by_stored(given: dict[str, np.ndarray], stored: dict[str, list[WeightPart]], config: ModelConfig) -> dict[str, np.ndarray]:
    """Importances, which files have by the names of GGUF, by those of the folder."""
    if not given:
        return {}
    targets = {part.target: name for name, parts in stored_as(describe(named(config)), "gguf").items() for part in parts}
    found = {name: given.get(targets[parts[0].target]) for name, parts in stored.items()}
    return {name: values for name, values in found.items() if values is not None}


def _warnings(opened: Opened, stored: dict[str, list[WeightPart]], kinds: dict[str, str], pipeline: Pipeline) -> list[str]:
    found = []
    whole = {parts[0].stored for name, parts in stored.items() if name in kinds and _is_matrix(name, parts[0])}
    if whole:
        sizes = ", ".join(f"{n} x {k}" for n, k in sorted(whole))
        zeros = " with their zeros" if pipeline.prunes and not pipeline.walks else ""
        found.append(f"matrices of {sizes} are no whole groups of {pipeline.format}: they are written as floats{zeros}")
    sources = {opened.source.info(name).kind for name in opened.source.names()}
    if sources - set(FLOATS):
        found.append(
            f"{opened.path.name} is quantised already: what it lost stays lost; begin with 16 bits where there are any"
        )
    return found


def _write_settings(job: Job, folder: Path) -> None:
    """config.json, tokenizer and template. Raises ValueError where the tokenizer read back is another one."""
    opened = job.opened
    write_words(opened, folder)
    source = opened.source
    config = settings_of(opened, opened.config) if isinstance(source, GGUFFile) else dict(source.config)
    whole = [name.removesuffix(".weight") for name in job.kinds if _is_matrix(name, job.stored[name][0])]
    config["quantization_config"] = job.layout.settings(whole)
    write_json(folder / CONFIG, config)
    kept = {} if job.kept is None else {"kv": job.kept.record()}
    write_json(folder / COMPRESSED, {"compress": said(job.pipeline), **kept})


def said(pipeline: Pipeline) -> str:
    """What was done to a model, in one line: "awq,gptq int4-g128"."""
    cut = f" {pipeline.prunes[1]}" if pipeline.prunes else ""
    return f"{','.join(pipeline.method)}{cut} {pipeline.format.lower()}"


def _chunks(job: Job, threads: int, tell: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors' bytes in order; fills in the report what error each has."""
    for name, parts in job.stored.items():
        try:
            if job.rounded(name):
                rows, error, zeros = _rows(job, name, threads)
                largest = max(job.made.told[part.target].largest for part in parts) if job.made is not None else 0.0
                arrays = list(job.layout.tensors(rows, largest).values())
            else:
                data, zeros = _floats(job, name)
                arrays, error = [data], 0.0
        except ValueError as problem:
            raise WeightError(f"{job.opened.path}: {name} {problem}") from None
        for info, data in zip(_infos(name, parts[0].stored, job.kinds.get(name), job.layout), arrays, strict=True):
            tell.advance(data.nbytes)
            yield info.name, data
        one = job.report.matrices[name]
        job.report.matrices[name] = Matrix(one.weights, one.kind, one.nbytes, error, zeros)
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
    if how is not None and not job.pipeline.walks and _is_matrix(name, job.stored[name][0]):
        values = pruned(values, how, job.importance.get(name))
        zeros = float((values == 0).mean())
    return encode(values.reshape(-1, values.shape[-1]), job.kinds[name]), zeros


def _rows(job: Job, name: str, threads: int) -> tuple[np.ndarray, float, float | None]:
    """Rows of a matrix, their square error over squares, and the share of zeros of one that is pruned."""
    made, how, parts, kind = job.made, job.pipeline.prunes, job.stored[name], job.layout.kind
    if made is not None:
        told = [made.told[part.target] for part in parts]
        rows = write_parts(parts, made.rows).numpy()
        error = sum(one.lost for one in told) / (sum(one.energy for one in told) or 1.0)
        return rows, error, float((dequantize_numpy(rows.reshape(-1), kind) == 0).mean()) if how else None
    values, weight, to = _values(job, name), job.importance.get(name), target(job.pipeline.format)
    step, pieces, lost, zeros = max(1, CHUNK // values.shape[1]), [], 0.0, 0
    for at in range(0, len(values), step):
        some = values[at : at + step]
        pieces.append(to.encode(some if how is None else pruned(some, how, weight), weight, threads))
        read = dequantize_numpy(pieces[-1].reshape(-1), kind).reshape(some.shape)
        lost += float(np.square(some - read, dtype=np.float64).sum())
        zeros += int((read == 0).sum())
    energy = float(np.square(values, dtype=np.float64).sum()) or 1.0
    return np.concatenate(pieces), lost / energy, zeros / values.size if how else None
