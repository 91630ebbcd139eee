"""Exits of a decoder: heads trained after some of its layers, and what each would be worth as a drafter, on fresh text."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, softmax

from headrace.data.config import ModelConfig
from headrace.drafting.controller import expected
from headrace.models.registry import describe
from headrace.runner.heads import EXIT, Tensors, unit
from headrace.startup import heads as files
from headrace.startup.opening import Opened, open_model
from headrace.stats.calibration import calibration_error
from headrace.training.feature_layer import norm
from headrace.training.head_kinds import KINDS, begin
from headrace.training.heads import Recipe, Tell, Trained, judge, train
from headrace.training.run import alone_in
from headrace.training.teacher import Batch, Teacher
from headrace.training.texts import Text, open_writer, write_texts
from headrace.weights.parts import plan

FRESH = 64  # held-out prompts that are answered once more, as nothing was trained on
TEMPERATURE = 0.8  # of these answers: greedy ones repeat themselves, and flatter
GRAM = 8
DEEPEST = 5  # tokens of a chain that is promised something
BINS = 10  # of confidence
ROWS = 32768  # that classifiers are trained on, at most
SMALL = 1e-3  # what the square of a classifier's weights counts
THRESHOLDS = (0.5, 0.7, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Leaving:
    """If tokens were taken from an exit without a check where its largest probability is at least `threshold`: the `share` of
    tokens that it would be, how many of these the whole model would say, too (NaN: there are none), and the weights that a
    token reads at batch 1, as a share of a plain step's, if the layers above were never computed for those that left."""

    threshold: float
    share: float
    agreement: float
    cost: float


@dataclass(frozen=True, slots=True)
class Rated:
    """An exit after so many layers. `lens`: how often the row as it is, and `agreement`: how often the trained exit finds the
    token likeliest that the whole model does, at each token of fresh answers. `accepted` of drafted tokens were right where the
    exit drafted, which made so many `tokens_per_step`. `cost`: a draft step's share of the weights that a plain one reads.
    `calibration_error`: how far its confidence is from how often it agrees, on average; `judged`: so its classifier."""

    layers: int
    lens: float
    agreement: float
    accepted: float
    tokens_per_step: float
    cost: float
    calibration_error: float = 0.0
    judged: float = 0.0
    leaving: tuple[Leaving, ...] = ()

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

    Raises ValueError where the model cannot have exits there, or `out` holds another training, or another one runs there.
    """
    with alone_in(out):
        return _distil_exits(model, out, recipe, tell)


def _distil_exits(model: str, out: Path, recipe: Recipe, tell: Tell) -> Result:
    opened = open_model(model)
    recipe = replace(recipe, kind=EXIT, exits=recipe.exits or default_exits(opened.config.num_layers))
    check(recipe.exits, opened.config)
    made = train(opened, out, recipe, tell)
    made = replace(made, heads=replace(made.heads, tensors=made.heads.tensors | classifiers(made)))
    texts = _fresh(opened, made.held, recipe)
    with torch.autocast("cpu", torch.bfloat16):
        lens = confidences(begin(EXIT, made.teacher, len(recipe.exits)), made.teacher, texts)
        sure = confidences(made.heads.tensors, made.teacher, texts)
    rated, weights = [], read_weights(opened)
    for exit, layers in enumerate(recipe.exits):
        files.save(out, replace(made.heads, drafts=layers), opened, made.about, made.prompts)
        accepted, tokens = judge(opened, out, texts, recipe, TEMPERATURE)
        cost, head = (weights.share(depth, len(made.heads.vocab)) for depth in (layers, 0))
        as_is, agreed = (float(right[exit].float().mean()) for _, right in (lens, sure))
        most, right = (one[exit] for one in sure)
        leaving = tuple(left(threshold, most >= threshold, right, cost, head) for threshold in THRESHOLDS)
        error, its = (calibration_error(confident, right, BINS) for confident in (most, _judged(made, texts, exit)))
        rated.append(Rated(layers, as_is, agreed, accepted, tokens, cost, error, its, leaving))
    best = max(rated, key=lambda one: one.promise).layers
    about: dict[str, float | str] = {f"agreement_{one.layers}": round(one.agreement, 3) for one in rated}
    files.save(out, replace(made.heads, drafts=best), opened, made.about | about, made.prompts)
    seen = seen_share(texts, made.learned)
    return Result(rated, sum(len(text.tokens) - text.answer for text in texts), seen, best)


def check(exits: Sequence[int], config: ModelConfig) -> None:
    """Raise ValueError for exits that a model cannot have."""
    least, most = 1, config.num_layers - 1
    if list(exits) != sorted(set(exits)) or not exits or not least <= exits[0] <= exits[-1] <= most:
        raise ValueError(f"exits stand after different layers of this model, ascending, {least} to {most}; not {exits}")
    if len(exits) > files.MAX_HEADS:
        raise ValueError(f"a model has {files.MAX_HEADS} exits at most, not {len(exits)}")


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes that a plain step reads: of all `count` layers, and of the `head` over `vocab` tokens, from rows of `width`."""

    layers: float
    head: float
    count: int
    vocab: int
    width: int

    @property
    def total(self) -> float:
        return self.layers + self.head

    def share(self, layers: int, vocab: int) -> float:
        """The bytes of so many layers and of an exit that chooses among `vocab` tokens, of all that a plain step reads."""
        exit = self.head * vocab / self.vocab + self.width**2
        return (self.layers * layers / self.count + exit) / self.total


