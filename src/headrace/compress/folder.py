"""A model pruned to 2:4 and rounded, written as a folder that Headrace reads (`weights.quantized.two_four`)."""

import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from headrace.compress.export import CONFIG, settings_of, write_json, write_words
from headrace.compress.measured import threads_of
from headrace.compress.pruning import pruned
from headrace.compress.report import Matrix, Pipeline, Report
from headrace.compress.run import CHUNK
from headrace.data.config import ModelConfig
from headrace.models.gguf_keys import named
from headrace.models.registry import describe
from headrace.quant.encode import encode
from headrace.quant.keep import Sparsity
from headrace.startup.opening import Opened, open_files
from headrace.weights.decode import dequantize_numpy
from headrace.weights.gguf import GGUFFile
from headrace.weights.imatrix import read_imatrix
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import WeightPart, plan, stored_as
from headrace.weights.progress import Progress, Silent, human_size
from headrace.weights.quantized.two_four import METHOD, stored_parts
from headrace.weights.source import TensorInfo, WeightError
from headrace.weights.sparse import DENSE, from_dense
from headrace.weights.write_safetensors import safetensors_header, write_safetensors

FORMATS = {"int4-g32-sym": "S4", "int8-g32-sym": "S8"}
BLOCK = 32
SINGLE = "model.safetensors"
_MATRIX = re.compile(r"(?:.*\.)?layers\.\d+\.[\w.]+\.weight")
_TYPES = {"S4": ("U8", "U8", "F16"), "S8": ("I8", "U8", "F16")}  # of the fields


