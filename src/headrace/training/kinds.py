"""The kinds of trained heads, as training needs to know them."""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch.nn.functional import smooth_l1_loss

from headrace.runner.heads import FEATURE, HEADS, Tensors, enter, heads_config, predict, shapes, unit
from headrace.training.networks import FeatureLayer, shifted
from headrace.training.teacher import Batch, Teacher

FEATURES = 0.1  # what the hidden rows themselves count
Made = tuple[torch.Tensor, torch.Tensor]  # rows [b, t, hidden] that the norm takes, and which of them [b, t] count


class Kind(Protocol):
    """What one kind of heads computes."""

    def tensor(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        """A tensor before training; the norm is the target's."""

    def ahead(self, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> Iterator[Made]:
        """For each place in a draft: row p of all of them says what comes after token p, from what was known `place` tokens
        before."""

    def extra(self, made: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | float:
        """What is added to the cross-entropy of rows [n, hidden], whose place has the target's rows `hidden`."""


class Blockwise:
    """One head for each token ahead."""

    def tensor(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        """Heads say what the target says now."""
        return torch.zeros(shape) if ".down." in name else _random(shape, random)

    def ahead(self, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> Iterator[Made]:
        for head in range(depth):
            made = predict(tensors, head, batch.hidden)
            for _ in range(head + 1):
                made = shifted(made)
            yield made, _fewer(batch.rows, head + 1)

    def extra(self, made: torch.Tensor, hidden: torch.Tensor) -> float:
        return 0.0


class Feature:
    """A layer that drafts token by token. It says nothing yet."""

    def tensor(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        if name == "embed.weight":  # through a tied head the embedding itself would say the same token again
            return torch.randint(0, 2, shape, generator=random) * 2.0 - 1.0
        if len(shape) == 1:
            return torch.ones(shape)
        made = _random(shape, random)
        return made * 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else made

    def ahead(self, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> Iterator[Made]:
        layer = FeatureLayer(tensors, heads_config(FEATURE, teacher.config), batch.tokens.shape[1])
        embedded, before = teacher.embeddings[batch.tokens], batch.hidden
        for place in range(depth):
            made = layer.run(enter(tensors, embedded, shifted(before)))
            yield made, _fewer(batch.rows, place + 1)
            before = made

    def extra(self, made: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return FEATURES * smooth_l1_loss(unit(made), unit(hidden))


KINDS: dict[str, Kind] = {HEADS: Blockwise(), FEATURE: Feature()}


def begin(kind: str, teacher: Teacher, count: int, seed: int = 0) -> Tensors:
    """Tensors before training."""
    random, made = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes(kind, count, teacher.config).items():
        made[name] = teacher.norm.clone() if name == "norm.weight" else KINDS[kind].tensor(name, shape, random)
    return made


def _random(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random) * shape[1] ** -0.5


def _fewer(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Without the first `by` of each text's rows: what they say was known when drafting began."""
    kept = rows.clone()
    for _ in range(by):
        kept[:, 1:] &= kept[:, :-1].clone()
        kept[:, 0] = False
    return kept