def read_weights(opened: Opened) -> Weights:
    """By what a model's file says of its tensors."""
    config, source = opened.config, opened.source
    of_layers, head = 0.0, 0.0
    for path, parts in plan(describe(config), source).items():
        for part in parts:
            info = source.info(part.source)
            size = info.nbytes * math.prod(part.shape) / max(1, math.prod(info.shape))
            of_layers += size if path.startswith("layers.") and ".cross_kv." not in path else 0.0  # read once a source
            head += size if path == ("tokens.weight" if config.tied_head else "output.weight") else 0.0
    return Weights(of_layers, head, config.num_layers, config.vocab_size, config.hidden_size)


@torch.inference_mode()
def confidences(tensors: Tensors, teacher: Teacher, texts: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each exit, at each token of the answers, the largest probability, and whether it is the token that the whole model
    finds likeliest: [exits, tokens] both."""
    sure, right = [], []
    for text in texts:
        batch = Batch.of([text])
        best = teacher.probabilities(teacher.last(batch.hidden)[batch.rows]).argmax(-1)
        depth = text.hidden.shape[1] // teacher.config.hidden_size - 1
        made = torch.stack([rows[batch.rows] for rows, _ in KINDS[EXIT].ahead(tensors, teacher, batch, depth)])
        most, tokens = softmax(teacher.logits(norm(made, tensors["norm.weight"], teacher.config.norm_eps)), -1).max(-1)
        sure.append(most)
        right.append(tokens == best)
    return torch.cat(sure, 1), torch.cat(right, 1)


def classifiers(made: Trained) -> Tensors:
    """CALM's third confidence: of each exit one linear of the row that its layers left, scaled to length, which says whether
    the exit's likeliest token is the whole model's. Logistic regression on the texts that trained the exits."""
    texts, rows = [], 0
    for text in made.learned:
        if rows < ROWS:
            texts.append(text)
            rows += len(text.tokens) - text.answer + 1
    with torch.autocast("cpu", torch.bfloat16):
        _, right = confidences(made.heads.tensors, made.teacher, texts)
    tensors: Tensors = {}
    for exit, labels in enumerate(right.float()):
        made_of = _regression(_left(texts, exit, len(right)), labels)
        tensors |= {f"sure.{exit}.{name}": x for name, x in made_of.items()}
    return tensors


def _left(texts: Sequence[Text], exit: int, exits: int) -> torch.Tensor:
    """Rows [tokens, hidden] that the layers below an exit left of the answers, scaled to length."""
    return unit(torch.cat([text.hidden[text.answer - 1 :].unflatten(-1, (exits + 1, -1))[:, exit] for text in texts]))


def _judged(made: Trained, texts: Sequence[Text], exit: int) -> torch.Tensor:
    """What the classifier of an exit says at each token of the answers."""
    weight, bias = (made.heads.tensors[f"sure.{exit}.{name}"] for name in ("weight", "bias"))
    return torch.sigmoid(_left(texts, exit, made.heads.count) @ weight + bias)


def _regression(rows: torch.Tensor, labels: torch.Tensor) -> Tensors:
    """Weight and bias that say of rows [n, hidden] how likely their labels [n] are 1."""
    weight, bias = (torch.zeros(size, requires_grad=True) for size in (rows.shape[1], 1))
    descent = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> float:
        descent.zero_grad()
        lost = binary_cross_entropy_with_logits(rows @ weight + bias, labels) + SMALL * (weight**2).sum()
        lost.backward()
        return float(lost.detach())

    descent.step(loss)
    return {"weight": weight.detach(), "bias": bias.detach()}


def left(threshold: float, gone: torch.Tensor, right: torch.Tensor, cost: float, head: float) -> Leaving:
    """What it comes to where the tokens [n] that are `gone` left, and the whole model says the same where it is `right`. `cost`
    and `head`: of the layers below with the exit, and of the exit alone."""
    share = float(gone.float().mean())
    return Leaving(threshold, share, float(right[gone].float().mean()), share * cost + (1 - share) * (1 + head))


def _fresh(opened: Opened, held: Sequence[Text], recipe: Recipe) -> list[Text]:
    """New answers to held-out prompts, all of them drawn."""
    llm = open_writer(opened, recipe.threads)
    prompts = [text.prompt for text in held[:FRESH]]
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
