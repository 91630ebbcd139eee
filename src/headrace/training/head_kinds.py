"""The kinds of trained heads, as training needs to know them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import smooth_l1_loss

from headrace.runner.heads import EXIT, FEATURE, HEADS, Tensors, affine, enter, heads_config, predict, shapes, unit
from headrace.training.feature_layer import FeatureLayer, shifted
from headrace.training.teacher import Batch, Teacher
from headrace.training.texts import Text

FEATURES = 0.1  # what the hidden rows themselves count
RIDGE = 1e-3  # of the mean square of what is fitted
Made = tuple[torch.Tensor, torch.Tensor]  # rows [b, t, hidden] that the norm takes, and which of them [b, t] count


class Kind(ABC):
    """What one kind of heads computes. `chained`: a place in a draft counts where all before it are right."""

    chained = True

    @abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        """A tensor before training; the norm is the target's."""

    @abstractmethod
    def ahead(self, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> Iterator[Made]:
        """For each place in a draft: row p of all of them says what comes after token p, from what was known `place` tokens
        before. For each exit: from what was known at p."""

    def extra(self, made: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | float:
        """What is added to the cross-entropy of rows [n, hidden], whose place has the target's rows `hidden`."""
        return 0.0

    def fit(self, tensors: Tensors, teacher: Teacher, texts: Sequence[Text]) -> None:
        """What can be had without a gradient, before the first step: tensors are changed in place."""
        return


class Blockwise(Kind):
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


class Feature(Kind):
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


class Exits(Kind):
    """An affine map after some of the layers. Before training it is the logit lens: the row as it is."""

    chained = False

    def tensor(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        return torch.eye(*shape) if len(shape) == 2 else torch.zeros(shape)

    def ahead(self, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> Iterator[Made]:
        left = batch.hidden.unflatten(-1, (depth + 1, -1))
        for exit in range(depth):
            yield affine(tensors, exit, left[..., exit, :]), batch.rows

    def fit(self, tensors: Tensors, teacher: Teacher, texts: Sequence[Text]) -> None:
        """Ridge regression from the row that the layers left to the row after the last, both of length 1."""
        width = teacher.config.hidden_size
        count = texts[0].hidden.shape[1] // width - 1
        gram, cross = torch.zeros(count, width + 1, width + 1).double(), torch.zeros(count, width + 1, width).double()
        for text in texts:
            left = unit(text.hidden[text.answer - 1 :].unflatten(-1, (count + 1, width))).double()
            last = left[:, -1]
            for exit in range(count):
                x = torch.cat((left[:, exit], torch.ones(len(left), 1).double()), 1)
                gram[exit] += x.T @ x
                cross[exit] += x.T @ last
        for exit in range(count):
            squares = gram[exit].diagonal()
            squares[:width] += RIDGE * squares[:width].mean()
            solved = torch.linalg.solve(gram[exit], cross[exit])
            tensors[f"exits.{exit}.weight"].data.copy_(solved[:width].T)
            tensors[f"exits.{exit}.bias"].data.copy_(solved[width])


KINDS: dict[str, Kind] = {HEADS: Blockwise(), FEATURE: Feature(), EXIT: Exits()}


def initial_tensors(kind: str, teacher: Teacher, count: int, seed: int = 0) -> Tensors:
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
