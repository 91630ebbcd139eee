"""Compression plan: what one run reads, and every tensor that it writes, with name, number format and size.

A container (containers.gguf, containers.folder) is a subclass: it decides how tensors are named and grouped, and writes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch

from headrace.compress.budget import Ladder, Rung, choose_formats
from headrace.compress.calibration_pass import PassOutput, reading_bytes
from headrace.compress.grids.keep import GLOBAL
from headrace.compress.grids.targets import target
from headrace.compress.judge import judge_bytes
from headrace.compress.layer_pass import LIBRARIES
from headrace.compress.pipeline import Pipeline
from headrace.compress.pruning import global_threshold, prune_rows
from headrace.compress.report import MatrixReport, Report, kv_report
from headrace.compress.texts import WINDOW
from headrace.data.config import ModelConfig
from headrace.data.progress import Progress
from headrace.models.registry import describe
from headrace.startup.opening import Opened
from headrace.weights.decode import dequantize
from headrace.weights.gguf import Chunks
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.kv_settings import KVSettings
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import WeightPart, plan
from headrace.weights.source import TensorInfo, WeightError

CHUNK = 1 << 22  # numbers encoded at a time


class EncodedRows(NamedTuple):
    """Some rows of a tensor as stored: uint8 [rows, row bytes], with sums over them.

    lost: squared weight error. energy: squared weights. zeros: weights that are 0 after rounding.
    """

    rows: np.ndarray
    lost: float
    energy: float
    zeros: int


@dataclass(slots=True, kw_only=True)
class CompressionPlan(ABC):
    """All that writing takes, before anything is written.

    original: the model as the user named it; its vocabulary and settings go into OUT.
    opened: the model whose weights are written: `original`, or the model that cuts have left.
    stored, importance: by tensor name of OUT; read: by parameter part ("layers.3.qkv.q.weight").
    formats: number format of every tensor of OUT, in the order in which they are written.
    threshold: size below which global pruning removes weights, once measured.
    output: result of the calibration pass, if one has run. kv: K/V format and key means that OUT asks for.
    """

    original: Opened
    opened: Opened
    pipeline: Pipeline
    stored: dict[str, list[WeightPart]]
    read: dict[str, WeightPart]
    importance: dict[str, np.ndarray]
    formats: dict[str, str]
    report: Report
    output: PassOutput | None = None
    kv: KVSettings | None = None
    threshold: float | None = None

    # `--overwrite` may replace an existing OUT.
    replaceable: ClassVar[bool] = False
    # OUT copies its vocabulary from the model that cuts have left, so that this must have it.
    copies_vocabulary: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def check_format(pipeline: Pipeline) -> None:
        """Raise ValueError for formats and options that the container does not have, before a model is opened."""

    @staticmethod
    @abstractmethod
    def format_name(pipeline: Pipeline) -> str:
        """The pipeline's format by its full name."""

    @classmethod
    @abstractmethod
    def prepare(cls, original: Opened, cut: Opened | None, pipeline: Pipeline) -> Self:
        """The plan for an open model; `cut`: the model that its cuts have left. Raises ValueError."""

    @abstractmethod
    def infos(self, name: str) -> list[TensorInfo]:
        """The tensors of the file that a tensor of the model becomes."""

    @abstractmethod
    def write(self, path: Path, chunks: Chunks) -> None:
        """Write settings and tensors to `path`, which gets its name when it is complete."""

    def file_bytes(self) -> int:
        """Size of OUT in bytes."""
        return sum(info.nbytes for info in self.tensors)

    def is_pruned(self, name: str) -> bool:
        """True if the pipeline sets weights of this tensor to 0."""
        return False

    def pass_formats(self) -> dict[str, str]:
        """Format of every parameter part that the calibration pass rounds: the parts of layers that do not stay floats."""
        formats = {part.target: kind for name, kind in self.formats.items() for part in self.stored.get(name, ())}
        return {part: kind for part, kind in formats.items() if part.startswith("layers.") and kind not in FLOATS}

    @property
    def ladder(self) -> Ladder:
        """Formats that a byte budget chooses from, by row width; none unless the container has several."""
        return lambda width: ()

    @property
    def tensors(self) -> list[TensorInfo]:
        """The tensors of the file in order."""
        return [info for name in self.formats for info in self.infos(name)]

    @property
    def summary(self) -> str:
        """The methods and the format in one line: "awq,gptq int4-g128"."""
        sparsity = f" {self.pipeline.prunes[1]}" if self.pipeline.prunes else ""
        return f"{','.join(self.pipeline.method)}{sparsity} {self.format_name(self.pipeline)}"

    def label(self, name: str) -> str:
        """A tensor's format as the report names it."""
        return self.formats[name]

    def choose(self, formats: dict[str, str]) -> None:
        """Give tensors other formats."""
        self.formats |= formats

    def in_ladder(self, name: str) -> bool:
        """True if a byte budget may choose this tensor's format."""
        return True

    def fit_budget(self, errors: dict[str, dict[str, float]], budget: int) -> None:
        """Choose formats so that all tensors take at most `budget` bytes. errors: output error by parameter part and format."""
        ladders: dict[str, list[Rung]] = {}
        sizes = {name: self._nbytes(name) for name in self.formats}
        before = dict(self.formats)
        for name, parts in self.stored.items():
            if not (self.in_ladder(name) and all(part.target in errors for part in parts)):
                continue
            ladders[name] = []
            for format in errors[parts[0].target]:
                self.choose({name: format})
                error = sum(errors[part.target][format] for part in parts)
                ladders[name].append(Rung(format, error, self._nbytes(name)))
            self.choose({name: before[name]})
        self.choose(choose_formats(ladders, sum(size for name, size in sizes.items() if name not in ladders), budget))
        self.measure()

    def measure(self) -> None:
        """Set the report's size and tensors by the formats chosen."""
        self.report.bytes = self.file_bytes()
        self.report.matrices = {}
        for name in self.formats:
            weights = prod(self.stored[name][0].stored if name in self.stored else self.infos(name)[0].shape)
            self.report.matrices[name] = MatrixReport(weights, self.label(name), self._nbytes(name))

    def _nbytes(self, name: str) -> int:
        return sum(info.nbytes for info in self.infos(name))

    def chunks(self, progress: Progress) -> Chunks:
        """Bytes of the tensors in order, in pieces; fills in each tensor's error and zeros in the report.

        Raises WeightError for weights that their format cannot hold.
        """
        for name in self.formats:
            matrix, lost, energy, zeros = self.report.matrices[name], 0.0, 0.0, 0
            try:
                for info, data, piece in self.pieces(name):
                    lost, energy, zeros = lost + piece.lost, energy + piece.energy, zeros + piece.zeros
                    progress.advance(data.nbytes)
                    yield info, data
            except WeightError:
                raise
            except ValueError as error:
                raise WeightError(f"{self.opened.path}: {name} {error}") from None
            share = zeros / matrix.weights if self.is_pruned(name) else None
            self.report.matrices[name] = replace(matrix, error=lost / (energy or 1.0), zeros=share)
            for part in self.stored.get(name, ()):
                self.opened.source.release(self.read[part.target].source)

    def pieces(self, name: str) -> Iterator[tuple[str, np.ndarray, EncodedRows]]:
        """Name and bytes of the file's tensors for one tensor of the model, with the sums of the rows that they hold."""
        (info,) = self.infos(name)
        for encoded in self.encoded(name):
            yield info.name, encoded.rows, encoded

    def values(self, name: str) -> np.ndarray:
        """A tensor of the model after the calibration pass: float32."""
        output = self.output

        def part_values(target: str) -> torch.Tensor:
            if output is not None and output.changed(target):
                return output.values(target)
            return read_part(self.read[target], self.opened.source, torch.float32)

        values: np.ndarray = write_parts(self.stored[name], part_values).numpy()
        return values

    def _global_threshold(self, share: float) -> float:
        """The size below which weights are removed; measured over all pruned matrices before the first is written."""
        if self.threshold is None:
            self.threshold = global_threshold((self.values(name) for name in self.stored if self.is_pruned(name)), share)
        return self.threshold

    def encoded(self, name: str) -> Iterator[EncodedRows]:
        """A tensor in its format, some rows at a time. Rows that the pass has rounded come unchanged, all at once."""
        parts, output = self.stored[name], self.output
        if output is not None and parts[0].target in output.kinds:
            reports = [output.outputs[part.target] for part in parts]
            rows = write_parts(parts, output.rows).numpy()
            kind = output.kinds[parts[0].target]
            zeros = int((dequantize(rows.reshape(-1), kind) == 0).sum()) if self.is_pruned(name) else 0
            yield EncodedRows(rows, sum(one.lost for one in reports), sum(one.energy for one in reports), zeros)
            return
        values, importance, to = self.values(name), self.importance.get(name), target(self.formats[name])
        values = values.reshape(-1, values.shape[-1])
        prunes = self.pipeline.prunes if self.is_pruned(name) else None

        def encode(rows: np.ndarray) -> np.ndarray:
            if prunes is not None and prunes[1].per == GLOBAL:
                kept = np.where(np.abs(rows) < self._global_threshold(prunes[1].share), np.float32(0), rows)
            else:
                kept = rows if prunes is None else prune_rows(rows, prunes, importance)
            return to.encode(kept, importance, self.pipeline.thread_count)

        whole = None if to.by_row else encode(values)
        step = max(1, CHUNK // values.shape[1])
        for start in range(0, len(values), step):
            before = values[start : start + step]
            rows = encode(before) if whole is None else whole[start : start + step]
            after = dequantize(rows.reshape(-1), to.kind).reshape(before.shape)
            lost = float(np.square(before - after, dtype=np.float64).sum())
            yield EncodedRows(rows, lost, float(np.square(before, dtype=np.float64).sum()), int((after == 0).sum()))


def new_report(original: Opened, opened: Opened, final: ModelConfig, pipeline: Pipeline, largest: int) -> Report:
    """A report without tensors. final: the config of OUT. largest: peak memory of writing one tensor, in bytes."""
    largest = max(largest, reading_bytes(pipeline, opened, opened is not original))
    if pipeline.judge is not None:
        largest = max(largest, judge_bytes(opened.config, WINDOW))
    return Report(0, {}, [], largest, kv_report(opened.config, final, pipeline.kv))


def parts_by_target(opened: Opened) -> dict[str, WeightPart]:
    """The stored part of each parameter of a model, by target."""
    return {part.target: part for parts in plan(describe(opened.config), opened.source).values() for part in parts}


def encoding_bytes(size: int, kind: str) -> int:
    """Peak memory of encoding a tensor of `size` numbers as rows of `kind` that are all kept, in bytes."""
    return LIBRARIES + 4 * size + size * KINDS[kind].nbytes // KINDS[kind].block
