"""GGUF files: kinds of tensors by a mix of llama.cpp, metadata copied from a GGUF file or made for a folder.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np

from headrace.compress.budget import Ladder, check_budget, gguf_ladder
from headrace.compress.mixes import kind_named, mix_named
from headrace.compress.pipeline import Pipeline
from headrace.compress.plan import CompressionPlan, EncodedRows, new_report, parts_by_target
from headrace.compress.pruning import is_pruned, zero_kind
from headrace.compress.structure import pruned_config
from headrace.data.config import ModelConfig
from headrace.kv.layout import kv_shape
from headrace.models import gguf
from headrace.models.registry import describe
from headrace.startup.opening import Opened
from headrace.text.gguf_keys import tokenizer_keys
from headrace.weights.gguf import DEFAULT_ALIGNMENT, Chunks, GGUFFile, entry, file_size, write_gguf
from headrace.weights.imatrix import check_widths, read_imatrix
from headrace.weights.kinds import FLOATS, KINDS
from headrace.weights.kv_settings import KVSettings
from headrace.weights.mixes import MIXES, tensor_kind
from headrace.weights.parts import stored_as
from headrace.weights.source import TensorInfo, WeightError

# Metadata keys that the reader's file may have and that are written anew.
OURS = re.compile(r"general\.(file_type|quantization_version|alignment)|quantize\..*|split\..*|headrace\..*")


@dataclass(slots=True, kw_only=True)
class GGUFPlan(CompressionPlan):
    """A GGUF file. `formats` are kinds (weights.kinds).

    extra: tensors that no parameter has, as bytes. keys: metadata entries but for those of K and V.
    """

    extra: dict[str, tuple[TensorInfo, np.ndarray]]
    keys: list[bytes]
    alignment: int

    replaceable = True
    copies_vocabulary = True

    @staticmethod
    def check_format(pipeline: Pipeline) -> None:
        if pipeline.layout is not None:
            raise ValueError("--layout applies to folders; leave it out, or give an output name without .gguf")
        mix_named(pipeline.format)
        if pipeline.head is not None:
            kind_named(pipeline.head)

    @staticmethod
    def format_name(pipeline: Pipeline) -> str:
        return mix_named(pipeline.format)

    @classmethod
    def prepare(cls, original: Opened, cut: Opened | None, pipeline: Pipeline) -> Self:
        opened = cut or original
        source, config = opened.source, opened.config
        importance = read_imatrix(pipeline.imatrix) if pipeline.imatrix is not None else {}
        if config.encoder:
            encoder = f"{opened.path}: encoders ({config.architecture})"
            raise WeightError(f"{encoder} are not written as GGUF; write a folder, such as -o OUT -f int8")
        final = config if isinstance(source, GGUFFile) else gguf.stored_config(config)
        pruned = final if cut is not None else reduce(pruned_config, pipeline.cuts, final)
        extra = extra_tensors(opened, set(stored_as(describe(final), "gguf")), pruned)
        stored = stored_as(describe(pruned), "gguf")
        if importance and not set(importance) & set(stored):
            raise WeightError(f"{pipeline.imatrix}: has no matrix of this model; use an imatrix of this model")
        check_widths(pipeline.imatrix, importance, {name: parts[0].stored[-1] for name, parts in stored.items()})
        shapes = {name: parts[0].stored for name, parts in stored.items()}
        formats = {name: _kind(pipeline, pruned, name, shape, bool(importance)) for name, shape in shapes.items()}
        formats |= {name: info.kind for name, (info, _) in extra.items()}
        if isinstance(source, GGUFFile):
            places = {name: place for place, name in enumerate(source.names())}
            formats = {name: formats[name] for name in sorted(formats, key=lambda name: places.get(name, -1))}
        plan = cls(
            original=original,
            opened=opened,
            pipeline=pipeline,
            stored=stored,
            read=parts_by_target(opened),
            importance=importance,
            formats=formats,
            report=new_report(original, opened, pruned, pipeline, 0),
            kv=None if pipeline.kv is None else _unmeasured(pruned, pipeline.kv),
            extra=extra,
            keys=[],
            alignment=alignment_of(opened),
        )
        plan.keys = entries(opened, pruned, plan._format_entries())
        largest = max((4 * prod(info.shape) for info in plan.tensors if not plan._copied(info.name)), default=0)
        plan.report.largest = max(plan.report.largest, largest)
        plan.measure()
        plan.report.warnings = plan._warnings()
        if pipeline.budget is not None:
            check_budget(sum(map(plan._least_bytes, plan.formats)), pipeline.budget)
        return plan

    def infos(self, name: str) -> list[TensorInfo]:
        if name in self.extra:
            return [self.extra[name][0]]
        return [tensor_info(name, self.stored[name][0].stored, self.formats[name])]

    def file_bytes(self) -> int:
        return file_size(self._entries(), self.tensors, self.alignment)

    def is_pruned(self, name: str) -> bool:
        return self.pipeline.prunes is not None and is_pruned(name, self.infos(name)[0].shape)

    def pass_formats(self) -> dict[str, str]:
        return {
            part.target: kind
            for name, kind in self.formats.items()
            for part in self.stored.get(name, ())
            if part.target.startswith("layers.") and kind not in FLOATS
            if self.pipeline.folds or not self._copied(name)
        }

    @property
    def ladder(self) -> Ladder:
        return gguf_ladder

    def pieces(self, name: str) -> Iterator[tuple[str, np.ndarray, EncodedRows]]:
        if name in self.extra or self._copied(name):
            data = self.extra[name][1] if name in self.extra else self.opened.source.raw(name)
            yield name, data, EncodedRows(data, 0.0, 0.0, 0)
        else:
            yield from CompressionPlan.pieces(self, name)

    def write(self, path: Path, chunks: Chunks) -> None:
        write_gguf(path, self._entries(), self.tensors, chunks, self.alignment)

    def _entries(self) -> list[bytes]:
        settings = {} if self.kv is None else self.kv.metadata()
        return self.keys + [entry(key, value) for key, value in settings.items()]

    def _copied(self, name: str) -> bool:
        """True if the file read has the tensor in the same kind and nothing changes it: its bytes are copied."""
        source, output = self.opened.source, self.output
        if self.is_pruned(name) or (
            output is not None and any(output.changed(part.target) for part in self.stored.get(name, ()))
        ):
            return False
        return isinstance(source, GGUFFile) and name in source.names() and source.info(name) == self.infos(name)[0]

    def _format_entries(self) -> dict[str, Any]:
        """Metadata about number formats."""
        pipeline = self.pipeline
        mix = mix_named(pipeline.format)
        ours = {
            "general.quantization_version": 2,
            "general.file_type": MIXES[mix][1],
            "headrace.compress": self.summary,
        }
        return ours if pipeline.imatrix is None else ours | {"quantize.imatrix.file": pipeline.imatrix.name}

    def _warnings(self) -> list[str]:
        source, warnings, mix = self.opened.source, [], mix_named(self.pipeline.format)
        again = Counter(
            source.info(self.read[parts[0].target].source).kind
            for name in self.formats
            if not self._copied(name) and (parts := self.stored.get(name))
        )
        rounded = {kind: count for kind, count in again.items() if kind not in FLOATS}
        if rounded:
            kinds = ", ".join(f"{count} {kind}" for kind, count in rounded.items())
            warnings.append(
                f"{self.opened.path.name} is quantised already ({kinds}): quantising it again loses more; "
                "start from 16-bit weights if there are any"
            )
        narrow = [info for info in self.tensors if info.shape[-1] % 256 and len(info.shape) > 1 and info.kind != "F32"]
        if narrow and KINDS[MIXES[mix][0]].block == 256:
            widths = ", ".join(map(str, sorted({info.shape[-1] for info in narrow})))
            kinds = ", ".join(sorted({info.kind for info in narrow}))
            warnings.append(
                f"rows of {widths} values are not a multiple of 256, which K-quants need; these matrices get {kinds}"
            )
        without = [name for name, kind in self.formats.items() if kind not in FLOATS and name not in self.importance]
        if self.importance and without:
            some = ", ".join([*without[:2], *(["…"] if len(without) > 2 else [])])
            warnings.append(f"no importance for {len(without)} matrices ({some}): all their inputs count alike")
        if self.pipeline.budget is not None:
            warnings.append(f"kinds are chosen matrix by matrix when texts are read; {mix} is where that begins")
        return warnings

    def _least_bytes(self, name: str) -> int:
        """Size of a tensor in the smallest kind that a budget may choose: matrices of layers have a choice."""
        (info,) = self.infos(name)
        targets = [part.target for part in self.stored.get(name, ())]
        matrix = len(info.shape) == 2 and bool(targets) and all(target.startswith("layers.") for target in targets)
        kinds = gguf_ladder(info.shape[-1]) if matrix else ()
        return tensor_info(name, info.shape, kinds[0]).nbytes if kinds else info.nbytes


def _kind(pipeline: Pipeline, config: ModelConfig, name: str, shape: tuple[int, ...], important: bool) -> str:
    """The kind of a tensor. Raises ValueError if it is pruned and rounded by the pass, and would stay a float."""
    head = kind_named(pipeline.head) if pipeline.head is not None else None
    kind = tensor_kind(mix_named(pipeline.format), name, shape[-1], config, important, head)
    if not pipeline.prunes or not is_pruned(name, shape):
        return kind
    if pipeline.walks and kind in FLOATS:
        raise ValueError(f"{','.join(pipeline.method)} prunes what it rounds: choose a format of integers, as Q4_0 or Q8_0")
    return zero_kind(kind)


def _unmeasured(config: ModelConfig, format: str) -> KVSettings:
    """K/V settings with key means of 0: as large as the measured ones."""
    shape = kv_shape(config)
    return KVSettings(format, np.zeros((shape.layers, shape.heads * shape.head_dim), "f4"))


def tensor_info(name: str, shape: tuple[int, ...], kind: str) -> TensorInfo:
    """Header of a tensor with rows of `kind`."""
    block, nbytes = KINDS[kind]
    return TensorInfo(name, shape, kind, prod(shape) // block * nbytes)


def alignment_of(opened: Opened) -> int:
    """Alignment of tensors in bytes: that of the file read, if it is a GGUF file."""
    metadata = opened.source.metadata if isinstance(opened.source, GGUFFile) else {}
    alignment: int = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    return alignment


def extra_tensors(opened: Opened, stored: set[str], config: ModelConfig) -> dict[str, tuple[TensorInfo, np.ndarray]]:
    """Tensors that no parameter has, with their bytes: copied from a GGUF file, computed for a folder.

    stored: names of the parameters' tensors in a GGUF file of the opened model. config: that of the file to be written.
    """
    source = opened.source
    if isinstance(source, GGUFFile):
        return {name: (source.info(name), source.raw(name)) for name in source.names() if name not in stored}
    made = gguf.made_tensors(config)
    return {name: (tensor_info(name, data.shape, "F32"), data.view(np.uint8)) for name, data in made.items()}


def entries(opened: Opened, config: ModelConfig, ours: Mapping[str, Any], vocabulary: bool = True) -> list[bytes]:
    """Metadata of the GGUF file to be written, as encoded entries.

    Entries of a GGUF file are copied byte for byte, except those about formats (`ours`) and, if `config` differs from the
    model's, about shapes. vocabulary: also write the vocabulary of a folder. Raises TokenizerError if GGUF cannot hold it.
    """
    source = opened.source
    if isinstance(source, GGUFFile):
        same = config == opened.config
        made = {} if same else gguf.shape_keys(source.metadata["general.architecture"], config)
        kept = [key for key in source.metadata if key == "general.alignment" or not OURS.fullmatch(key)]
        copied = [source.entry(key) for key in kept if key not in made]
        return copied + [entry(key, value) for key, value in (made | dict(ours)).items()]
    keys = gguf.metadata(config) | {"general.name": opened.path.name}
    keys |= (tokenizer_keys(opened.path, config.vocab_size) if vocabulary else {}) | dict(ours)
    return [entry(key, value) for key, value in keys.items()]
