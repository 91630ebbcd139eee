"""What a GGUF file is to be: its tensors, their kinds, its metadata. Nothing is written yet."""

from collections import Counter
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headrace.compress.budget import check_budget, gguf_ladder
from headrace.compress.calibration_pass import PassOutput, reading_bytes
from headrace.compress.container import entries, given_tensors, tensor_info
from headrace.compress.grids.keep import Sparsity
from headrace.compress.judge import judge_bytes
from headrace.compress.mixes import MIXES, kind_named, mix_named, tensor_kind
from headrace.compress.pipeline import Pipeline
from headrace.compress.pruning import is_pruned, zero_kind
from headrace.compress.report import MatrixReport, Report, kv_report
from headrace.compress.structure import pruned_config
from headrace.compress.texts import WINDOW
from headrace.data.config import ModelConfig
from headrace.kv.layout import kv_shape
from headrace.models import gguf_keys
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_files
from headrace.weights.gguf import DEFAULT_ALIGNMENT, GGUFFile
from headrace.weights.imatrix import check_widths, read_imatrix
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.kv_settings import KVSettings
from headrace.weights.parts import WeightPart, plan, stored_as
from headrace.weights.source import TensorInfo, WeightError
from headrace.weights.write_gguf import entry, file_size


@dataclass(slots=True)
class Job:
    """All that writing takes, with nothing written yet."""

    opened: Opened
    stored: dict[str, list[WeightPart]]  # by tensor of the file to be written
    read: dict[str, WeightPart]  # by target
    tensors: list[TensorInfo]
    given: dict[str, np.ndarray]  # bytes of tensors that no parameter has
    importance: dict[str, np.ndarray]
    keys: list[bytes]  # of the metadata, but for those of K and V
    alignment: int
    pruning: tuple[str, Sparsity] | None = None
    kept: KVSettings | None = None  # of K and V; zeros until the mean of keys is measured
    report: Report = field(init=False)
    made: PassOutput | None = None  # what reading texts left

    @property
    def entries(self) -> list[bytes]:
        """The metadata."""
        asked = {} if self.kept is None else self.kept.metadata()
        return self.keys + [entry(key, value) for key, value in asked.items()]

    def choose(self, tensors: list[TensorInfo]) -> None:
        """These kinds are written."""
        self.tensors = tensors
        self.report.matrices = {info.name: MatrixReport(prod(info.shape), info.kind, info.nbytes) for info in tensors}
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
        target = reduce(pruned_config, pipeline.cuts, target)
    stored = stored_as(describe(target), "gguf")
    read = {part.target: part for parts in plan(describe(config), source).values() for part in parts}
    given = given_tensors(opened, whole, target)
    if importance and not set(importance) & set(stored):
        raise WeightError(f"{pipeline.imatrix}: has the importance of none of this model's matrices; is it another model's?")
    check_widths(pipeline.imatrix, importance, {name: parts[0].stored[-1] for name, parts in stored.items()})

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
    shape = kv_shape(target)
    kept = (
        None if pipeline.kv is None else KVSettings(pipeline.kv, np.zeros((shape.layers, shape.heads * shape.head_dim), "f4"))
    )
    job = Job(opened, stored, read, tensors, bytes_given, importance, keys, alignment, pipeline.prunes, kept)
    largest = max((4 * prod(info.shape) for info in tensors if not job.copied(info)), default=0)
    largest = max(largest, reading_bytes(pipeline, opened, cut is not None))
    if pipeline.judge is not None:
        largest = max(largest, judge_bytes(config, WINDOW))
    job.report = Report(0, {}, [], largest, kv_report(config, target, pipeline.kv))
    job.choose(tensors)
    job.report.warnings = _warnings(job, mix, config)
    if pipeline.budget is not None:
        check_budget(sum(_least_bytes(job, info) for info in tensors), pipeline.budget)
        job.report.warnings.append(f"kinds are chosen matrix by matrix when texts are read; {mix} is where that begins")
    return job


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


def _least_bytes(job: Job, info: TensorInfo) -> int:
    """Those of a tensor in the fewest bits that a budget may choose: matrices of layers have some to choose from."""
    parts = [part.target for part in job.stored.get(info.name, ())]
    matrix = len(info.shape) == 2 and bool(parts) and all(part.startswith("layers.") for part in parts)
    kinds = gguf_ladder(info.shape[-1]) if matrix else ()
    return tensor_info(info.name, info.shape, kinds[0]).nbytes if kinds else info.nbytes
