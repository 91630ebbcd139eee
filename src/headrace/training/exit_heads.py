"""Training of exit heads: heads after some layers of a decoder, measured on fresh answers as drafters and as early exits."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import binary_cross_entropy_with_logits, softmax

from headrace.data.config import ModelConfig
from headrace.data.progress import Progress
from headrace.drafting.policy import expected_tokens
from headrace.models.registry import describe
from headrace.runner.heads import EXIT, Tensors, unit
from headrace.startup import heads as files
from headrace.startup.opening import Opened, open_model
from headrace.stats.calibration import calibration_error
from headrace.training.head_kinds import KINDS, initial_tensors
from headrace.training.heads import HeadsConfig, TrainedHeads, judge, learn
from headrace.training.run import Interrupt, exclusive
from headrace.training.teacher import Batch, Teacher, norm
from headrace.training.texts import Text, open_writer, write_texts
from headrace.weights.parts import plan

# Most held-out prompts that are answered once more for the report.
FRESH_PROMPTS = 64
# Temperature of these answers; greedy answers repeat themselves, which flatters a drafter.
TEMPERATURE = 0.8
# Length of the n-grams that are looked for in the training texts.
GRAM = 8
# Longest draft, in tokens, that `ExitReport.promise` considers.
LONGEST_DRAFT = 5
# Bins of the calibration error.
BINS = 10
# Most rows that the confidence classifiers are trained on, and their L2 penalty.
CLASSIFIER_ROWS = 32768
PENALTY = 1e-3
THRESHOLDS = (0.5, 0.7, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class UncheckedExit:
    """An exit whose tokens are taken without a check if their probability is at least `threshold`.

    share: of all tokens, those taken from the exit. agreement: share of these that the full model predicts too, NaN if none.
    cost: weights read for a token at batch 1 over those of a plain step, if exited tokens never run the layers above.
    """

    threshold: float
    share: float
    agreement: float
    cost: float


@dataclass(frozen=True, slots=True)
class ExitReport:
    """Quality of one exit after `layers` layers, on tokens of fresh answers.

    lens: share of tokens that the full model's head predicts right from the row as is. agreement: the same of the trained exit.
    accepted, tokens_per_step: of greedy drafting with this exit. cost: weights a draft step reads over those of a plain step.
    calibration_error: of the exit's probability. classifier_error: of the exit's classifier.
    """

    layers: int
    lens: float
    agreement: float
    accepted: float
    tokens_per_step: float
    cost: float
    calibration_error: float = 0.0
    classifier_error: float = 0.0
    unchecked: tuple[UncheckedExit, ...] = ()

    @property
    def promise(self) -> float:
        """Speed-up of drafting at batch 1 by bytes alone, if a verification costs as much as a plain step."""
        lengths = range(1, LONGEST_DRAFT + 1)
        return max(expected_tokens(self.agreement, count) / (count * self.cost + 1.0) for count in lengths)


@dataclass(frozen=True, slots=True)
class ExitsReport:
    """Reports of all exits, on `tokens` fresh tokens.

    seen: share of the fresh 8-grams that the training texts contain. drafts: layers of the exit that promises most.
    """

    exits: list[ExitReport]
    tokens: int
    seen: float
    drafts: int


def default_exits(layers: int) -> tuple[int, ...]:
    """Return the exits after a third, two thirds and five sixths of a model's layers."""
    return tuple(sorted({max(1, layers * share // 6) for share in (2, 4, 5)}))


@exclusive
def train_exits(
    model: str, out: Path, config: HeadsConfig, progress: Progress | None = None, interrupt: Interrupt | None = None
) -> ExitsReport:
    """Train exit heads for a model into the folder `out`. The same call resumes a stopped training.

    Raises ValueError if the model cannot have these exits, or `out` belongs to another training or process.
    """
    opened = open_model(model)
    config = replace(config, kind=EXIT, exits=config.exits or default_exits(opened.config.num_layers))
    check(config.exits, opened.config)
    trained = learn(opened, out, config, progress or Progress(), interrupt)
    trained = replace(trained, heads=replace(trained.heads, tensors=trained.heads.tensors | train_classifiers(trained)))
    # Not the texts that the classifiers are fitted on.
    texts = _fresh_texts(opened, trained.held[::2], config)
    with torch.autocast("cpu", torch.bfloat16):
        _, lens = confidences(initial_tensors(EXIT, trained.teacher, len(config.exits)), trained.teacher, texts)
        probabilities, agrees = confidences(trained.heads.tensors, trained.teacher, texts)
    reports, weights = [], weight_bytes(opened)
    for exit, layers in enumerate(config.exits):
        files.save(out, replace(trained.heads, drafts=layers), opened, trained.about, trained.prompts)
        accepted, tokens = judge(opened, out, texts, config, TEMPERATURE)
        cost, head = (weights.share(depth, len(trained.heads.vocab)) for depth in (layers, 0))
        right, confident = agrees[exit], probabilities[exit]
        judged = _classifier_confidences(trained, texts, exit)
        reports.append(
            ExitReport(
                layers=layers,
                lens=float(lens[exit].float().mean()),
                agreement=float(right.float().mean()),
                accepted=accepted,
                tokens_per_step=tokens,
                cost=cost,
                calibration_error=calibration_error(confident, right, BINS),
                classifier_error=calibration_error(judged, right, BINS),
                unchecked=tuple(unchecked_exit(at, confident >= at, right, cost, head) for at in THRESHOLDS),
            )
        )
    best = max(reports, key=lambda report: report.promise).layers
    about: dict[str, float | str] = {f"agreement_{report.layers}": round(report.agreement, 3) for report in reports}
    files.save(out, replace(trained.heads, drafts=best), opened, trained.about | about, trained.prompts)
    seen = seen_share(texts, trained.learned)
    return ExitsReport(reports, sum(len(text.tokens) - text.answer for text in texts), seen, best)


def check(exits: Sequence[int], config: ModelConfig) -> None:
    """Raise ValueError if a model cannot have these exits."""
    least, most = 1, config.num_layers - 1
    if list(exits) != sorted(set(exits)) or not exits or not least <= exits[0] <= exits[-1] <= most:
        raise ValueError(f"exits stand after different layers of this model, ascending, {least} to {most}; not {exits}")
    if len(exits) > files.MAX_HEADS:
        raise ValueError(f"a model has {files.MAX_HEADS} exits at most, not {len(exits)}")


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of weights that a plain step reads: `layers` of all `count` layers, `head` of the head over `vocab` tokens.

    width: of a hidden row.
    """

    layers: float
    head: float
    count: int
    vocab: int
    width: int

    @property
    def total(self) -> float:
        return self.layers + self.head

    def share(self, layers: int, vocab: int) -> float:
        """Bytes of `layers` layers and of an exit over `vocab` tokens, as a share of a plain step's bytes."""
        exit = self.head * vocab / self.vocab + self.width**2
        return (self.layers * layers / self.count + exit) / self.total


def weight_bytes(opened: Opened) -> WeightBytes:
    """Read the sizes from the tensor headers of a model's file."""
    config, source = opened.config, opened.source
    layers, head = 0.0, 0.0
    for path, parts in plan(describe(config), source).items():
        for part in parts:
            info = source.info(part.source)
            size = info.nbytes * math.prod(part.shape) / max(1, math.prod(info.shape))
            # The cross-attention K/V projection runs once a source, not once a step.
            layers += size if path.startswith("layers.") and ".cross_kv." not in path else 0.0
            head += size if path == ("tokens.weight" if config.tied_head else "output.weight") else 0.0
    return WeightBytes(layers, head, config.num_layers, config.vocab_size, config.hidden_size)


@torch.inference_mode()
def confidences(tensors: Tensors, teacher: Teacher, texts: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """At each token of the answers, every exit's largest probability, and whether it is the full model's likeliest token.

    Returns [exits, tokens] float32 and [exits, tokens] bool.
    """
    probabilities, agrees = [], []
    for text in texts:
        batch = Batch.of([text])
        best = teacher.probabilities(teacher.last(batch.hidden)[batch.rows]).argmax(-1)
        depth = text.hidden.shape[1] // teacher.config.hidden_size - 1
        rows = torch.stack([row[batch.rows] for row, _ in KINDS[EXIT].ahead(tensors, teacher, batch, depth)])
        most, tokens = softmax(teacher.logits(norm(rows, tensors["norm.weight"], teacher.config.norm_eps)), -1).max(-1)
        probabilities.append(most)
        agrees.append(tokens == best)
    return torch.cat(probabilities, 1), torch.cat(agrees, 1)


def train_classifiers(trained: TrainedHeads) -> Tensors:
    """Train one confidence classifier for each exit: does the exit's likeliest token equal the full model's?

    A logistic regression of the normed hidden row before the exit, on every second held-out text: on the texts that trained the
    exits, these agree more often. With fewer than two held-out texts it is fitted on those.

    Source: CALM, Schuster et al., arXiv 2207.07061, section 3.5.
    """
    texts, rows = [], 0
    for text in trained.held[1::2] or trained.learned:
        if rows < CLASSIFIER_ROWS:
            texts.append(text)
            rows += len(text.tokens) - text.answer + 1
    with torch.autocast("cpu", torch.bfloat16):
        _, agrees = confidences(trained.heads.tensors, trained.teacher, texts)
    tensors: Tensors = {}
    for exit, labels in enumerate(agrees.float()):
        fitted = _logistic_regression(_exit_rows(texts, exit, len(agrees)), labels)
        tensors |= {f"sure.{exit}.{name}": tensor for name, tensor in fitted.items()}
    return tensors


def _exit_rows(texts: Sequence[Text], exit: int, exits: int) -> torch.Tensor:
    """Normed hidden rows [tokens, hidden] of the answers before an exit."""
    return unit(torch.cat([text.hidden[text.answer - 1 :].unflatten(-1, (exits + 1, -1))[:, exit] for text in texts]))


def _classifier_confidences(trained: TrainedHeads, texts: Sequence[Text], exit: int) -> torch.Tensor:
    """Confidence [tokens] of an exit's classifier at each token of the answers."""
    weight, bias = (trained.heads.tensors[f"sure.{exit}.{name}"] for name in ("weight", "bias"))
    return torch.sigmoid(_exit_rows(texts, exit, trained.heads.count) @ weight + bias)


def _logistic_regression(rows: torch.Tensor, labels: torch.Tensor) -> Tensors:
    """Fit weight [n] and bias [1] of rows [tokens, n] to labels [tokens] in {0, 1}, by L-BFGS."""
    weight, bias = (torch.zeros(size, requires_grad=True) for size in (rows.shape[1], 1))
    solver = torch.optim.LBFGS([weight, bias], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> float:
        solver.zero_grad()
        value = binary_cross_entropy_with_logits(rows @ weight + bias, labels) + PENALTY * (weight**2).sum()
        value.backward()
        return float(value.detach())

    solver.step(loss)
    return {"weight": weight.detach(), "bias": bias.detach()}


def unchecked_exit(threshold: float, exited: torch.Tensor, agrees: torch.Tensor, cost: float, head: float) -> UncheckedExit:
    """Measure one threshold of one exit.

    exited, agrees: [tokens] bool, whether a token exits and whether the full model predicts the same token.
    cost, head: shares of a plain step's bytes, of the layers below with the exit and of the exit alone.
    """
    share = float(exited.float().mean())
    return UncheckedExit(threshold, share, float(agrees[exited].float().mean()), share * cost + (1 - share) * (1 + head))


def _fresh_texts(opened: Opened, held: Sequence[Text], config: HeadsConfig) -> list[Text]:
    """Sample new answers to the first FRESH_PROMPTS held-out prompts, and read the hidden rows along them."""
    llm = open_writer(opened, config.threads)
    prompts = [text.prompt for text in held[:FRESH_PROMPTS]]
    texts = write_texts(llm, prompts, config.max_tokens, config.seed + 7, config.exits, (TEMPERATURE,))
    llm.close()
    return texts


def seen_share(texts: Sequence[Text], learned: Sequence[Text]) -> float:
    """Return the share of the answers' 8-grams that occur in the learned answers."""
    known = {gram for text in learned for gram in _grams(text)}
    grams = [gram for text in texts for gram in _grams(text)]
    return sum(gram in known for gram in grams) / max(1, len(grams))


def _grams(text: Text) -> Iterator[tuple[int, ...]]:
    tokens = text.tokens[text.answer :].tolist()
    return zip(*(tokens[start:] for start in range(GRAM)), strict=False)
