"""Distilling heads from the target's own outputs: the loss is the cross-entropy to the target's distribution (over the part
of the vocabulary that the heads choose from) at every token of its answers, for every token ahead."""

import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import log_softmax, smooth_l1_loss, softmax

from headrace.data.config import ModelConfig
from headrace.models.registry import describe
from headrace.runner.heads import FEATURE, HEADS, Tensors, enter, heads_config, predict, shapes, unit
from headrace.startup.opening import Opened
from headrace.training.networks import FeatureLayer, norm, shifted
from headrace.training.texts import Text
from headrace.weights.loader import read_part
from headrace.weights.parts import plan

WARM = 0.02  # of the time in which the rate of learning rises
FADING = 0.8  # what a token further ahead counts of the one before it
FEATURES = 0.1  # what the hidden rows themselves count


@dataclass(frozen=True, slots=True)
class Teacher:
    """What heads need of the target: its embeddings, its last norm, and its lm_head over the heads' vocabulary."""

    config: ModelConfig
    embeddings: torch.Tensor  # [vocabulary, hidden] bfloat16
    norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [heads' vocabulary, hidden] bfloat16

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [n, hidden] after the last norm -> [n, heads' vocabulary], float32."""
        return (rows.to(torch.bfloat16) @ self.head.t()).float()

    def said(self, hidden: torch.Tensor) -> torch.Tensor:
        """The target's own distribution at rows [n, hidden] after its last layer."""
        return softmax(self.logits(norm(hidden, self.norm, self.config.norm_eps)), -1)


def read_teacher(opened: Opened, vocab: torch.Tensor) -> Teacher:
    """Read from the target's file what is needed, and no more. Raises WeightError, ValueError."""
    model, source = describe(opened.config), opened.source
    plans = plan(model, source)

    def read(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.cat([read_part(part, source, dtype) for part in plans[name]])

    if getattr(model, "norm", None) is None or model.norm.kind != "rms" or "tokens.weight" not in plans:
        raise ValueError(f"heads need a decoder that ends in an RMSNorm, and {opened.name} is none")
    embeddings = read("tokens.weight", torch.bfloat16)
    head = read("output.weight", torch.bfloat16) if "output.weight" in plans else embeddings
    return Teacher(opened.config, embeddings, read("norm.weight"), head[vocab])


def begin(kind: str, teacher: Teacher, count: int, seed: int = 0) -> Tensors:
    """Tensors before training: heads say what the target says now; a feature layer says nothing yet."""
    random = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in shapes(kind, count, teacher.config).items():
        if name == "norm.weight":
            made[name] = teacher.norm.clone()
        elif name == "embed.weight":  # through a tied head the embedding itself would say the same token again
            made[name] = torch.randint(0, 2, shape, generator=random) * 2.0 - 1.0
        elif len(shape) == 1:
            made[name] = torch.ones(shape)
        else:
            made[name] = torch.randn(shape, generator=random) * shape[1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made[name] *= 0.3
        if kind == HEADS and ".down." in name:
            made[name] = torch.zeros(shape)
    return made


@dataclass(frozen=True, slots=True)
class Batch:
    """Texts side by side: tokens [b, t], hidden [b, t, width], and the rows after which answers' tokens come."""

    tokens: torch.Tensor
    hidden: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def of(texts: Sequence[Text]) -> "Batch":
        length, width = max(len(text.tokens) for text in texts), texts[0].hidden.shape[1]
        tokens = torch.zeros(len(texts), length, dtype=torch.int64)
        hidden = torch.zeros(len(texts), length, width, dtype=torch.bfloat16)
        rows = torch.zeros(len(texts), length, dtype=torch.bool)
        for at, text in enumerate(texts):
            end = len(text.tokens)
            tokens[at, :end], hidden[at, :end], rows[at, text.answer - 1 : end] = text.tokens, text.hidden, True
        return Batch(tokens, hidden, rows)


def ahead(
    kind: str, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each place in a draft: rows [b, t, hidden] that the norm takes, and which of them [b, t] count; row p of all of them
    says what comes after token p, from what was known `place` tokens before."""
    if kind == HEADS:
        for head in range(depth):
            made = predict(tensors, head, batch.hidden)
            for _ in range(head + 1):
                made = shifted(made)
            yield made, _fewer(batch.rows, head + 1)
        return
    layer = FeatureLayer(tensors, heads_config(FEATURE, teacher.config), batch.tokens.shape[1])
    embedded, before = teacher.embeddings[batch.tokens], batch.hidden
    for place in range(depth):
        made = layer.run(enter(tensors, embedded, shifted(before)))
        yield made, _fewer(batch.rows, place + 1)
        before = made


def _fewer(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Without the first `by` of each text's rows: what they say was known when drafting began."""
    kept = rows.clone()
    for _ in range(by):
        kept[:, 1:] &= kept[:, :-1].clone()
        kept[:, 0] = False
    return kept


def loss_of(kind: str, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> torch.Tensor:
    """Mean over rows, weighted over places."""
    with torch.no_grad():
        said = torch.zeros(batch.rows.shape, dtype=torch.int64)
        said[batch.rows] = torch.arange(int(batch.rows.sum()))
        truth = teacher.said(batch.hidden[batch.rows])
    total, weights = torch.zeros(()), 0.0
    for place, (made, rows) in enumerate(ahead(kind, tensors, teacher, batch, depth)):
        logits = teacher.logits(norm(made[rows], tensors["norm.weight"], teacher.config.norm_eps))
        loss = -(truth[said[rows]] * log_softmax(logits, -1)).sum(-1).mean()
        if kind == FEATURE:
            loss = loss + FEATURES * smooth_l1_loss(unit(made[rows]), unit(batch.hidden[rows]))
        total, weights = total + FADING**place * loss, weights + FADING**place
    return total / weights


@torch.inference_mode()
def agreement(kind: str, tensors: Tensors, teacher: Teacher, texts: Sequence[Text], depth: int, size: int = 8) -> list[float]:
    """For each place in a draft: how often, on average, it and all places before it are what the target finds likeliest."""
    right, tried = [0] * depth, [0] * depth
    for at in range(0, len(texts), size):
        batch = Batch.of(texts[at : at + size])
        best = teacher.said(batch.hidden.flatten(0, 1)).argmax(-1).view(batch.rows.shape)
        chain = torch.ones_like(batch.rows)
        for place, (made, rows) in enumerate(ahead(kind, tensors, teacher, batch, depth)):
            logits = teacher.logits(norm(made.flatten(0, 1), tensors["norm.weight"], teacher.config.norm_eps))
            same = logits.argmax(-1).view(batch.rows.shape) == best
            chain = same if place == 0 else torch.cat((torch.zeros_like(chain[:, :1]), chain[:, :-1]), 1) & same
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
