"""Joint training of a classifier: an encoder and its exits learn together, and become a new model.

The loss is the mean of all exits' cross-entropies, of which the i-th counts i times (PABEE, Zhou et al., 2020). Exits over a
frozen encoder read rows that were made for something else; here the layers below an exit learn to serve it.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from headrace.compress.export import CONFIG, write_json, write_words
from headrace.models.base import Model
from headrace.runner.exits import BOTH
from headrace.startup.opening import Opened
from headrace.training.run import CLIP, DECAY, rate_at
from headrace.training.whole import fed_together
from headrace.weights.loader import load_model, stored_tensors
from headrace.weights.source import WeightError

FASTER = 20.0  # the rate of exits, which begin at zero, in that of the encoder
NEAR = 4.0  # tokens by which texts beside each other may differ in length at random
POOLING = "1_Pooling"  # of a folder: how its embeddings are pooled
OnProgress = Callable[[str, int, int], None]


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
) -> Learnt:
    """Train an encoder of float weights with exits after these layers on texts, each of one of `count` classes. The same for
    the same schedule on the same machine and threads. Raises ValueError."""
    schedule.check()
    longest = max(map(len, texts))
    if longest > opened.config.max_position:
        raise ValueError(f"a text has {longest} tokens and the model takes {opened.config.max_position}; shorten it")
    model = load_model(opened.source)
    width = opened.config.hidden_size * (1 + (pooling == BOTH))
    weight, bias = torch.zeros(len(layers), count, width), torch.zeros(len(layers), count)
    groups = [{"params": list(model.parameters()), "times": 1.0}, {"params": [weight, bias], "times": FASTER}]
    every = [x.requires_grad_() for group in groups for x in group["params"]]  # type: ignore[attr-defined]
    adam = torch.optim.AdamW(groups, lr=schedule.rate, weight_decay=DECAY)
    batches = [batch for epoch in range(schedule.epochs) for batch in _batches(texts, schedule, epoch)]
    for step, batch in enumerate(batches):
        for group in adam.param_groups:
            group["lr"] = group["times"] * rate_at(step / len(batches), schedule.rate)
        loss = loss_of(model, weight, bias, [texts[at] for at in batch], [classes[at] for at in batch], layers, pooling)
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(every, CLIP)
        adam.step()
        progress("training together", step + 1, len(batches))
    for x in every:
        x.requires_grad_(False)
    return Learnt(model, weight.numpy(), bias.numpy())


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
    if (folder / CONFIG).exists():
        raise ValueError(f"{folder} holds a model; name another folder for the one that is trained")
    if not opened.path.is_dir() or "quantization_config" in opened.source.config:  # type: ignore[union-attr]
        raise WeightError(f"{opened.name} has no float weights that could be trained; take the folder it was made of")


def save_model(folder: Path, model: Model, opened: Opened) -> None:
    """An encoder as a folder that any command opens, with float32 weights and its parent's words; config.json comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored_tensors(model, "safetensors"), folder / "model.safetensors", {"format": "pt"})
    write_words(opened, folder)
    if (opened.path / POOLING).is_dir():
        shutil.copytree(opened.path / POOLING, folder / POOLING, dirs_exist_ok=True)
    write_json(folder / CONFIG, {**opened.source.config, "torch_dtype": "float32"})  # type: ignore[union-attr]
