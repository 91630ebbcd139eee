"""What a folder is to hold: which matrices are rounded and to which format, names, sizes, settings; with nothing written
yet."""

import re
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from headrace.compress.budget import check_budget, integer_ladder
from headrace.compress.calibration_pass import PassOutput, reading_bytes
from headrace.compress.export import settings_of
from headrace.compress.judge import judge_bytes
from headrace.compress.layer_pass import LIBRARIES
from headrace.compress.layouts import check_mixed, grouped, layout_of, settings_of_layouts
from headrace.compress.pipeline import Pipeline
from headrace.compress.report import MatrixReport, Report, kv_report
from headrace.compress.structure import pruned_config
from headrace.compress.texts import WINDOW
from headrace.data.config import ModelConfig
from headrace.models import gguf_keys
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_files
from headrace.weights.gguf import GGUFFile
from headrace.weights.imatrix import check_widths, read_imatrix
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.kv_settings import KVSettings
from headrace.weights.parts import WeightPart, plan, stored_as
from headrace.weights.quantized.written import Layout, TwoFour
from headrace.weights.source import TensorInfo, WeightError
from headrace.weights.write_safetensors import safetensors_header

_MATRIX = re.compile(r"(?:.*\.)?layers\.\d+\.[\w.]+\.weight")


@dataclass(slots=True)
class Job:
    """All that writing takes, with nothing written yet."""

    origin: Opened  # whose words and settings the folder gets
    opened: Opened  # whose numbers: the same, or what its cuts left
    pipeline: Pipeline
    layouts: dict[str, Layout]  # by stored tensor, of those that are rounded
    formats: dict[str, str]  # theirs
    kinds: dict[str, str]  # by stored tensor, of those that stay floats
    stored: dict[str, list[WeightPart]]
    read: dict[str, WeightPart]  # by target
    importance: dict[str, np.ndarray]  # by stored tensor
    config: dict[str, Any]
    report: Report = field(init=False)
    made: PassOutput | None = None  # what reading texts left
    kept: KVSettings | None = None  # of K and V

    def infos(self, name: str) -> list[TensorInfo]:
        """The tensors of a folder that stand for one of the model."""
        shape, layout = self.stored[name][0].stored, self.layouts.get(name)
        if layout is None:
            kind = self.kinds[name]
            return [TensorInfo(name, shape, kind, prod(shape) * KINDS[kind].nbytes)]
        return infos_of(name, shape, layout)

    @property
    def tensors(self) -> list[TensorInfo]:
        """All of them, in their order."""
        return [info for name in self.stored for info in self.infos(name)]

    def choose(self, formats: dict[str, str]) -> None:
        """Some matrices get these formats."""
        self.layouts |= {name: grouped(format) for name, format in formats.items()}
        self.formats |= formats

    def measure(self) -> None:
        """The report's bytes are those of what is chosen."""
        tensors = self.tensors
        self.report.bytes = len(safetensors_header(tensors)) + sum(info.nbytes for info in tensors)
        self.report.matrices = {name: self._matrix(name) for name in self.stored}

    def _matrix(self, name: str) -> MatrixReport:
        """As the report has it, not written yet."""
        layout = self.layouts.get(name)
        called = layout.sparse if isinstance(layout, TwoFour) else self.kinds.get(name) or self.formats[name]
        return MatrixReport(prod(self.stored[name][0].stored), called, sum(info.nbytes for info in self.infos(name)))


def prepare_folder(model: str | Path, pipeline: Pipeline) -> Job:
    """Everything but the numbers. Raises as `compress_folder` does."""
    pipeline.check()
    layout_of(pipeline)
    return prepared(open_files(model), None, pipeline)


def prepared(origin: Opened, cut: Opened | None, pipeline: Pipeline) -> Job:
    """The same of a model that is open; `cut`: after its cuts."""
    layout = layout_of(pipeline)
    given = read_imatrix(pipeline.imatrix) if pipeline.imatrix is not None else {}
    opened = cut or origin
    config = opened.config
    if config.encoder:
        raise WeightError(f"{opened.path}: encoders ({config.architecture}) are not rounded; use them as they are")
    if pipeline.cuts and not isinstance(origin.source, GGUFFile):
        gguf_keys.stored_config(origin.config)  # what the cuts leave is such a file
    final = config if cut is not None else reduce(pruned_config, pipeline.cuts, config)
    stored = stored_as(describe(final), "safetensors")
    if any(parts[0].transpose for parts in stored.values()):
        raise WeightError(f"{opened.path}: folders of {config.architecture} hold matrices by columns; write a .gguf file")
    read, before = _read(opened), _read(origin)
    layouts = {name: layout for name, parts in stored.items() if is_matrix(name, parts[0]) and layout.fits(*parts[0].stored)}
    if not layouts:
        widths = ", ".join(str(width) for width in sorted({p[0].stored[1] for n, p in stored.items() if is_matrix(n, p[0])}))
        raise WeightError(f"{opened.path}: rows of {widths} numbers are no whole groups of {pipeline.format}: choose another")
    kinds = {
        name: _float_kind(parts[0], origin, before, pipeline.folds) for name, parts in stored.items() if name not in layouts
    }
    formats = dict.fromkeys(layouts, pipeline.format.lower())
    importance = _by_stored(given, stored, config)
    check_widths(pipeline.imatrix, importance, {name: parts[0].stored[-1] for name, parts in stored.items()})
    job = Job(origin, opened, pipeline, layouts, formats, kinds, stored, read, importance, _config(origin, final, pipeline))
    if pipeline.budget is not None:
        check_mixed(layout, "--budget")
        integer_ladder(pipeline.format.lower())
    if pipeline.head is not None:
        check_mixed(layout, "--head")
        head = _head(job)
        job.choose({head: pipeline.head.lower()})
        del kinds[head]
    if pipeline.budget is not None:
        check_budget(sum(info.nbytes for info in job.tensors), pipeline.budget)
    job.config["quantization_config"] = quantization_of(job)
    job.report = Report(0, {}, _warnings(job), _largest(job, config), kv_report(config, final, pipeline.kv))
    job.measure()
    return job


