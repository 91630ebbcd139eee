"""Distilling heads from the target's own outputs: the loss is the cross-entropy to the target's distribution (over the part
of the vocabulary that the heads choose from) at every token of its answers, for every token ahead."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch.nn.functional import log_softmax

from headrace.runner.heads import Tensors
from headrace.training import head_kinds as kinds
from headrace.training.feature_layer import norm
from headrace.training.head_kinds import KINDS
from headrace.training.run import Budget, Run
from headrace.training.teacher import Batch, Teacher
from headrace.training.texts import Text

FADING = 0.8  # what a token further ahead counts of the one before it


def loss_of(kind: str, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> torch.Tensor:
    """Mean over rows, weighted over places."""
    with torch.no_grad():
        index = torch.zeros(batch.rows.shape, dtype=torch.int64)
        index[batch.rows] = torch.arange(int(batch.rows.sum()))
        last = teacher.last(batch.hidden)
        truth = teacher.probabilities(last[batch.rows])
    total, weights = torch.zeros(()), 0.0
    for place, (made, rows) in enumerate(KINDS[kind].ahead(tensors, teacher, batch, depth)):
        logits = teacher.logits(norm(made[rows], tensors["norm.weight"], teacher.config.norm_eps))
        loss = -(truth[index[rows]] * log_softmax(logits, -1)).sum(-1).mean()
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
        best = teacher.probabilities(teacher.last(batch.hidden).flatten(0, 1)).argmax(-1).view(batch.rows.shape)
        chain, chained = torch.ones_like(batch.rows), KINDS[kind].chained
        for place, (made, rows) in enumerate(KINDS[kind].ahead(tensors, teacher, batch, depth)):
            logits = teacher.logits(norm(made.flatten(0, 1), tensors["norm.weight"], teacher.config.norm_eps))
            same = logits.argmax(-1).view(batch.rows.shape) == best
            chain = same if place == 0 or not chained else torch.cat((torch.zeros_like(chain[:, :1]), chain[:, :-1]), 1) & same
            right[place] += int((chain & rows).sum())
            tried[place] += int(rows.sum())
    return [good / max(1, all_) for good, all_ in zip(right, tried, strict=True)]


class Training:
    """Heads on their way: a run (training.run) over texts, whose state is in `folder`."""

    def __init__(self, kind: str, teacher: Teacher, folder: Path, *, depth: int, minutes: float, rate: float = 1e-3) -> None:
        self.kind, self.teacher, self.depth = kind, teacher, depth
        self.tensors = {name: x.float() for name, x in kinds.begin(kind, teacher, depth).items()}
        self.state = Run(self.tensors, folder, Budget(minutes=minutes), rate)
        self.loss = math.nan

    def run(
        self, texts: Sequence[Text], size: int = 8, seen: Callable[[float, float], None] = lambda spent, loss: None
    ) -> None:
        """Train until the time is over. `seen` hears of seconds spent and of the loss, step by step."""
        if not self.state.steps:
            KINDS[self.kind].fit(self.tensors, self.teacher, texts)
        batches = self._batches(texts, size)
        self.state.go(lambda step: self._learn(next(batches)), lambda loss: seen(self.state.spent, self.loss))

    def _learn(self, batch: Batch) -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(self.kind, self.tensors, self.teacher, batch, self.depth)
        loss.backward()
        self.loss = loss.item() if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss.item()
        return loss.item()

    def _batches(self, texts: Sequence[Text], size: int) -> Iterator[Batch]:
        while True:
            yield from _batches(texts, size, self.state.steps)


def _batches(texts: Sequence[Text], size: int, seed: int) -> Iterator[Batch]:
    """All texts once: neighbours are about as long, and the order of batches is another each time."""
    random = torch.Generator().manual_seed(seed)
    jitter = torch.rand(len(texts), generator=random) * 40
    order = sorted(range(len(texts)), key=lambda at: len(texts[at].tokens) + float(jitter[at]))
    groups = [order[at : at + size] for at in range(0, len(order), size)]
    for group in torch.randperm(len(groups), generator=random).tolist():
        yield Batch.of([texts[at] for at in groups[group]])