@dataclass(slots=True)
class Job:
    """All that writing takes, with nothing written yet."""

    opened: Opened
    how: tuple[str, Sparsity]
    kinds: dict[str, str]  # by stored tensor
    stored: dict[str, list[WeightPart]]
    read: dict[str, WeightPart]  # by target
    importance: dict[str, np.ndarray]  # by stored tensor
    tensors: list[TensorInfo]
    report: Report


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
    free = shutil.disk_usage(path.parent).free
    if job.report.bytes > free:
        raise ValueError(f"{path} takes {human_size(job.report.bytes)} and {human_size(free)} are free in {path.parent}")
    for line in job.report.warnings:
        tell.note(line)
    part = path.with_name(f".{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    tell.start(path.name, sum(info.nbytes for info in job.tensors))
    try:
        part.mkdir()
        _write_settings(job, part)
        write_safetensors(part / SINGLE, job.tensors, _chunks(job, threads_of(pipeline), tell))
        part.rename(path)
    finally:
        tell.finish()
        shutil.rmtree(part, ignore_errors=True)
    job.report.seconds = time.perf_counter() - start
    return job.report


def prepare_folder(model: str | Path, pipeline: Pipeline) -> Job:
    """Everything but the numbers. Raises as `compress_folder` does."""
    pipeline.check()
    how = pipeline.prunes
    kind = FORMATS.get(pipeline.format.lower())
    if how is None or str(how[1]) != "2:4" or kind is None:
        raise ValueError(
            "a folder is written of models with 2:4: give --method magnitude --sparsity 2:4 and --format "
            f"{' or '.join(FORMATS)}; or, for all else, a name that ends in .gguf"
        )
    if pipeline.cuts:
        raise ValueError(f"{pipeline.cuts[0].method} makes a .gguf file; give it such a name first, then make a folder of that")
    if pipeline.walks:
        raise ValueError("folders with 2:4 are written without texts: --method magnitude, or wanda with --imatrix FILE")
    if pipeline.judge is not None:
        raise ValueError("--judge reads .gguf files; leave it out, and compare with headrace perplexity")
    if pipeline.head is not None:
        raise ValueError("a folder with 2:4 keeps tables of tokens and the head as they are; leave head out")
    given = read_imatrix(pipeline.imatrix) if pipeline.imatrix is not None else {}
    opened = open_files(model)
    config = opened.config
    if config.encoder:
        raise WeightError(f"{opened.path}: encoders ({config.architecture}) are not pruned; use them as they are")
    stored = stored_as(describe(config), "safetensors")
    if any(parts[0].transpose for parts in stored.values()):
        raise WeightError(f"{opened.path}: folders of {config.architecture} hold matrices by columns; write a .gguf file")
    read = {part.target: part for parts in plan(describe(config), opened.source).values() for part in parts}
    kinds = {name: _kind(name, parts[0], opened, read, kind) for name, parts in stored.items()}
    tensors = [info for name, parts in stored.items() for info in _infos(name, parts[0].stored, kinds[name])]
    matrices = {
        name: Matrix(
            prod(parts[0].stored), kinds[name], prod(parts[0].stored) * KINDS[kinds[name]].nbytes // KINDS[kinds[name]].block
        )
        for name, parts in stored.items()
    }
    largest = 4 * max(prod(parts[0].stored) for parts in stored.values())
    size = len(safetensors_header(tensors)) + sum(info.nbytes for info in tensors)
    report = Report(size, matrices, _warnings(opened, stored, kinds), largest)
    return Job(opened, how, kinds, stored, read, _by_stored(given, stored, config), tensors, report)


def _kind(name: str, part: WeightPart, opened: Opened, read: dict[str, WeightPart], sparse: str) -> str:
    """Matrices of layers become sparse; what is a float stays as it is, other numbers become floats."""
    if _is_matrix(name, part) and part.stored[1] % BLOCK == 0:
        return sparse
    kind = opened.source.info(read[part.target].source).kind
    return kind if kind in FLOATS else "BF16" if len(part.stored) > 1 else "F32"


def _is_matrix(name: str, part: WeightPart) -> bool:
    return len(part.stored) == 2 and _MATRIX.fullmatch(name) is not None


def _infos(name: str, shape: tuple[int, ...], kind: str) -> list[TensorInfo]:
    if kind not in _TYPES:
        return [TensorInfo(name, shape, kind, prod(shape) * KINDS[kind].nbytes)]
    n, k = shape
    columns = (k // 4 if kind == "S4" else k // 2, k // 8, k // BLOCK)
    fields = (f"{name}_packed", f"{name}_index", f"{name}_scale")
    return [
        TensorInfo(field, (n, size), stored, n * size * (2 if stored == "F16" else 1))
        for field, size, stored in zip(fields, columns, _TYPES[kind], strict=True)
    ]


def _by_stored(given: dict[str, np.ndarray], stored: dict[str, list[WeightPart]], config: ModelConfig) -> dict[str, np.ndarray]:
    """Importances, which files have by the names of GGUF, by those of the folder."""
    if not given:
        return {}
    targets = {part.target: name for name, parts in stored_as(describe(named(config)), "gguf").items() for part in parts}
    found = {name: given.get(targets[parts[0].target]) for name, parts in stored.items()}
    return {name: values for name, values in found.items() if values is not None}


def _warnings(opened: Opened, stored: dict[str, list[WeightPart]], kinds: dict[str, str]) -> list[str]:
    found = []
    whole = [parts[0].stored[1] for name, parts in stored.items() if _is_matrix(name, parts[0]) and kinds[name] not in _TYPES]
    if whole:
        found.append(f"rows of {whole[0]} numbers are no multiple of {BLOCK}: such matrices are written with their zeros")
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
    bits = max(int(kind[1:]) for kind in job.kinds.values() if kind in _TYPES)
    config["quantization_config"] = {"quant_method": METHOD, "bits": bits, "group_size": BLOCK}
    write_json(folder / CONFIG, config)


def _chunks(job: Job, threads: int, tell: Progress) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors' bytes in order; fills in the report what error each has."""
    source = job.opened.source
    for name, parts in job.stored.items():
        kind = job.kinds[name]
        values = write_parts(parts, lambda target: read_part(job.read[target], source, torch.float32)).numpy()
        rows = values.reshape(-1, values.shape[-1])
        try:
            made, error, zeros = (
                _made(job, name, rows, threads) if _is_matrix(name, parts[0]) else (encode(rows, kind), 0.0, None)
            )
        except ValueError as problem:
            raise WeightError(f"{job.opened.path}: {name} {problem}") from None
        fields = stored_parts(kind, made) if kind in _TYPES else {"weight": made}
        for info, data in zip(_infos(name, parts[0].stored, kind), fields.values(), strict=True):
            tell.advance(data.nbytes)
            yield info.name, data
        one = job.report.matrices[name]
        job.report.matrices[name] = Matrix(one.weights, one.kind, one.nbytes, error, zeros)
        for part in parts:
            source.release(job.read[part.target].source)


def _made(job: Job, name: str, rows: np.ndarray, threads: int) -> tuple[np.ndarray, float, float]:
    """Rows of a pruned matrix, their square error over squares, and the share of zeros."""
    kind, weight = job.kinds[name], job.importance.get(name)
    step, pieces, lost, zeros = max(1, CHUNK // rows.shape[1]), [], 0.0, 0
    for at in range(0, len(rows), step):
        some = rows[at : at + step]
        stored = encode(pruned(some, job.how, weight), DENSE.get(kind, kind), weight, threads)
        pieces.append(from_dense(kind, stored) if kind in DENSE else stored)
        values = dequantize_numpy(pieces[-1].reshape(-1), kind).reshape(some.shape)
        lost += float(np.square(some - values, dtype=np.float64).sum())
        zeros += int((values == 0).sum())
    energy = float(np.square(rows, dtype=np.float64).sum()) or 1.0
    return np.concatenate(pieces), lost / energy, zeros / rows.size