def _config(origin: Opened, final: ModelConfig, pipeline: Pipeline) -> dict[str, Any]:
    """config.json but for what it says of integers. Raises ValueError for an architecture that is not translated."""
    if pipeline.cuts or isinstance(origin.source, GGUFFile):
        return settings_of(origin, final)
    return dict(origin.source.config)


def quantization_of(job: Job) -> dict[str, Any]:
    """quantization_config."""
    whole = [name.removesuffix(".weight") for name in job.kinds if is_matrix(name, job.stored[name][0])]
    by_name = job.pipeline.head is not None or job.pipeline.budget is not None
    return settings_of_layouts(job.layouts, whole, by_name)


def _head(job: Job) -> str:
    """The stored tensor of the output projection, which may be the table of tokens. Raises ValueError where its rows are no
    whole groups of the format that it is to have."""
    targets = {parts[0].target: name for name, parts in job.stored.items()}
    name = targets.get("output.weight") or targets["tokens.weight"]
    assert job.pipeline.head is not None
    n, width = job.stored[name][0].stored
    if not grouped(job.pipeline.head).fits(n, width):
        raise ValueError(
            f"the head's rows of {width} numbers are no whole groups of {job.pipeline.head}: choose another --head"
        )
    return name


def _largest(job: Job, config: ModelConfig) -> int:
    """The most bytes in memory."""
    sizes = [(prod(parts[0].stored), name) for name, parts in job.stored.items()]
    kinds = {name: KINDS[kind] for name, kind in job.kinds.items()}
    kinds |= {name: KINDS[layout.kind] for name, layout in job.layouts.items()}
    largest = LIBRARIES + max(4 * size + size * kinds[name].nbytes // kinds[name].block for size, name in sizes)
    largest = max(largest, reading_bytes(job.pipeline, job.opened, job.opened is not job.origin))
    if job.pipeline.judge is not None:
        largest = max(largest, judge_bytes(config, WINDOW))
    return largest


def _read(opened: Opened) -> dict[str, WeightPart]:
    """Where the parts of a model's parameters are, by target."""
    return {part.target: part for parts in plan(describe(opened.config), opened.source).values() for part in parts}


def _float_kind(part: WeightPart, origin: Opened, read: dict[str, WeightPart], folds: bool) -> str:
    """What is a float stays as it is, other numbers become floats, and so do vectors that scales are folded into."""
    kind = origin.source.info(read[part.target].source).kind
    if folds and len(part.stored) == 1:
        return "F32"
    return kind if kind in FLOATS else "BF16" if len(part.stored) > 1 else "F32"


def is_matrix(name: str, part: WeightPart) -> bool:
    return len(part.stored) == 2 and _MATRIX.fullmatch(name) is not None


def infos_of(name: str, shape: tuple[int, ...], layout: Layout) -> list[TensorInfo]:
    """The tensors that stand for a matrix."""
    matrix = name.removesuffix("weight")
    return [TensorInfo(f"{matrix}{one.name}", one.shape, one.type, one.nbytes) for one in layout.fields(*shape)]


def _by_stored(given: dict[str, np.ndarray], stored: dict[str, list[WeightPart]], config: ModelConfig) -> dict[str, np.ndarray]:
    """Importances, which files have by the names of GGUF, by those of the folder."""
    if not given:
        return {}
    names = stored_as(describe(gguf_keys.named(config)), "gguf")
    targets = {part.target: name for name, parts in names.items() for part in parts}
    found = {name: given.get(targets[parts[0].target]) for name, parts in stored.items()}
    return {name: values for name, values in found.items() if values is not None}


def _warnings(job: Job) -> list[str]:
    found, pipeline, source = [], job.pipeline, job.origin.source
    whole = {parts[0].stored for name, parts in job.stored.items() if name in job.kinds and is_matrix(name, parts[0])}
    if whole:
        sizes = ", ".join(f"{n} x {k}" for n, k in sorted(whole))
        zeros = " with their zeros" if pipeline.prunes and not pipeline.walks else ""
        found.append(f"matrices of {sizes} are no whole groups of {pipeline.format}: they are written as floats{zeros}")
    if {source.info(name).kind for name in source.names()} - set(FLOATS):
        found.append(
            f"{job.origin.path.name} is quantised already: what it lost stays lost; begin with 16 bits where there are any"
        )
    if pipeline.budget is not None:
        found.append(f"formats are chosen matrix by matrix when texts are read; {pipeline.format} is where that begins")
    return found
