"""Exits of a decoder: heads trained after some of its layers, and what each would be worth as a drafter, on fresh text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headrace.data.config import ModelConfig
from headrace.drafting.controller import expected
from headrace.models.registry import describe
from headrace.runner.heads import EXIT
from headrace.startup import heads as files
from headrace.startup.opening import Opened, open_model
from headrace.training.distil import Recipe, Tell, judge, train
from headrace.training.kinds import begin
from headrace.training.texts import Text, open_writer, write_texts
from headrace.training.train import agreement
from headrace.weights.parts import plan

FRESH = 64  # held-out prompts that are answered once more, as nothing was trained on
TEMPERATURE = 0.8  # of these answers: greedy ones repeat themselves, and flatter
GRAM = 8
DEEPEST = 5  # tokens of a chain that is promised something


@dataclass(frozen=True, slots=True)
class Rated:
    """An exit after so many layers. `lens`: how often the row as it is, and `agreement`: how often the trained exit finds the
    token likeliest that the whole model does, at each token of fresh answers. `accepted` of drafted tokens were right where the
    exit drafted, which made so many `tokens_per_step`. `cost`: a draft step's share of the weights that a plain one reads."""

    layers: int
    lens: float
    agreement: float
    accepted: float
    tokens_per_step: float
    cost: float

    @property
    def promise(self) -> float:
        """The speed-up at batch 1 by bytes alone, if to verify costs no more than a plain step."""
        return max(expected(self.agreement, g) / (g * self.cost + 1.0) for g in range(1, DEEPEST + 1))


@dataclass(frozen=True, slots=True)
class Result:
    """Of every exit, of how many fresh tokens, and what share of their 8-grams training had seen. `drafts`: the layers of the
    exit that promises most."""

    exits: list[Rated]
    tokens: int
    seen: float
    drafts: int


def default_exits(layers: int) -> tuple[int, ...]:
    """After a third, two thirds and five sixths of a model's layers."""
    return tuple(sorted({max(1, layers * share // 6) for share in (2, 4, 5)}))


def distil_exits(model: str, out: Path, recipe: Recipe, tell: Tell) -> Result:
    """Train exits for a model into `out`; what is there already of the same training is gone on with.

    Raises ValueError where the model cannot have exits there, or `out` holds another training.
    """
    opened = open_model(model)
    recipe = replace(recipe, kind=EXIT, exits=recipe.exits or default_exits(opened.config.num_layers))
    check(recipe.exits, opened.config)
    made = train(opened, out, recipe, tell)
    texts = _fresh(opened, made.held, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        count = len(recipe.exits)
        lens, agreed = (
            agreement(EXIT, tensors, made.teacher, texts, count)
            for tensors in (begin(EXIT, made.teacher, count), made.heads.tensors)
        )
    rated = []
    for exit, layers in enumerate(recipe.exits):
        files.save(out, replace(made.heads, drafts=layers), opened, made.about)
        accepted, tokens = judge(opened, out, texts, recipe, TEMPERATURE)
        cost = cost_of(opened, layers, len(made.heads.vocab))
        rated.append(Rated(layers, lens[exit], agreed[exit], accepted, tokens, cost))
    best = max(rated, key=lambda one: one.promise).layers
    about: dict[str, float | str] = {f"agreement_{one.layers}": round(one.agreement, 3) for one in rated}
    files.save(out, replace(made.heads, drafts=best), opened, made.about | about)
    seen = seen_share(texts, made.learned)
    return Result(rated, sum(len(text.tokens) - text.answer for text in texts), seen, best)


def check(exits: Sequence[int], config: ModelConfig) -> None:
    """Raise ValueError for exits that a model cannot have."""
    least, most = 1, config.num_layers - 1
    if list(exits) != sorted(set(exits)) or not exits or not least <= exits[0] <= exits[-1] <= most:
        raise ValueError(f"exits stand after different layers of this model, ascending, {least} to {most}; not {exits}")
    if len(exits) > files.MAX_HEADS:
        raise ValueError(f"a model has {files.MAX_HEADS} exits at most, not {len(exits)}")


def cost_of(opened: Opened, layers: int, vocab: int) -> float:
    """The bytes of so many layers and of an exit that chooses among `vocab` tokens, of all that a plain step reads."""
    config, source = opened.config, opened.source
    of_layers, head = 0.0, 0.0
    for path, parts in plan(describe(config), source).items():
        for part in parts:
            info = source.info(part.source)
            size = info.nbytes * math.prod(part.shape) / max(1, math.prod(info.shape))
            of_layers += size if path.startswith("layers.") else 0.0
            head += size if path == ("tokens.weight" if config.tied_head else "output.weight") else 0.0
    exit = head * vocab / config.vocab_size + config.hidden_size**2
    return (of_layers * layers / config.num_layers + exit) / (of_layers + head)


def _fresh(opened: Opened, held: Sequence[Text], recipe: Recipe) -> list[Text]:
    """New answers to held-out prompts, all of them drawn."""
    llm = open_writer(opened, recipe.threads)
    prompts = [text.tokens[: text.answer].tolist() for text in held[:FRESH]]
    texts = write_texts(llm, prompts, recipe.max_tokens, recipe.seed + 7, recipe.exits, (TEMPERATURE,))
    llm.close()
    return texts


def seen_share(texts: Sequence[Text], learned: Sequence[Text]) -> float:
    """What share of the answers' 8-grams is in the answers that were learned from."""
    known = {gram for text in learned for gram in _grams(text)}
    grams = [gram for text in texts for gram in _grams(text)]
    return sum(gram in known for gram in grams) / max(1, len(grams))


def _grams(text: Text) -> Iterator[tuple[int, ...]]:
    tokens = text.tokens[text.answer :].tolist()
    return zip(*(tokens[at:] for at in range(GRAM)), strict=False)
