"""Joint training of a classifier: an encoder and its exits learn together, and become a new model.

The loss is the mean of all exits' cross-entropies, of which the i-th counts i times (PABEE, Zhou et al., 2020). Exits over a
frozen encoder read rows that were made for something else; here the layers below an exit learn to serve it. Stopped, the same
training goes on from its last checkpoint; the new model's config.json is written last.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from headrace.compress.export import CONFIG, write_json, write_words
from headrace.models.base import Model
from headrace.runner.classifier import BOTH
from headrace.startup.opening import Opened
from headrace.training.run import Budget, Run, begin
from headrace.training.sequence_forward import fed_together
from headrace.weights.atomic_file import atomic_write
from headrace.weights.loader import load_model, stored_tensors
from headrace.weights.source import WeightError

FASTER = 20.0  # the rate of exits, which begin at zero, in that of the encoder
BETAS = (0.9, 0.999)  # of AdamW
WORK = "work"  # in the folder, as long as it is not whole
NEAR = 4.0  # tokens by which texts beside each other may differ in length at random
POOLING = "1_Pooling"  # of a folder: how its embeddings are pooled
OnProgress = Callable[[str, int, int], None]
Stopped = AbstractContextManager[Callable[[], bool]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long is trained, and how fast."""

    epochs: int = 1
    batch: int = 32
    rate: float = 5e-5
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for what cannot be meant."""
        if self.epochs < 1 or self.batch < 1 or not 0 < self.rate < 1:
            raise ValueError("epochs and batch are 1 or more, and the rate lies between 0 and 1")


@dataclass(frozen=True, slots=True)
class Learnt:
    """An encoder, and its exits' weight [exits, classes, width] and bias [exits, classes], float32."""

    model: Model
    weight: np.ndarray
    bias: np.ndarray


def learn(
    opened: Opened,
    texts: Sequence[list[int]],
    classes: Sequence[int],
    count: int,
    layers: tuple[int, ...],
    pooling: str,
    schedule: Schedule,
    progress: OnProgress,
    work: Path,
    interrupt: Stopped,
) -> Learnt:
    """Train an encoder of float weights with exits after these layers on texts, each of one of `count` classes. The same for
    the same schedule on the same machine and threads, whether it was stopped on the way or not: its state is in `work`.
    `interrupt` is entered while it trains and says whether to stop. Raises ValueError, and KeyboardInterrupt once stopped."""
    schedule.check()
    longest = max(map(len, texts))
    if longest > opened.config.max_position:
        raise ValueError(f"a text has {longest} tokens and the model takes {opened.config.max_position}; shorten it")
    model = load_model(opened.source)
    width = opened.config.hidden_size * (1 + (pooling == BOTH))
    weight, bias = torch.zeros(len(layers), count, width), torch.zeros(len(layers), count)
    exits = {"exits.weight": weight, "exits.bias": bias}
    batches = [batch for epoch in range(schedule.epochs) for batch in _batches(texts, schedule, epoch)]
    begin(work, _about(opened, texts, classes, layers, pooling, schedule))
    faster = dict.fromkeys(exits, FASTER)
    tensors = dict(model.named_parameters()) | exits
    run = Run(tensors, work, Budget(steps=len(batches)), schedule.rate, faster=faster, betas=BETAS)

    def step(number: int) -> float:
        batch = batches[number]
        loss = loss_of(model, weight, bias, [texts[at] for at in batch], [classes[at] for at in batch], layers, pooling)
        loss.backward()
        return loss.item()

    with interrupt as stopped:
        run.go(step, lambda loss: progress("training together", run.steps, len(batches)), stopped)
    for x in tensors.values():
        x.requires_grad_(False)
    return Learnt(model, weight.numpy(), bias.numpy())


def _about(
    opened: Opened, texts: Sequence[list[int]], classes: Sequence[int], layers: Sequence[int], pooling: str, schedule: Schedule
) -> dict[str, Any]:
    """What must be the same where a training goes on."""
    data = hashlib.sha256(json.dumps([list(texts), list(classes)]).encode()).hexdigest()[:16]
    return {"parent": str(opened.path), "texts": data, "layers": list(layers), "pooling": pooling, **asdict(schedule)}


def loss_of(
    model: Model,
    weight: torch.Tensor,
    bias: torch.Tensor,
    texts: Sequence[list[int]],
    classes: Sequence[int],
    layers: Sequence[int],
    pooling: str,
) -> torch.Tensor:
    """The weighted mean of the exits' cross-entropies, in nats."""
    passed = fed_together(model, texts, [layer - 1 for layer in layers])
    wanted, total = torch.tensor(classes), torch.zeros(())
    for number, rows in enumerate(passed.after):
        logits = pooled(rows, [len(text) for text in texts], pooling) @ weight[number].T + bias[number]
        total = total + (number + 1) * cross_entropy(logits, wanted)
    return total / (len(layers) * (len(layers) + 1) / 2)


def pooled(rows: torch.Tensor, lengths: Sequence[int], pooling: str) -> torch.Tensor:
    """Rows [tokens, hidden] of texts, one after the other, as exits read them: [texts, width]."""
    ends = torch.tensor(lengths).cumsum(0)
    if pooling == "last":
        return rows[ends - 1]
    first = rows[ends - torch.tensor(lengths)]
    if pooling == "first":
        return first
    mean = torch.stack([rows[start:end].mean(0) for start, end in pairwise([0, *ends.tolist()])])
    return torch.cat([first, mean], 1) if pooling == BOTH else mean


def _batches(texts: Sequence[list[int]], schedule: Schedule, epoch: int) -> list[list[int]]:
    """All texts once, those of a batch about as long, in an order of the epoch's own."""
    generator = torch.Generator().manual_seed(schedule.seed + epoch)
    jitter = (torch.rand(len(texts), generator=generator) * NEAR).tolist()
    order = sorted(range(len(texts)), key=lambda at: len(texts[at]) + jitter[at])
    groups = [order[at : at + schedule.batch] for at in range(0, len(order), schedule.batch)]
    return [groups[at] for at in torch.randperm(len(groups), generator=generator).tolist()]


def check_new(folder: Path, opened: Opened) -> None:
    """Raise ValueError where a new model cannot be written, or what is trained has no float weights."""
    if (folder / CONFIG).exists() and not (folder / WORK).exists():
        raise ValueError(f"{folder} holds a model; name another folder for the one that is trained")
    if not opened.path.is_dir() or "quantization_config" in opened.source.config:  # type: ignore[union-attr]
        raise WeightError(f"{opened.name} has no float weights that could be trained; take the folder it was made of")


def save_model(folder: Path, model: Model, opened: Opened) -> None:
    """An encoder as a folder that any command opens, with float32 weights and its parent's words; config.json comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "model.safetensors") as part:
        save_file(stored_tensors(model, "safetensors"), part, {"format": "pt"})
    write_words(opened, folder)
    if (opened.path / POOLING).is_dir():
        shutil.copytree(opened.path / POOLING, folder / POOLING, dirs_exist_ok=True)
    write_json(folder / CONFIG, {**opened.source.config, "torch_dtype": "float32"})  # type: ignore[union-attr]
