"""Cuts, one after the other: each is a walk through the model that the one before left, and leaves a smaller model as a file.

What is kept of the matrices it changes is float32 there; all else is as it was.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from headrace.compress.base import Compressor
from headrace.compress.container import entries, given_tensors, tensor_info
from headrace.compress.cutting import Distances, Heads, Neurons, dropped
from headrace.compress.kv_heads import KVHeads
from headrace.compress.measured import go
from headrace.compress.structure import HEADS, LAYERS, NEURONS, Cut, CutReport, pool_of, reshaped, size
from headrace.compress.texts import Texts
from headrace.compress.walk import Walk
from headrace.compress.work import PLAN, Work
from headrace.data.config import ModelConfig
from headrace.models import gguf_keys
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_files
from headrace.weights.gguf import DEFAULT_ALIGNMENT, GGUFFile
from headrace.weights.loader import read_part, write_parts
from headrace.weights.parts import plan, stored_as
from headrace.weights.progress import Progress
from headrace.weights.source import TensorInfo
from headrace.weights.write_gguf import Chunks, write_gguf


@dataclass(frozen=True, slots=True)
class Left:
    """A model after its cuts, what became of it, and what went other than it should."""

    opened: Opened
    cuts: list[CutReport]
    notes: list[str]
    tokens: int


def cut_model(
    opened: Opened, cuts: Sequence[Cut], work: Work, texts: Texts, tell: Progress, threads: int, words: bool = True
) -> Left:
    """Carry cuts out, from where an earlier run was stopped. The file of each takes the place of the one before, in the folder
    of the work; with `words` it has the vocabulary, too. Raises ValueError as `reshaped` and Work do, and OSError."""
    names = [f"{at}-{cut.method}" for at, cut in enumerate(cuts)]
    files = [work.folder / f"{name}.gguf" for name in names]
    done = max((at for at, file in enumerate(files) if file.is_file()), default=-1)
    if done >= 0:
        opened = open_files(files[done])
    for at in range(done + 1, len(cuts)):
        own = Work(work.folder / names[at])
        _cut(opened, cuts[at], work, own, files[at], texts, tell, threads, words)
        opened = open_files(files[at])
        own.remove()
        if at:
            files[at - 1].unlink()
    abouts = [work.read(f"{name}.json") for name in names]
    notes = [note for about in abouts for note in about["notes"]]
    return Left(opened, [CutReport(**about["told"]) for about in abouts], notes, abouts[0]["tokens"])


def _cut(
    opened: Opened, cut: Cut, work: Work, own: Work, out: Path, texts: Texts, tell: Progress, threads: int, words: bool
) -> None:
    """One cut: `own` is its walk's work; `out` is written last."""
    config = opened.config
    target = reshaped(config, cut)
    own.begin({**work.read(PLAN), "cut": str(cut)})
    go(Walk(opened.source, texts, own, {}), [_step(cut, config, target)], own, tell, threads)
    abouts = [own.about(number) for number in range(config.num_layers)]
    layers = [about["extra"] for about in abouts]
    gone = dropped([layer["distance"] for layer in layers], int(cut.number)) if cut.method == LAYERS else []
    report = CutReport(cut.method, size(config, cut.method), size(target, cut.method), layers, gone)
    notes = [note for about in abouts for note in about["notes"]]
    work.write(f"{own.folder.name}.json", {"told": asdict(report), "notes": notes, "tokens": abouts[0]["tokens"]})
    changed = {name for about in abouts for name in about["cut"]}
    kept = [number for number in range(config.num_layers) if number not in gone]
    with work.writing(out) as part:
        _write(opened, target, kept, own, changed, part, words)


def _step(cut: Cut, config: ModelConfig, target: ModelConfig) -> Compressor:
    if cut.method == LAYERS:
        return Distances()
    if cut.method == NEURONS:
        return Neurons(target.layers)
    if cut.method == HEADS:
        return Heads(target.layers)
    return KVHeads(target.layers, pool_of(config, cut))


def _write(opened: Opened, target: ModelConfig, kept: list[int], own: Work, changed: set[str], path: Path, words: bool) -> None:
    """The model with `target`'s numbers: of `changed` parts what the walk left, of layer i what was layer kept[i]."""
    source = opened.source
    whole, smaller = opened.config, target
    if not isinstance(source, GGUFFile):
        whole, smaller = gguf_keys.stored_config(whole), gguf_keys.stored_config(target)
    stored = stored_as(describe(smaller), "gguf")
    read = {part.target: part for parts in plan(describe(opened.config), source).values() for part in parts}
    given = given_tensors(opened, set(stored_as(describe(whole), "gguf")), smaller)
    copied: dict[str, str] = {}  # from which tensor of the file read
    tensors: list[TensorInfo] = [info for info, _ in given.values()]
    for name, parts in stored.items():
        origins = [_before(part.target, kept) for part in parts]
        info = source.info(read[origins[0]].source)
        if isinstance(source, GGUFFile) and not changed & set(origins):
            copied[name] = info.name
            tensors.append(TensorInfo(name, info.shape, info.kind, info.nbytes))
        else:
            tensors.append(tensor_info(name, parts[0].stored, "F32"))

    def values(target: str) -> torch.Tensor:
        before = _before(target, kept)
        if before in changed:
            return torch.from_numpy(own.tensor(int(before.split(".")[1]), before))
        return read_part(read[before], source, torch.float32)

    def chunks() -> Chunks:
        for name, (_, data) in given.items():
            yield name, data
        for name, parts in stored.items():
            if name in copied:
                yield name, source.raw(copied[name])
                source.release(copied[name])
            else:
                yield name, write_parts(parts, values).contiguous().numpy().view(np.uint8)

    metadata = source.metadata if isinstance(source, GGUFFile) else {}
    keys = entries(opened, smaller, {}, words)
    write_gguf(path, keys, tensors, chunks(), metadata.get("general.alignment", DEFAULT_ALIGNMENT))


def _before(target: str, kept: list[int]) -> str:
    """A parameter's part ("layers.2.down.weight") as it is called in the model before the cut."""
    first, number, *rest = target.split(".")
    return ".".join((first, str(kept[int(number)]), *rest)) if first == "layers" else target
