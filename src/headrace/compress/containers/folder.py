"""Hugging Face folders: safetensors, config.json, tokenizer; matrices of layers in a scheme of quantized weights."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from headrace.compress.budget import Ladder, check_budget, integer_ladder
from headrace.compress.export import CONFIG, settings_of, write_json, write_words
from headrace.compress.layouts import check_mixed, grouped, layout_of, settings_of_layouts
from headrace.compress.pipeline import ROUNDS, SELF, Pipeline
from headrace.compress.plan import CompressionPlan, EncodedRows, encoding_bytes, new_report, parts_by_target
from headrace.compress.pruning import PRUNES
from headrace.compress.structure import pruned_config
from headrace.data.config import ModelConfig
from headrace.models import gguf
from headrace.models.registry import describe
from headrace.startup.opening import Opened
from headrace.weights.describe import COMPRESSED
from headrace.weights.gguf import Chunks, GGUFFile
from headrace.weights.imatrix import check_widths, read_imatrix
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.parts import WeightPart, stored_as
from headrace.weights.safetensors import safetensors_header, write_safetensors
from headrace.weights.schemes.base import SchemeWriter
from headrace.weights.schemes.two_four import TwoFourWriter
from headrace.weights.source import TensorInfo, WeightError

SINGLE = "model.safetensors"
_MATRIX = re.compile(r"(?:.*\.)?layers?\.\d+\.[\w.]+\.weight")


@dataclass(slots=True, kw_only=True)
class FolderPlan(CompressionPlan):
    """A folder. `formats`: of a rounded matrix its format ("int4-g128"), of any other tensor a float kind.

    layouts: how each rounded matrix is stored, by tensor name.
    """

    layouts: dict[str, SchemeWriter]

    @staticmethod
    def check_format(pipeline: Pipeline) -> None:
        layout_of(pipeline)

    @staticmethod
    def format_name(pipeline: Pipeline) -> str:
        return pipeline.format.lower()

    @classmethod
    def prepare(cls, original: Opened, cut: Opened | None, pipeline: Pipeline) -> Self:
        layout, opened = layout_of(pipeline), cut or original
        config = opened.config
        if config.encoder:
            _check_encoder(opened, pipeline)
        if pipeline.cuts and not isinstance(original.source, GGUFFile):
            # The model that cuts leave is written as a GGUF file.
            gguf.stored_config(original.config)
        final = config if cut is not None else reduce(pruned_config, pipeline.cuts, config)
        stored = stored_as(describe(final), "safetensors")
        if any(parts[0].transpose for parts in stored.values()):
            raise WeightError(f"{opened.path}: folders of {config.architecture} hold matrices by columns; write a .gguf file")
        shapes = {name: parts[0].stored for name, parts in stored.items()}
        matrices = [name for name, shape in shapes.items() if is_matrix(name, shape)]
        layouts: dict[str, SchemeWriter] = {name: layout for name in matrices if layout.fits(*shapes[name])}
        if not layouts:
            widths = ", ".join(str(width) for width in sorted({shapes[name][1] for name in matrices}))
            raise WeightError(
                f"{opened.path}: rows of {widths} numbers cannot be divided into groups of {pipeline.format}: choose another"
            )
        before = parts_by_target(original)
        kinds = {name: _float_kind(parts[0], original, before, pipeline.folds) for name, parts in stored.items()}
        importance = _importance(pipeline.imatrix, stored, config)
        check_widths(pipeline.imatrix, importance, {name: shape[-1] for name, shape in shapes.items()})
        plan = cls(
            original=original,
            opened=opened,
            pipeline=pipeline,
            stored=stored,
            read=parts_by_target(opened),
            importance=importance,
            formats=kinds | dict.fromkeys(layouts, pipeline.format.lower()),
            report=new_report(original, opened, final, pipeline, 0),
            layouts=layouts,
        )
        plan._check_settings(layout, final)
        sizes = ((prod(shape), plan._kind(name)) for name, shape in shapes.items())
        plan.report.largest = max(plan.report.largest, *(encoding_bytes(size, kind) for size, kind in sizes))
        plan.report.warnings = plan._warnings()
        plan.measure()
        return plan

    def infos(self, name: str) -> list[TensorInfo]:
        shape, layout = self.stored[name][0].stored, self.layouts.get(name)
        if layout is None:
            kind = self.formats[name]
            return [TensorInfo(name, shape, kind, prod(shape) * KINDS[kind].nbytes)]
        matrix = name.removesuffix("weight")
        return [TensorInfo(f"{matrix}{field.name}", field.shape, field.type, field.nbytes) for field in layout.fields(*shape)]

    def file_bytes(self) -> int:
        return len(safetensors_header(self.tensors)) + sum(info.nbytes for info in self.tensors)

    def label(self, name: str) -> str:
        layout = self.layouts.get(name)
        return layout.sparse if isinstance(layout, TwoFourWriter) else self.formats[name]

    def is_pruned(self, name: str) -> bool:
        rounded = name in self.layouts or not self.pipeline.walks
        return self.pipeline.prunes is not None and rounded and self._is_matrix(name)

    def pass_formats(self) -> dict[str, str]:
        return {part.target: self.formats[name] for name in self.formats if self.in_ladder(name) for part in self.stored[name]}

    @property
    def ladder(self) -> Ladder:
        return integer_ladder(self.pipeline.format.lower())

    def in_ladder(self, name: str) -> bool:
        return name in self.layouts and self._is_matrix(name)

    def choose(self, formats: dict[str, str]) -> None:
        self.formats |= formats
        self.layouts |= {name: grouped(format) for name, format in formats.items()}

    def pieces(self, name: str) -> Iterator[tuple[str, np.ndarray, EncodedRows]]:
        """A tensor that stays a float counts as without error. A rounded matrix is split into the tensors of its scheme."""
        whole = self.all_rows(name)
        if name not in self.layouts:
            yield name, whole.rows, whole._replace(lost=0.0)
            return
        reports = {} if self.output is None else self.output.outputs  # of the layers; the head is not in the pass
        largest = max((reports[part.target].largest for part in self.stored[name] if part.target in reports), default=0.0)
        arrays = self.layouts[name].tensors(whole.rows, largest).values()
        for info, data in zip(self.infos(name), arrays, strict=True):
            yield info.name, data, whole
            # The sums are counted with the first tensor.
            whole = EncodedRows(whole.rows, 0.0, 0.0, 0)

    def all_rows(self, name: str) -> EncodedRows:
        """All rows of a tensor in its format."""
        n = prod(self.stored[name][0].stored[:-1])
        rows, at, lost, energy, zeros = np.empty((0, 0), np.uint8), 0, 0.0, 0.0, 0
        for piece in self.encoded(name):
            rows = rows if at else np.empty((n, piece.rows.shape[1]), np.uint8)
            rows[at : at + len(piece.rows)] = piece.rows
            at += len(piece.rows)
            lost, energy, zeros = lost + piece.lost, energy + piece.energy, zeros + piece.zeros
        return EncodedRows(rows, lost, energy, zeros)

    def write(self, path: Path, chunks: Chunks) -> None:
        part = path.with_name(f".{path.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir()
            self._write_settings(part)
            write_safetensors(part / SINGLE, self.tensors, chunks)
            # Written by this run before it was stopped.
            if path.exists():
                shutil.rmtree(path)
            part.rename(path)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def _write_settings(self, folder: Path) -> None:
        """Write config.json, tokenizer and template. Raises WeightError if the tokenizer read back differs."""
        floats = [name.removesuffix(".weight") for name in self.formats if self._is_matrix(name) and name not in self.layouts]
        if self.original.config.encoder:
            # Headrace reads no pooler, so OUT has none. Other readers must not expect it in integers.
            floats.append("pooler.dense")
        by_name = self.pipeline.head is not None or self.pipeline.budget is not None
        quantization = settings_of_layouts(self.layouts, floats, by_name)
        write_words(self.original, folder)
        write_json(folder / CONFIG, self._config(self.opened.config) | {"quantization_config": quantization})
        kv = {} if self.kv is None else {"kv": self.kv.record()}
        write_json(folder / COMPRESSED, {"compress": self.summary, **kv})

    def _config(self, final: ModelConfig) -> dict[str, Any]:
        """config.json without quantization_config. Raises ValueError for an architecture that is not translated."""
        if self.pipeline.cuts or isinstance(self.original.source, GGUFFile):
            return settings_of(self.original, final)
        return dict(self.original.source.config)

    def _check_settings(self, layout: SchemeWriter, final: ModelConfig) -> None:
        """Apply --head and check --budget. Raises ValueError."""
        self._config(final)
        head, budget = self.pipeline.head, self.pipeline.budget
        if budget is not None:
            check_mixed(layout, "--budget")
            integer_ladder(self.pipeline.format.lower())
        if head is not None:
            check_mixed(layout, "--head")
            self.choose({self._head(head): head.lower()})
        if budget is not None:
            check_budget(sum(info.nbytes for info in self.tensors), budget)

    def _head(self, format: str) -> str:
        """Tensor of the output projection, or of the token table if tied. Raises ValueError if `format` does not fit it."""
        targets = {parts[0].target: name for name, parts in self.stored.items()}
        name = targets.get("output.weight") or targets["tokens.weight"]
        n, width = self.stored[name][0].stored
        if not grouped(format).fits(n, width):
            raise ValueError(
                f"the head's rows of {width} numbers cannot be divided into groups of {format}: choose another --head"
            )
        return name

    def _kind(self, name: str) -> str:
        return self.layouts[name].kind if name in self.layouts else self.formats[name]

    def _is_matrix(self, name: str) -> bool:
        return is_matrix(name, self.stored[name][0].stored)

    def _warnings(self) -> list[str]:
        warnings, pipeline, source = [], self.pipeline, self.original.source
        stored = {part.source for part in parts_by_target(self.original).values()}
        floats = [name for name in self.formats if self._is_matrix(name) and name not in self.layouts]
        if floats:
            sizes = ", ".join(f"{n} x {k}" for n, k in sorted({self.stored[name][0].stored for name in floats}))
            zeros = " with their zeros" if pipeline.prunes and not pipeline.walks else ""
            warnings.append(
                f"matrices of {sizes} cannot be divided into groups of {pipeline.format}: they are written as floats{zeros}"
            )
        if {source.info(name).kind for name in stored} - set(FLOATS):
            warnings.append(
                f"{self.original.path.name} is quantised already: quantising it again loses more; "
                "start from 16-bit weights if there are any"
            )
        if pipeline.budget is not None:
            warnings.append(f"formats are chosen matrix by matrix when texts are read; {pipeline.format} is where that begins")
        return warnings


def _check_encoder(opened: Opened, pipeline: Pipeline) -> None:
    """Raise ValueError for settings that need a decoder."""
    name = opened.path.name
    if unfit := [method for method in pipeline.method if method not in (*ROUNDS, *PRUNES)]:
        raise ValueError(f"{name} is an encoder, and {unfit[0]} needs a decoder; use {', '.join((*ROUNDS, *PRUNES))}")
    options = {"--kv": pipeline.kv, "--budget": pipeline.budget, "--imatrix": pipeline.imatrix}
    if unfit := [option for option, value in options.items() if value is not None]:
        raise ValueError(f"{name} is an encoder, and {unfit[0]} needs a decoder; leave it out")
    if pipeline.write_imatrix is not None:
        raise ValueError(f"{name} is an encoder, and --write-imatrix needs a decoder; leave it out")
    if (pipeline.reads and pipeline.text_source == SELF) or pipeline.judge == SELF:
        option = "--judge" if pipeline.judge == SELF else "--calibrate"
        raise ValueError(f"{name} is an encoder and writes no texts; give {option} a file with a text on each line")


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """True for a matrix of a layer."""
    return len(shape) == 2 and _MATRIX.fullmatch(name) is not None


def _float_kind(part: WeightPart, original: Opened, read: dict[str, WeightPart], folds: bool) -> str:
    """Float kind of a tensor that is not rounded: its own; BF16 or (vectors) F32 if it was quantized.

    A vector that scales are folded into is F32.
    """
    kind = original.source.info(read[part.target].source).kind
    if folds and len(part.stored) == 1:
        return "F32"
    return kind if kind in FLOATS else "BF16" if len(part.stored) > 1 else "F32"


def _importance(imatrix: Path | None, stored: dict[str, list[WeightPart]], config: ModelConfig) -> dict[str, np.ndarray]:
    """Importance of a file, which names tensors as GGUF does, by the folder's names."""
    if imatrix is None:
        return {}
    by_gguf_name = read_imatrix(imatrix)
    names = stored_as(describe(gguf.with_gguf_architecture(config)), "gguf")
    gguf_names = {part.target: name for name, parts in names.items() for part in parts}
    importance = {name: by_gguf_name.get(gguf_names[parts[0].target]) for name, parts in stored.items()}
    return {name: values for name, values in importance.items() if values is not None}
