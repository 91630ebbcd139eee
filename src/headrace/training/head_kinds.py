"""The kinds of trained heads: initial tensors and training-time forward pass of each."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch.nn.functional import smooth_l1_loss

from headrace.runner.heads import EXIT, FEATURE, HEADS, Tensors, affine, enter, heads_config, predict, shapes, unit
from headrace.training.teacher import Batch, FeatureLayer, Teacher, shifted
from headrace.training.texts import Text

# Weight of the hidden rows' own loss next to the cross-entropy.
FEATURE_WEIGHT = 0.1
# Ridge penalty of the fitted exits, relative to the mean square of the rows.
RIDGE = 1e-3
# Hidden rows [b, t, hidden] before the last norm, and which of them [b, t] count in the loss.
PredictedRows = tuple[torch.Tensor, torch.Tensor]


class HeadKind(ABC):
    """One kind of heads. chained: its draft is a chain, in which a token counts only if all tokens before it are right."""

    chained = True

    @abstractmethod
    def tensor(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        """Return an initial tensor; the norm is taken from the target."""

    @abstractmethod
    def ahead(self, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> Iterator[PredictedRows]:
        """Yield the predicted rows of each drafted position, or of each exit.

        Row p predicts the token after p; drafted position d reads the target's rows up to p − d − 1, an exit those up to p.
        """

    def extra(self, predicted: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor | float:
        """Loss added to the cross-entropy of predicted rows [n, hidden], from the target's rows at the same positions."""
        return 0.0

    def fit(self, tensors: Tensors, teacher: Teacher, texts: Sequence[Text]) -> None:
        """Fit tensors in place, in closed form, before the first training step."""
        return


class Blockwise(HeadKind):
    """One head for each drafted token, all on the target's last hidden row.

    Source: Stern et al., "Blockwise Parallel Decoding", arXiv 1811.03115; Cai et al., "Medusa", arXiv 2401.10774.
    """

    def tensor(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        """Zero the down projections: an untrained head predicts what the target predicts now."""
        return torch.zeros(shape) if ".down." in name else _random(shape, random)

    def ahead(self, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> Iterator[PredictedRows]:
        for head in range(depth):
            predicted = predict(tensors, head, batch.hidden)
            for _ in range(head + 1):
                predicted = shifted(predicted)
            yield predicted, _without_first(batch.rows, head + 1)


class Feature(HeadKind):
    """One decoder layer that drafts token by token, from embeddings and the target's last hidden rows.

    Source: EAGLE, Li et al., arXiv 2401.15077.
    """

    def tensor(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        # Through a tied head, the embedding itself would predict the same token again.
        if name == "embed.weight":
            return torch.randint(0, 2, shape, generator=random) * 2.0 - 1.0
        if len(shape) == 1:
            return torch.ones(shape)
        tensor = _random(shape, random)
        return tensor * 0.3 if name.endswith(("o_proj.weight", "down_proj.weight")) else tensor

    def ahead(self, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> Iterator[PredictedRows]:
        layer = FeatureLayer(tensors, heads_config(FEATURE, teacher.config), batch.tokens.shape[1])
        embedded, rows = teacher.embeddings[batch.tokens], batch.hidden
        for position in range(depth):
            rows = layer.run(enter(tensors, embedded, shifted(rows)))
            yield rows, _without_first(batch.rows, position + 1)

    def extra(self, predicted: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return FEATURE_WEIGHT * smooth_l1_loss(unit(predicted), unit(hidden))


class Exits(HeadKind):
    """One affine map after each of some layers. Untrained it is the identity, which gives the logit lens."""

    chained = False

    def tensor(self, name: str, shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
        return torch.eye(*shape) if len(shape) == 2 else torch.zeros(shape)

    def ahead(self, tensors: Tensors, teacher: Teacher, batch: Batch, depth: int) -> Iterator[PredictedRows]:
        rows = batch.hidden.unflatten(-1, (depth + 1, -1))
        for exit in range(depth):
            yield affine(tensors, exit, rows[..., exit, :]), batch.rows

    def fit(self, tensors: Tensors, teacher: Teacher, texts: Sequence[Text]) -> None:
        """Ridge regression from the row before the exit to the row after the last layer, both normed."""
        width = teacher.config.hidden_size
        count = texts[0].hidden.shape[1] // width - 1
        gram, cross = torch.zeros(count, width + 1, width + 1).double(), torch.zeros(count, width + 1, width).double()
        for text in texts:
            rows = unit(text.hidden[text.answer - 1 :].unflatten(-1, (count + 1, width))).double()
            last = rows[:, -1]
            for exit in range(count):
                x = torch.cat((rows[:, exit], torch.ones(len(rows), 1).double()), 1)
                gram[exit] += x.T @ x
                cross[exit] += x.T @ last
        for exit in range(count):
            diagonal = gram[exit].diagonal()
            diagonal[:width] += RIDGE * diagonal[:width].mean()
            solution = torch.linalg.solve(gram[exit], cross[exit])
            tensors[f"exits.{exit}.weight"].data.copy_(solution[:width].T)
            tensors[f"exits.{exit}.bias"].data.copy_(solution[width])


KINDS: dict[str, HeadKind] = {HEADS: Blockwise(), FEATURE: Feature(), EXIT: Exits()}


def initial_tensors(kind: str, teacher: Teacher, count: int, seed: int = 0) -> Tensors:
    """Return the tensors of `count` untrained heads or exits."""
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes(kind, count, teacher.config).items():
        tensors[name] = teacher.norm.clone() if name == "norm.weight" else KINDS[kind].tensor(name, shape, random)
    return tensors


def _random(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random) * shape[1] ** -0.5


def _without_first(rows: torch.Tensor, count: int) -> torch.Tensor:
    """Clear the first `count` rows of each text in the mask [b, t]: they predict tokens that were known before the draft."""
    kept = rows.clone()
    for _ in range(count):
        kept[:, 1:] &= kept[:, :-1].clone()
        kept[:, 0] = False
    return kept
