"""Cuts (structured pruning), one after the other, and healing, which may prune in rounds.

Each cut is a layer pass over the model that the one before has left; it writes a smaller model as a GGUF file in the work
folder. Matrices that a cut changes are stored as float32 there, all other tensors as they were. A healed model is float32.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from headrace.compress.base import Compressor
from headrace.compress.calibration_pass import run_pass
from headrace.compress.containers.gguf import alignment_of, entries, extra_tensors, tensor_info
from headrace.compress.cutting import Distances, Heads, Neurons, least_moving_layers
from headrace.compress.healing import Healer, HealReport, heal_texts
from headrace.compress.judge import Judgement
from headrace.compress.kv_heads import KVHeads
from headrace.compress.layer_pass import LayerPass
from headrace.compress.pipeline import Heal
from headrace.compress.report import Report
from headrace.compress.structure import HEADS, LAYERS, NEURONS, Cut, CutReport, pool_of, pruned_config, structure_size
from headrace.compress.texts import Texts, passage_hashes
from headrace.compress.work_folder import PLAN, WorkFolder
from headrace.data.config import ModelConfig
from headrace.data.progress import Progress
from headrace.models import gguf
from headrace.models.registry import describe
from headrace.startup.opening import Opened, open_files
from headrace.weights.gguf import Chunks, GGUFFile, write_gguf
from headrace.weights.loader import part_values, read_part, write_parts
from headrace.weights.parts import plan, stored_as
from headrace.weights.source import TensorInfo
from headrace.weights.store import sha256_of

HEALED = "heal.json"  # result of training; written after the model


@dataclass(frozen=True, slots=True)
class PrunedModel:
    """A model after its cuts, with their reports and warnings.

    tokens: calibration tokens. healed: report of the training, if there was one, on texts with the hashes `passages`.
    """

    opened: Opened
    cuts: list[CutReport]
    notes: list[str]
    tokens: int
    healed: HealReport | None = None
    passages: list[str] = field(default_factory=list)


def copy_report(report: Report, before: Report, model: PrunedModel) -> None:
    """Copy warnings and results of the cuts into `report`, the report of compressing the cut model.

    before: report made before the cuts.
    """
    report.warnings, report.largest, report.kv = before.warnings, max(before.largest, report.largest), before.kv
    report.cuts, report.healed, report.tokens = model.cuts, model.healed, model.tokens
    report.passages = [*before.passages, *model.passages]


def cut_model(
    opened: Opened,
    cuts: Sequence[Cut],
    work: WorkFolder,
    texts: Texts,
    progress: Progress,
    threads: int,
    vocabulary: bool = True,
) -> PrunedModel:
    """Run cuts, or resume them; without cuts the model as it is. The file of each replaces that of the one before.

    vocabulary: the file holds the tokenizer, too. Raises ValueError as `pruned_config` and WorkFolder do, and OSError.
    """
    if not cuts:
        return PrunedModel(opened, [], [], 0)
    names = [f"{index}-{cut.method}" for index, cut in enumerate(cuts)]
    files = [work.folder / f"{name}.gguf" for name in names]
    done = max((index for index, name in enumerate(names) if (work.folder / f"{name}.json").is_file()), default=-1)
    if done >= 0:
        opened = _open_checked(work, f"{names[done]}.json", files[done])
    for index in range(done + 1, len(cuts)):
        own = WorkFolder(work.folder / names[index])
        _cut(opened, cuts[index], work, own, files[index], texts, progress, threads, vocabulary)
        opened = _open_checked(work, f"{names[index]}.json", files[index])
        own.remove()
        if index:
            files[index - 1].unlink()
    abouts = [work.read(f"{name}.json") for name in names]
    notes = [note for about in abouts for note in about["notes"]]
    return PrunedModel(opened, [CutReport(**about["told"]) for about in abouts], notes, abouts[0]["tokens"])


def heal_model(
    original: Opened,
    cut: PrunedModel,
    how: Heal,
    healer: Healer | None,
    source: str,
    judged: Texts,
    work: WorkFolder,
    progress: Progress,
    vocabulary: bool = True,
) -> PrunedModel:
    """Train a cut model on texts of `source` that are not in `judged`, or resume, and write it next to the cut one.

    Raises ValueError if there is no healer, and as the healer, its texts and WorkFolder do.
    """
    if healer is None:
        raise ValueError("the method heal needs a trainer: pass healer=Healing() of training.distil")
    texts, file, folder = (
        heal_texts(original, source, how, work, judged, progress),
        work.folder / "healed.gguf",
        work.folder / "heal",
    )
    if not (work.folder / HEALED).is_file():
        model, report = healer.heal(original, cut.opened, texts, how, folder, progress)
        config, values = cut.opened.config, part_values(model)
        with work.writing(file) as part:
            _write(cut.opened, config, list(range(config.num_layers)), set(values), values.__getitem__, part, vocabulary)
        work.write(HEALED, {**asdict(report), "sha256": sha256_of(file)})
    shutil.rmtree(folder, ignore_errors=True)
    metadata = work.read(HEALED)
    before, after = (Judgement(**metadata[name]) for name in ("before", "after"))
    healed = HealReport(metadata["steps"], metadata["tokens"], metadata["different"], before, after)
    return replace(cut, opened=_open_checked(work, HEALED, file), healed=healed, passages=passage_hashes(texts))


def _open_checked(work: WorkFolder, about: str, file: Path) -> Opened:
    """Open a model of the work folder. Raises WeightError unless it has the SHA-256 in the JSON file `about`."""
    work.check(file.name, work.read(about).get("sha256"))
    return open_files(file)


def _cut(
    opened: Opened,
    cut: Cut,
    work: WorkFolder,
    own: WorkFolder,
    out: Path,
    texts: Texts,
    progress: Progress,
    threads: int,
    vocabulary: bool,
) -> None:
    """Run one cut in the work folder `own`, write `out`, then its report."""
    config = opened.config
    target = pruned_config(config, cut)
    own.begin({**work.read(PLAN), "cut": str(cut)})
    run_pass(
        LayerPass(opened.source, texts, own, {}, choice=True), [_compressor_of(cut, config, target)], own, progress, threads
    )
    abouts = [own.about(number) for number in range(config.num_layers)]
    layers = [about["extra"] for about in abouts]
    dropped_layers = (
        least_moving_layers([layer["distance"] for layer in layers], int(cut.number)) if cut.method == LAYERS else []
    )
    report = CutReport(
        cut.method, structure_size(config, cut.method), structure_size(target, cut.method), layers, dropped_layers
    )
    notes = [note for about in abouts for note in about["notes"]]
    changed = {name for about in abouts for name in about["cut"]}
    kept = [number for number in range(config.num_layers) if number not in dropped_layers]

    def cut_values(name: str) -> torch.Tensor:
        return torch.from_numpy(own.tensor(int(name.split(".")[1]), name))

    with work.writing(out) as part:
        _write(opened, target, kept, changed, cut_values, part, vocabulary)
    about = {"told": asdict(report), "notes": notes, "tokens": abouts[0]["tokens"], "sha256": sha256_of(out)}
    work.write(f"{own.folder.name}.json", about)


def _compressor_of(cut: Cut, config: ModelConfig, target: ModelConfig) -> Compressor:
    """Method that measures and makes a cut in the layer pass; whole layers are only measured there."""
    if cut.method == LAYERS:
        return Distances()
    if cut.method == NEURONS:
        return Neurons(target.layers)
    if cut.method == HEADS:
        return Heads(target.layers)
    return KVHeads(target.layers, pool_of(config, cut))


def _write(
    opened: Opened,
    target: ModelConfig,
    kept: list[int],
    changed: set[str],
    new_values: Callable[[str], torch.Tensor],
    path: Path,
    vocabulary: bool,
) -> None:
    """Write a model with the shapes of `target` as GGUF.

    Its layer i was layer kept[i]. Parts in `changed` come from `new_values`. Both name parts as before the cut.
    """
    source = opened.source
    whole, smaller = opened.config, target
    if not isinstance(source, GGUFFile):
        whole, smaller = gguf.stored_config(whole), gguf.stored_config(target)
    stored = stored_as(describe(smaller), "gguf")
    read = {part.target: part for parts in plan(describe(opened.config), source).values() for part in parts}
    extra = extra_tensors(opened, set(stored_as(describe(whole), "gguf")), smaller)
    copied: dict[str, str] = {}  # tensor of the file read whose bytes are copied
    tensors: list[TensorInfo] = [info for info, _ in extra.values()]
    for name, parts in stored.items():
        origins = [_name_before(part.target, kept) for part in parts]
        info = source.info(read[origins[0]].source)
        if isinstance(source, GGUFFile) and not changed & set(origins):
            copied[name] = info.name
            tensors.append(TensorInfo(name, info.shape, info.kind, info.nbytes))
        else:
            tensors.append(tensor_info(name, parts[0].stored, "F32"))

    def values(target: str) -> torch.Tensor:
        before = _name_before(target, kept)
        if before in changed:
            return new_values(before)
        return read_part(read[before], source, torch.float32)

    def chunks() -> Chunks:
        for name, (_, data) in extra.items():
            yield name, data
        for name, parts in stored.items():
            if name in copied:
                yield name, source.raw(copied[name])
                source.release(copied[name])
            else:
                yield name, write_parts(parts, values).contiguous().numpy().view(np.uint8)

    write_gguf(path, entries(opened, smaller, {}, vocabulary), tensors, chunks(), alignment_of(opened))


def _name_before(target: str, kept: list[int]) -> str:
    """Name in the model before the cut of a parameter part ("layers.2.down.weight") of the cut one."""
    first, number, *rest = target.split(".")
    return ".".join((first, str(kept[int(number)]), *rest)) if first == "layers" else target
