"""Distilling heads from the target's own outputs: the loss is the cross-entropy to the target's distribution (over the part
of the vocabulary that the heads choose from) at every token of its answers, for every token ahead."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import log_softmax

from headrace.runner.heads import Tensors
from headrace.training.kinds import KINDS, begin
from headrace.training.networks import norm
from headrace.training.teacher import Batch, Teacher
from headrace.training.texts import Text

WARM = 0.02  # of the time in which the rate of learning rises
FADING = 0.8  # what a token further ahead counts of the one before it


def loss_of(kind: str, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> torch.Tensor:
    """Mean over rows, weighted over places."""
    with torch.no_grad():
        said = torch.zeros(batch.rows.shape, dtype=torch.int64)
        said[batch.rows] = torch.arange(int(batch.rows.sum()))
        last = teacher.last(batch.hidden)
        truth = teacher.said(last[batch.rows])
    total, weights = torch.zeros(()), 0.0
    for place, (made, rows) in enumerate(KINDS[kind].ahead(tensors, teacher, batch, depth)):
        logits = teacher.logits(norm(made[rows], tensors["norm.weight"], teacher.config.norm_eps))
        loss = -(truth[said[rows]] * log_softmax(logits, -1)).sum(-1).mean()
        loss = loss + KINDS[kind].extra(made[rows], last[rows])
        weight = FADING**place if KINDS[kind].chained else 1.0
        total, weights = total + weight * loss, weights + weight
    return total / weights


@torch.inference_mode()
def agreement(kind: str, tensors: Tensors, teacher: Teacher, texts: Sequence[Text], depth: int, size: int = 8) -> list[float]:
    """For each place in a draft: how often, on average, it and all places before it are what the target finds likeliest; for
    each exit, how often it is."""
    right, tried = [0] * depth, [0] * depth
    for at in range(0, len(texts), size):
        batch = Batch.of(texts[at : at + size])
        best = teacher.said(teacher.last(batch.hidden).flatten(0, 1)).argmax(-1).view(batch.rows.shape)
        chain, chained = torch.ones_like(batch.rows), KINDS[kind].chained
        for place, (made, rows) in enumerate(KINDS[kind].ahead(tensors, teacher, batch, depth)):
            logits = teacher.logits(norm(made.flatten(0, 1), tensors["norm.weight"], teacher.config.norm_eps))
            same = logits.argmax(-1).view(batch.rows.shape) == best
            chain = same if place == 0 or not chained else torch.cat((torch.zeros_like(chain[:, :1]), chain[:, :-1]), 1) & same
            right[place] += int((chain & rows).sum())
            tried[place] += int(rows.sum())
    return [good / max(1, all_) for good, all_ in zip(right, tried, strict=True)]


class Training:
    """A run that can be stopped and gone on with: tensors, the optimiser's state and the seconds spent are in `folder`."""

    def __init__(self, kind: str, teacher: Teacher, folder: Path, *, depth: int, minutes: float, rate: float = 1e-3) -> None:
        self.kind, self.teacher, self.folder = kind, teacher, folder
        self.depth, self.seconds, self.rate = depth, minutes * 60, rate
        self.tensors = {name: x.float().requires_grad_() for name, x in begin(kind, teacher, depth).items()}
        self.adam = torch.optim.AdamW(list(self.tensors.values()), lr=rate, betas=(0.9, 0.95), weight_decay=0.01)
        self.steps, self.spent, self.loss = 0, 0.0, math.nan
        self._load()

    def run(
        self, texts: Sequence[Text], size: int = 8, save_every: float = 60, seen: Callable[[float, float], None] | None = None
    ) -> None:
        """Train until the time is over. `seen` hears of seconds spent and of the loss, step by step."""
        began, saved, before = time.monotonic(), time.monotonic(), self.spent
        if not self.steps:
            KINDS[self.kind].fit(self.tensors, self.teacher, texts)
        while self.spent < self.seconds:
            for batch in _batches(texts, size, self.steps):
                self._step(batch)
                self.spent = before + time.monotonic() - began
                if seen is not None:
                    seen(self.spent, self.loss)
                if time.monotonic() - saved > save_every:
                    self.save()
                    saved = time.monotonic()
                if self.spent >= self.seconds:
                    break
        self.save()

    def _step(self, batch: Batch) -> None:
        share = min(1.0, self.spent / self.seconds)
        rate = self.rate * min(1.0, share / WARM + 0.05) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * share)))
        for group in self.adam.param_groups:
            group["lr"] = rate
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(self.kind, self.tensors, self.teacher, batch, self.depth)
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.tensors.values(), 1.0)
        self.adam.step()
        self.steps += 1
        self.loss = loss.item() if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss.item()

    def save(self) -> None:
        """Keep all that is needed to go on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        kept = {name: x.detach() for name, x in self.tensors.items()}
        for name, x in self.tensors.items():
            if x in self.adam.state:
                state = self.adam.state[x]
                kept |= {f"adam.first.{name}": state["exp_avg"], f"adam.second.{name}": state["exp_avg_sq"]}
        about = {"steps": str(self.steps), "spent": str(self.spent), "loss": str(self.loss), "kind": self.kind}
        unfinished = self.folder / "checkpoint.part"
        save_file(kept, unfinished, metadata=about)
        os.replace(unfinished, self.folder / "checkpoint.safetensors")
        (self.folder / "checkpoint.json").write_text(json.dumps(about))

    def _load(self) -> None:
        path = self.folder / "checkpoint.safetensors"
        if not path.is_file():
            return
        kept, about = load_file(path), json.loads((self.folder / "checkpoint.json").read_text())
        if about["kind"] != self.kind or any(kept[name].shape != x.shape for name, x in self.tensors.items()):
            raise ValueError(f"{self.folder} holds a training of other heads; take another folder, or remove it")
        self.steps, self.spent, self.loss = int(about["steps"]), float(about["spent"]), float(about["loss"])
        for name, x in self.tensors.items():
            x.data.copy_(kept[name])
            if f"adam.first.{name}" in kept:
                self.adam.state[x] = {
                    "step": torch.tensor(float(self.steps)),
                    "exp_avg": kept[f"adam.first.{name}"],
                    "exp_avg_sq": kept[f"adam.second.{name}"],
                }


def _batches(texts: Sequence[Text], size: int, seed: int) -> Iterator[Batch]:
    """All texts once: neighbours are about as long, and the order of batches is another each time."""
    random = torch.Generator().manual_seed(seed)
    jitter = torch.rand(len(texts), generator=random) * 40
    order = sorted(range(len(texts)), key=lambda at: len(texts[at].tokens) + float(jitter[at]))
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    for group in torch.randperm(len(groups), generator=random).tolist():
        yield Batch.of([texts[at] for at in groups[group]])
