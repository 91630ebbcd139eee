"""compress: a model written again in fewer bytes. `plan` says what will be written; `compress` writes it."""

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
import torch

from headrace.compress.mixes import MIXES, kind_named, mix_named, tensor_kind
from headrace.compress.pruning import is_pruned, pruned, pruning, zero_kind
from headrace.data.config import ModelConfig
from headrace.models import gguf_keys
from headrace.models.registry import describe
from headrace.quant.encode import encode
from headrace.quant.keep import Sparsity
from headrace.startup.opening import Opened, open_files
from headrace.text.gguf_keys import tokenizer_keys
from headrace.weights.dequant import dequantize
from headrace.weights.gguf import DEFAULT_ALIGNMENT, GGUFFile
from headrace.weights.imatrix import read_imatrix
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import WeightPart, plan, stored_as
from headrace.weights.progress import Progress, Silent, human_size
from headrace.weights.source import TensorInfo, WeightError
from headrace.weights.write_gguf import Chunks, entry, file_size, write_gguf

CHUNK = 1 << 22  # numbers encoded between two writes
OURS = re.compile(r"general\.(file_type|quantization_version|alignment)|quantize\..*|headrace\..*")  # keys not copied


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What is done to a model. `format`: a name of mixes.MIXES. `method`, `sparsity`: as pruning.pruning takes them. `head`: a
    kind for the output projection alone. `imatrix`: a file of importances. `threads` 0: as many as there are cores for this
    process."""

    format: str = "Q4_K_M"
    method: str = "rtn"
    sparsity: str | None = None
    head: str | None = None
    imatrix: Path | None = None
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Matrix:
    """What became of a tensor: its numbers, kind and bytes; mean square error over mean square (0 where it was copied), and,
    where it was pruned, the share of its numbers that are 0."""

    weights: int
    kind: str
    nbytes: int
    error: float | None = None  # None: not written yet
    zeros: float | None = None


@dataclass(slots=True)
class Report:
    """What was written, or will be. `largest`: bytes in memory besides the mapped model, for the largest matrix as float32."""

    bytes: int
    matrices: dict[str, Matrix]
    warnings: list[str]
    largest: int
    seconds: float = 0.0

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

    def pruned(self, info: TensorInfo) -> bool:
        """Whether some of the tensor's numbers become 0."""
        return self.pruning is not None and is_pruned(info.name, info.shape)

    def copied(self, info: TensorInfo) -> bool:
        """Whether the tensor's bytes in the file read are those that are written."""
        source = self.opened.source
        same = isinstance(source, GGUFFile) and info.name in source.names() and source.info(info.name) == info
        return same and not self.pruned(info)


def compress(
    model: str | Path, out: str | Path, pipeline: Pipeline | None = None, tell: Progress | None = None, overwrite: bool = False
) -> Report:
    """Write a model as a GGUF file; matrix by matrix, so that one is in memory at a time.

    Raises ValueError (WeightError, TokenizerError, HubError) for what cannot be, before anything is written, and OSError.
    """
    tell, path, start = tell or Silent(), Path(out), time.perf_counter()
    _check_out(path, overwrite)
    pipeline = pipeline or Pipeline()
    job = prepare(model, pipeline)
    if path.exists() and path.samefile(job.opened.path):
        raise ValueError(f"{path} is the model that is read; give another name")
    free = shutil.disk_usage(path.parent).free
    if job.report.bytes > free:
        raise ValueError(f"{path} takes {human_size(job.report.bytes)} and {human_size(free)} are free in {path.parent}")
    for line in job.report.warnings:
        tell.note(line)
    tell.start(path.name, sum(info.nbytes for info in job.tensors))
    try:
        write_gguf(path, job.entries, job.tensors, _chunks(job, pipeline, tell.advance), job.alignment)
    finally:
        tell.finish()
    job.report.seconds = time.perf_counter() - start
    return job.report


def predict(model: str | Path, pipeline: Pipeline | None = None) -> Report:
    """What `compress` would write; errors are not known."""
    return prepare(model, pipeline or Pipeline()).report


