"""Joint training of a classifier: an encoder and its exits learn together and become a new model.

The loss is the weighted mean of all exits' cross-entropies, or of the squared errors of numbers; the i-th exit has weight i. A
stopped training resumes from its last checkpoint; the new model's config.json is written last.

Source: PABEE, Zhou et al., arXiv 2006.04152.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy

from headrace.compress.export import CONFIG, write_json, write_words
from headrace.data.progress import Progress
from headrace.models.base import Model
from headrace.runner.classifier import BOTH
from headrace.startup.opening import Opened
from headrace.training.run import Budget, Interrupt, Run, record_job
from headrace.training.sequence_forward import run_sequences
from headrace.weights.atomic_file import atomic_write
from headrace.weights.loader import load_model, stored_tensors
from headrace.weights.source import WeightError

# Learning rate of the exits, which begin at zero, as a multiple of the encoder's.
EXIT_RATE_FACTOR = 20.0
BETAS = (0.9, 0.999)
# Folder of the training state, inside the model folder until the model is complete.
WORK = "work"
# Random tokens added to a text's length when texts of similar length are grouped.
LENGTH_JITTER = 4.0


@dataclass(frozen=True, slots=True)
class JointConfig:
    """Settings of a joint training. rate: highest learning rate of the encoder. Raises ValueError if out of range."""

    epochs: int = 1
    batch: int = 32
    rate: float = 5e-5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch < 1 or not 0 < self.rate < 1:
            raise ValueError("epochs and batch are 1 or more, and the rate lies between 0 and 1")


@dataclass(frozen=True, slots=True)
class JointModel:
    """A trained encoder with its exits: weight [exits, classes, width] and bias [exits, classes], float32."""

    model: Model
    weight: np.ndarray
    bias: np.ndarray


def learn(
    opened: Opened,
    texts: Sequence[list[int]],
    targets: Sequence[int] | Sequence[float],
    count: int,
    layers: tuple[int, ...],
    pooling: str,
    config: JointConfig,
    progress: Progress,
    work: Path,
    interrupt: Interrupt | None,
) -> JointModel:
    """Train an encoder with float weights and its exits after `layers`.

    texts: token ids. targets: the class of each text, 0 ≤ class < count, or with `count` 1 its number (of about mean 0 and
    variance 1). work: folder of the training state.
    The same bytes for the same arguments on the same machine and threads, whether it was stopped or not.
    Raises ValueError, and KeyboardInterrupt if stopped.
    """
    longest = max(map(len, texts))
    if longest > opened.config.max_position:
        raise ValueError(f"a text has {longest} tokens and the model takes {opened.config.max_position}; shorten it")
    model = load_model(opened.source)
    width = opened.config.hidden_size * (1 + (pooling == BOTH))
    weight, bias = torch.zeros(len(layers), count, width), torch.zeros(len(layers), count)
    exits = {"exits.weight": weight, "exits.bias": bias}
    batches = [batch for epoch in range(config.epochs) for batch in _batches(texts, config, epoch)]
    record_job(work, _job(opened, texts, targets, layers, pooling, config))
    factors = dict.fromkeys(exits, EXIT_RATE_FACTOR)
    tensors = dict(model.named_parameters()) | exits
    run = Run(tensors, work, Budget(steps=len(batches)), config.rate, rate_factors=factors, betas=BETAS)

    def step(number: int) -> float:
        batch = batches[number]
        batch_texts, batch_targets = [texts[index] for index in batch], [targets[index] for index in batch]
        loss = loss_of(model, weight, bias, batch_texts, batch_targets, layers, pooling)
        loss.backward()
        return loss.item()

    run.train(step, progress, interrupt, name="training together", remark=lambda loss: "")
    return JointModel(model, weight.numpy(), bias.numpy())


def _job(
    opened: Opened,
    texts: Sequence[list[int]],
    targets: Sequence[int] | Sequence[float],
    layers: Sequence[int],
    pooling: str,
    config: JointConfig,
) -> dict[str, Any]:
    """Settings that must stay the same on resume."""
    data = hashlib.sha256(json.dumps([list(texts), list(targets)]).encode()).hexdigest()[:16]
    return {"parent": str(opened.path), "texts": data, "layers": list(layers), "pooling": pooling, **asdict(config)}


def loss_of(
    model: Model,
    weight: torch.Tensor,
    bias: torch.Tensor,
    texts: Sequence[list[int]],
    targets: Sequence[int] | Sequence[float],
    layers: Sequence[int],
    pooling: str,
) -> torch.Tensor:
    """Weighted mean of the exits' cross-entropies, in nats; of exits with one output, of their squared errors."""
    output = run_sequences(model, texts, [layer - 1 for layer in layers])
    right, total = torch.tensor(targets), torch.zeros(())
    for exit, rows in enumerate(output.after):
        logits = pooled(rows, [len(text) for text in texts], pooling) @ weight[exit].T + bias[exit]
        loss = cross_entropy(logits, right) if logits.shape[1] > 1 else (logits[:, 0] - right).square().mean()
        total = total + (exit + 1) * loss
    return total / (len(layers) * (len(layers) + 1) / 2)


def pooled(rows: torch.Tensor, lengths: Sequence[int], pooling: str) -> torch.Tensor:
    """Pool rows [tokens, hidden] of texts that follow each other into what exits read, [texts, width]."""
    ends = torch.tensor(lengths).cumsum(0)
    if pooling == "last":
        return rows[ends - 1]
    first = rows[ends - torch.tensor(lengths)]
    if pooling == "first":
        return first
    mean = torch.stack([rows[start:end].mean(0) for start, end in pairwise([0, *ends.tolist()])])
    return torch.cat([first, mean], 1) if pooling == BOTH else mean


def _batches(texts: Sequence[list[int]], config: JointConfig, epoch: int) -> list[list[int]]:
    """Group the indices of all texts by similar length, in the epoch's own random order."""
    generator = torch.Generator().manual_seed(config.seed + epoch)
    jitter = (torch.rand(len(texts), generator=generator) * LENGTH_JITTER).tolist()
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]) + jitter[index])
    groups = [order[start : start + config.batch] for start in range(0, len(order), config.batch)]
    return [groups[group] for group in torch.randperm(len(groups), generator=generator).tolist()]


def check_new(folder: Path, opened: Opened) -> None:
    """Raise ValueError if `folder` holds a model already, WeightError if the encoder has no float weights to train."""
    if (folder / CONFIG).exists() and not (folder / WORK).exists():
        raise ValueError(f"{folder} holds a model; name another folder for the one that is trained")
    if not opened.path.is_dir() or "quantization_config" in opened.source.config:  # type: ignore[union-attr]
        raise WeightError(f"{opened.name} has no float weights to train; use the model it was quantized from")


def save_model(folder: Path, model: Model, opened: Opened) -> None:
    """Write an encoder as a model folder with float32 weights and its parent's tokenizer. config.json is written last."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "model.safetensors") as part:
        save_file(stored_tensors(model, "safetensors"), part, {"format": "pt"})
    write_words(opened, folder)
    sizes = {"num_hidden_layers": model.config.num_layers, "torch_dtype": "float32"}
    write_json(folder / CONFIG, {**opened.source.config, **sizes})  # type: ignore[union-attr]
