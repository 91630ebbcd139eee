"""A container as its own file: all tensors in one .npz, each as rows of its kind."""

from pathlib import Path
from typing import Self

import numpy as np

from headrace.compress.pipeline import Pipeline
from headrace.compress.plan import CompressionPlan, new_report, parts_by_target
from headrace.models.registry import describe
from headrace.startup.opening import Opened
from headrace.weights.gguf import Chunks
from headrace.weights.kinds import KINDS
from headrace.weights.parts import stored_as
from headrace.weights.source import TensorInfo


class NpzPlan(CompressionPlan):
    """One .npz file. Matrices of layers are in the pipeline's kind, all other tensors float32."""

    @staticmethod
    def check_format(pipeline: Pipeline) -> None:
        if pipeline.format not in KINDS:
            raise ValueError(f"{pipeline.format} is no kind; choose one of {', '.join(KINDS)}")

    @staticmethod
    def format_name(pipeline: Pipeline) -> str:
        return pipeline.format

    @classmethod
    def prepare(cls, original: Opened, cut: Opened | None, pipeline: Pipeline) -> Self:
        opened = cut or original
        stored, report = stored_as(describe(opened.config), "gguf"), new_report(original, opened, opened.config, pipeline, 0)
        kinds = {name: pipeline.format if parts[0].target.startswith("layers.") else "F32" for name, parts in stored.items()}
        formats = {name: kind if len(stored[name][0].stored) == 2 else "F32" for name, kind in kinds.items()}
        plan = cls(
            original=original,
            opened=opened,
            pipeline=pipeline,
            stored=stored,
            read=parts_by_target(opened),
            importance={},
            formats=formats,
            report=report,
        )
        plan.measure()
        return plan

    def infos(self, name: str) -> list[TensorInfo]:
        shape, (block, nbytes) = self.stored[name][0].stored, KINDS[self.formats[name]]
        return [TensorInfo(name, shape, self.formats[name], int(np.prod(shape)) // block * nbytes)]

    def write(self, path: Path, chunks: Chunks) -> None:
        pieces: dict[str, list[np.ndarray]] = {}
        for name, data in chunks:
            pieces.setdefault(name, []).append(data)
        np.savez(path, **{name: np.concatenate(data) for name, data in pieces.items()})