def prepare(model: str | Path, pipeline: Pipeline) -> Job:
    """Everything but the numbers: names, kinds, metadata. Raises as `compress` does."""
    mix = mix_named(pipeline.format)
    head = kind_named(pipeline.head) if pipeline.head is not None else None
    cut = pruning(pipeline.method, pipeline.sparsity, pipeline.imatrix is not None)
    importance = read_imatrix(pipeline.imatrix) if pipeline.imatrix is not None else {}
    opened = open_files(model)
    source, config = opened.source, opened.config
    if config.encoder:
        raise WeightError(f"{opened.path}: encoders ({config.architecture}) are not written as GGUF; use them as they are")
    target = config if isinstance(source, GGUFFile) else gguf_keys.stored_config(config)
    stored = stored_as(describe(target), "gguf")
    read = {part.target: part for parts in plan(describe(config), source).values() for part in parts}
    given = _given(opened, set(stored), target)
    if importance and not set(importance) & set(stored):
        raise WeightError(f"{pipeline.imatrix}: has the importance of none of this model's matrices; is it another model's?")

    def kind(name: str, shape: tuple[int, ...]) -> str:
        found = tensor_kind(mix, name, shape[-1], target, bool(importance), head)
        return zero_kind(found) if cut and is_pruned(name, shape) else found

    tensors = [_info(name, parts[0].stored, kind(name, parts[0].stored)) for name, parts in stored.items()]
    tensors += [info for info, _ in given.values()]
    if isinstance(source, GGUFFile):
        places = {name: place for place, name in enumerate(source.names())}
        tensors.sort(key=lambda info: places.get(info.name, -1))
    entries = _entries(opened, target, pipeline, mix, cut)
    said = source.metadata if isinstance(source, GGUFFile) else {}
    alignment = said.get("general.alignment", DEFAULT_ALIGNMENT)
    bytes_given = {name: data for name, (_, data) in given.items()}
    job = Job(opened, stored, read, tensors, bytes_given, importance, entries, alignment, cut)
    matrices = {info.name: Matrix(prod(info.shape), info.kind, info.nbytes) for info in tensors}
    largest = max((4 * prod(info.shape) for info in tensors if not job.copied(info)), default=0)
    job.report = Report(file_size(entries, tensors, alignment), matrices, _warnings(job, mix, config), largest)
    return job


def _check_out(path: Path, overwrite: bool) -> None:
    if path.suffix != ".gguf":
        raise ValueError(f"{path}: models are written as one GGUF file; give a name that ends in .gguf")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it first")
    if path.is_dir() or (path.exists() and not overwrite):
        raise ValueError(f"{path} exists; give another name, or --overwrite")


def _info(name: str, shape: tuple[int, ...], kind: str) -> TensorInfo:
    block, nbytes = KINDS[kind]
    return TensorInfo(name, shape, kind, prod(shape) // block * nbytes)


def _given(opened: Opened, stored: set[str], target: ModelConfig) -> dict[str, tuple[TensorInfo, np.ndarray]]:
    """Tensors that no parameter has: copied from a GGUF file, made for a folder."""
    source = opened.source
    if isinstance(source, GGUFFile):
        return {name: (source.info(name), source.raw(name)) for name in source.names() if name not in stored}
    made = gguf_keys.made_tensors(target)
    return {name: (_info(name, data.shape, "F32"), data.view(np.uint8)) for name, data in made.items()}


def _entries(
    opened: Opened, target: ModelConfig, pipeline: Pipeline, mix: str, cut: tuple[str, Sparsity] | None
) -> list[bytes]:
    """The metadata: of a GGUF file byte for byte, but for what is said of number formats."""
    source = opened.source
    done = f"{cut[0]} {cut[1]}, rtn {mix}" if cut else f"rtn {mix}"
    ours = {"general.quantization_version": 2, "general.file_type": MIXES[mix][1], "headrace.compress": done}
    if pipeline.imatrix is not None:
        ours |= {"quantize.imatrix.file": pipeline.imatrix.name}
    if isinstance(source, GGUFFile):
        copied = [source.entry(key) for key in source.metadata if key == "general.alignment" or not OURS.fullmatch(key)]
        return copied + [entry(key, value) for key, value in ours.items()]
    keys = gguf_keys.metadata(target) | {"general.name": opened.path.name}
    keys |= tokenizer_keys(opened.path, target.vocab_size) | ours
    return [entry(key, value) for key, value in keys.items()]


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
    threads = pipeline.threads or len(os.sched_getaffinity(0))
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
    values = write_parts(job.stored[info.name], lambda target: read_part(job.read[target], source, torch.float32)).numpy()
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
        made = dequantize(data.reshape(-1), info.kind).reshape(some.shape)
        yield data, float(np.square(some - made, dtype=np.float64).sum()) / energy, int((made == 0).sum())
    for part in job.stored[info.name]:
        source.release(job.read[part.target].source)
