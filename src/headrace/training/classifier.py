"""Training of a classifier with exits: a linear layer after each chosen layer of an encoder, for classes or for a number.

Over a frozen encoder, each exit is a logistic regression on the rows that the engine itself computes. With a JointConfig the
encoder learns together with its exits (training.joint_classifier). Learn-then-Test calibrates the exit thresholds on texts that
trained nothing.
"""

import csv
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch.nn.functional import cross_entropy

from headrace.data.outputs import whole
from headrace.data.params import SamplingParams
from headrace.data.plan import Threshold
from headrace.data.progress import Progress
from headrace.decoding.prompts import Classifying
from headrace.llm import LLM
from headrace.runner.classifier import BOTH, CRITERIA, ExitClassifiers, first_exit
from headrace.startup.classifier import ClassifierThreshold, Pair, encode_texts, save
from headrace.startup.opening import Opened, open_model
from headrace.stats.calibration import calibrate
from headrace.training.joint_classifier import WORK, JointConfig, check_new, learn, save_model
from headrace.training.overlap import hashes, parts_of, split, without
from headrace.training.regression import calibrated_patience, correlations, fit_number, numbers_of, spread
from headrace.training.run import Interrupt, TrainingConfig, exclusive

# Most steps of L-BFGS.
SOLVER_STEPS = 200
# Texts of one engine call.
BATCH = 64
# Thresholds of a calibration grid.
GRID_SIZE = 100


@dataclass(frozen=True, slots=True)
class LabelledTexts:
    """Texts, or pairs of texts, with one label each; numbers as their text."""

    texts: list[str | Pair]
    labels: list[str]

    def part(self, indices: Sequence[int]) -> "LabelledTexts":
        return LabelledTexts([self.texts[index] for index in indices], [self.labels[index] for index in indices])


def read_labelled(path: Path, most: int | None = None, *, numbers: bool = False) -> LabelledTexts:
    """Read JSON lines, or .tsv and .csv files with a header; `most` texts at most.

    Fields: "text" (or "sentence") and "label"; of pairs "text" and "pair" (or "sentence1" and "sentence2"). numbers: labels may
    have a decimal point.
    Raises ValueError, naming the line.
    """
    texts: list[str | Pair] = []
    labels: list[str] = []
    for number, row in enumerate(_rows(path), 1):
        text = row.get("text", row.get("sentence", row.get("sentence1")))
        second, label = row.get("pair", row.get("sentence2")), row.get("label")
        known = isinstance(label, str | int) or (numbers and isinstance(label, float))
        if not isinstance(text, str) or not text or not known or isinstance(label, bool):
            raise ValueError(f'{path}, entry {number}: wants "text" (or "sentence") and "label"')
        if second is not None and (not isinstance(second, str) or not second):
            raise ValueError(f'{path}, entry {number}: "pair" (or "sentence2") is the second text, and is empty')
        texts.append(text if second is None else (text, second))
        labels.append(str(label))
        if most is not None and len(texts) == most:
            break
    if not texts:
        raise ValueError(f"{path} has no texts")
    return LabelledTexts(texts, labels)


def _rows(path: Path) -> Iterator[dict[str, object]]:
    """Yield the entries of a file. Raises ValueError if it cannot be read."""
    try:
        yield from _read(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start} of a part)") from None
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as a table ({error})") from None


def _read(path: Path) -> Iterator[dict[str, object]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        if path.suffix in (".tsv", ".csv"):
            tabs = path.suffix == ".tsv"
            yield from csv.DictReader(
                file, delimiter="\t" if tabs else ",", quoting=csv.QUOTE_NONE if tabs else csv.QUOTE_MINIMAL
            )
            return
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: wants a JSON object on a line")
            yield row


class PooledRows(ExitClassifiers):
    """ExitClassifiers that return the pooled rows they read instead of logits."""

    def logits(self, exit: int, pooled: np.ndarray) -> np.ndarray:
        return pooled


def pooled_rows(llm: LLM, texts: Sequence[str | Pair], layers: tuple[int, ...], pooling: str, progress: Progress) -> np.ndarray:
    """Return what exits after `layers` read, [exits, texts, width] float32. The engine must be idle."""
    empty = np.empty(0)
    rows = np.empty((len(layers), len(texts), llm.model_config.hidden_size * (1 + (pooling == BOTH))), np.float32)
    progress.start("reading", len(texts), unit="texts")
    with llm.runner.classifying(PooledRows(layers, (), pooling, empty, empty)):
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            rows[:, start : start + BATCH] = np.swapaxes(exit_logits(llm, batch), 0, 1)
            progress.advance(len(batch))
    return rows


def exit_logits(llm: LLM, texts: Sequence[str | Pair]) -> list[list[tuple[float, ...]]]:
    """Return for each text the logits of all exits, [exits, classes]; no text exits early."""
    read = partial(llm.tokenizer.encode, parse_special=False)
    outputs = whole(llm.generate(encode_texts(read, texts), SamplingParams(max_tokens=1), strategy=Classifying()))
    return [output.classified for output in outputs]


def fit(rows: np.ndarray, classes: np.ndarray, count: int, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Fit a logistic regression by L-BFGS in float64, on rows normalized to mean 0 and variance 1.

    rows: [texts, hidden]. classes: [texts], 0 ≤ class < count. decay: L2 penalty of the weights.
    Returns weight [count, hidden] and bias [count] float32 with the normalization folded in.
    """
    mean, scale = rows.mean(0), rows.std(0) + 1e-6
    x, y = torch.from_numpy((rows - mean) / scale).double(), torch.from_numpy(classes)
    weight = torch.zeros(count, x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=SOLVER_STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        solver.zero_grad()
        value: torch.Tensor = cross_entropy(x @ weight.t() + bias, y) + decay * weight.square().sum()
        value.backward()
        return value

    solver.step(loss)
    folded = weight.detach().numpy() / scale
    return folded.astype(np.float32), (bias.detach().numpy() - folded @ mean).astype(np.float32)


def grid_of(criterion: str, classes: int, exits: int) -> list[float]:
    """Return the thresholds of a criterion, the safest first; they depend on no data."""
    if criterion == "patience":
        return [float(count) for count in range(exits - 1, 0, -1)]
    if criterion in ("entropy", "kl"):
        return np.geomspace(1e-6, np.log(classes), GRID_SIZE).tolist()
    least = 1 / classes if criterion == "max_prob" else 0.0
    return (1 - np.geomspace(1e-6, 1 - least, GRID_SIZE)).tolist()


def calibrated(
    exits: ExitClassifiers,
    probs: np.ndarray,
    classes: np.ndarray,
    delta: float,
    epsilon: float,
    criteria: Iterable[str] = CRITERIA,
    families: Mapping[str, Sequence[Threshold]] | None = None,
) -> list[ClassifierThreshold]:
    """Calibrate one threshold for each criterion; a criterion without a valid threshold has no rule.

    probs: [exits, texts, classes] of texts that trained nothing. families: by criterion, thresholds to test in place of its
    grid, the safest first; chosen without these texts.
    A text has loss 1 if its exit is wrong and the full model right. The guarantee holds for one criterion that was named
    before; `train` pays for the choice among all.
    """
    predicted = probs.argmax(-1)
    rules = []
    for criterion in criteria:
        if criterion == "patience" and len(exits.layers) < 2:
            continue

        def losses(threshold: Threshold, criterion: str = criterion) -> np.ndarray:
            exit_of = first_exit(criterion, threshold, probs)
            answers = predicted[exit_of, np.arange(len(exit_of))]
            return ((answers != classes) & (predicted[-1] == classes)).astype(float)

        grid: Sequence[Threshold] = (families or {}).get(criterion) or grid_of(criterion, len(exits.labels), len(exits.layers))
        result = calibrate(lambda at: losses(grid[int(at)]), range(len(grid)), delta=delta, epsilon=epsilon)  # noqa: B023
        if result.threshold is not None and result.risk is not None:
            threshold = grid[int(result.threshold)]
            exit_of = first_exit(criterion, threshold, probs)
            depths = np.array(exits.layers)[exit_of]
            about = result.bound, result.n, result.risk, float(depths.mean()), float(depths.std())
            rules.append(ClassifierThreshold(criterion, threshold, delta, epsilon, *about))
    return rules


def exit_families(probs: np.ndarray, classes: np.ndarray) -> dict[str, list[tuple[float, ...]]]:
    """Thresholds of the entropy for each exit but the last, for growing shares of lost texts, from other texts than those that
    calibrate.

    probs: [exits, texts, classes]. At a share, an exit has the largest threshold at which at most that share of the texts that
    pass it are lost; below the least entropy if there is none. So the exit that errs less stops more texts.

    Source: Teerapittayanon et al., "BranchyNet", arXiv 1709.01686 (a threshold for each exit).
    """
    predicted, most = probs.argmax(-1), float(np.log(probs.shape[-1]))
    curves = []
    for exit in range(len(probs) - 1):
        entropy = CRITERIA["entropy"].measure(probs[: exit + 1])
        order = np.argsort(entropy, kind="stable")
        lost = ((predicted[exit] != classes) & (predicted[-1] == classes))[order]
        curves.append((np.minimum(entropy[order], most), np.cumsum(lost) / np.arange(1, len(order) + 1)))

    def largest(entropies: np.ndarray, lost: np.ndarray, share: float) -> float:
        return float(entropies[within[-1]]) if len(within := np.flatnonzero(lost <= share)) else 0.0

    shares = np.geomspace(1e-4, 1.0, GRID_SIZE)
    return {"entropy": [tuple(largest(*curve, share) for curve in curves) for share in shares]}


@dataclass(frozen=True, slots=True)
class ClassifierConfig(TrainingConfig):
    """Settings of a classifier's training.

    layers: after which exits stand, None for all. pooling: "first", "mean" or "both", None for the encoder's own.
    decay: L2 penalty. delta, epsilon: of the calibration. held_out: share of `data` to calibrate with, if there is no `check`.
    each_exit: the entropy gets a threshold for each exit, shaped on the training texts.
    joint: settings of a training together with the encoder, None for a frozen encoder.
    tolerance: the labels are numbers, and patience counts exits that change the number by less; None: labels are classes.
    Raises ValueError for a tolerance of 0 or less, and for thresholds by exit of numbers.
    """

    layers: tuple[int, ...] | None = None
    pooling: str | None = None
    decay: float = 1e-3
    delta: float = 0.01
    epsilon: float = 0.05
    held_out: float = 0.3
    joint: JointConfig | None = None
    each_exit: bool = False
    tolerance: float | None = None

    def __post_init__(self) -> None:
        if self.tolerance is not None and not 0 < self.tolerance < float("inf"):
            raise ValueError(f"--tolerance {self.tolerance:g}: give a number above 0, in the unit of the labels")
        if self.tolerance is not None and self.each_exit:
            raise ValueError("--each-exit is for the entropy of classes; leave it out, or --tolerance")


@dataclass(frozen=True, slots=True)
class ClassifierReport:
    """A trained classifier: the accuracy of each exit on the calibration texts (of numbers: Pearson's r), the rules, and notes
    on texts left out."""

    exits: ExitClassifiers
    accuracy: list[float]
    rules: list[ClassifierThreshold]
    notes: list[str]


@exclusive
def train(
    model: str,
    data: LabelledTexts,
    out: Path,
    config: ClassifierConfig,
    progress: Progress | None = None,
    check: LabelledTexts | None = None,
    interrupt: Interrupt | None = None,
) -> ClassifierReport:
    """Train and calibrate a classifier for an encoder, into the folder `out`; with `config.joint` also the encoder.

    check: texts to calibrate with; None holds out a share of `data`. The same call resumes a stopped joint training.
    Raises ValueError, and KeyboardInterrupt if `interrupt` stopped the joint training.
    """
    progress = progress or Progress()
    labels = tuple(sorted(set(data.labels))) if config.tolerance is None else ()
    data, check, notes = _disjoint(data, check, config)
    if len(set(data.labels)) < 2 or len(check.texts) < 2:
        raise ValueError("a classifier needs texts of two labels at least, and some to calibrate with; give more")
    if labels and (strange := sorted(set(check.labels) - set(labels))):
        raise ValueError(f"the label {strange[0]!r} is in no text to train with; give one, or leave its texts out")
    opened = open_model(model)
    layers, pooling = _exit_layers(opened, config), config.pooling or opened.pooling
    about: dict[str, float | str] = {"texts": float(len(data.texts))}
    if config.joint is not None:
        config.set_threads()
        check_new(out, opened)
        weight, bias = _train_jointly(opened, data, labels, out, layers, pooling, config.joint, progress, interrupt)
        about |= {"parent": opened.path.name, "epochs": config.joint.epochs, "rate": config.joint.rate}
    with LLM(out if config.joint is not None else model, threads=config.threads) as llm:
        if config.joint is None:
            weight, bias = _fit_exits(llm, data, labels, layers, pooling, config.decay, progress)
            about |= {"decay": config.decay}
        exits = ExitClassifiers(layers, labels, pooling, weight, bias, config.tolerance)
        predicted, targets = _predictions(llm, exits, check, progress), _targets(labels, check)
        if config.tolerance is not None:
            rules = calibrated_patience(exits, predicted, targets, config.delta, config.epsilon)
            accuracy = correlations(predicted, targets)
        else:
            rules = _rules(llm, exits, data, predicted, targets, config, progress)
            accuracy = (predicted.argmax(-1) == targets).mean(-1).tolist()
        save(out, exits, llm.opened, about | {"accuracy": float(accuracy[-1])}, rules)
    if config.joint is not None:
        shutil.rmtree(out / WORK)
    return ClassifierReport(exits, accuracy, rules, notes)


def _rules(
    llm: LLM,
    exits: ExitClassifiers,
    data: LabelledTexts,
    probs: np.ndarray,
    classes: np.ndarray,
    config: ClassifierConfig,
    progress: Progress,
) -> list[ClassifierThreshold]:
    """Calibrate all criteria. data: training texts, which shape thresholds by exit.

    The default rule is the best of all criteria on these texts: each is tested at a part of epsilon (Bonferroni), so that all
    hold together.
    """
    families = None
    if config.each_exit and len(exits.layers) > 1:
        families = exit_families(_predictions(llm, exits, data, progress), _targets(exits.labels, data))
    rules = calibrated(exits, probs, classes, config.delta, config.epsilon / len(CRITERIA), families=families)
    return [msgspec.structs.replace(rule, epsilon=config.epsilon) for rule in rules]


def _disjoint(
    data: LabelledTexts, check: LabelledTexts | None, config: ClassifierConfig
) -> tuple[LabelledTexts, LabelledTexts, list[str]]:
    """Return texts to train with, other texts to calibrate with, and notes on texts left out.

    Raises ValueError if every text of `check` is in `data`.
    """
    if check is None:
        learned, held, left_out = split(data.texts, config.held_out, config.seed)
        notes = [f"{left_out} of {len(data.texts)} texts are part of texts on both sides of the split and were left out"]
        return data.part(learned), data.part(held), notes if left_out else []
    fresh = without(check.texts, hashes(data.texts))
    if not fresh:
        raise ValueError(f"all {len(check.texts)} texts of --check are also in --data, which proves nothing; give others")
    notes = []
    if len(fresh) < len(check.texts):
        notes = [f"{len(check.texts) - len(fresh)} of {len(check.texts)} texts of --check are also in --data and were left out"]
    check = check.part(fresh)
    if inner := sum(map(bool, parts_of(check.texts, data.texts))):
        notes.append(f"{inner} of {len(fresh)} texts of --check are part of a text in --data; the guarantee is weaker for them")
    return data, check, notes


def _exit_layers(opened: Opened, config: ClassifierConfig) -> tuple[int, ...]:
    """Return the numbers of layers after which exits stand. Raises ValueError."""
    if not opened.config.encoder:
        raise ValueError(f"classifiers need an encoder (BERT, MiniLM), and {opened.name} is not one; use another model")
    depth = opened.config.num_layers
    layers = config.layers or tuple(range(1, depth + 1))
    if list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] != depth:
        raise ValueError(f"exits stand after ascending layers, the last after layer {depth}; not {layers}")
    return layers


def _predictions(llm: LLM, exits: ExitClassifiers, data: LabelledTexts, progress: Progress) -> np.ndarray:
    """Return the probabilities of all exits, [exits, texts, classes], or their numbers, [exits, texts, 1]."""
    rows = pooled_rows(llm, data.texts, exits.layers, exits.pooling, progress).astype(np.float64)
    return exits.predictions(np.stack([exits.logits(exit, rows[exit]) for exit in range(len(exits.layers))]))


def _targets(labels: Sequence[str], data: LabelledTexts) -> np.ndarray:
    """Return the class numbers [texts] of the labels; without labels the numbers themselves."""
    if not labels:
        return numbers_of(data.labels)
    number = {label: index for index, label in enumerate(labels)}
    return np.array([number[label] for label in data.labels])


# [exits, classes, width] and [exits, classes], float64.
ExitWeights = tuple[np.ndarray, np.ndarray]


def _fit_exits(
    llm: LLM,
    data: LabelledTexts,
    labels: Sequence[str],
    layers: tuple[int, ...],
    pooling: str,
    decay: float,
    progress: Progress,
) -> ExitWeights:
    """Fit each exit by itself, on rows of the frozen encoder."""
    rows, targets, weights = pooled_rows(llm, data.texts, layers, pooling, progress), _targets(labels, data), []
    progress.start("training", len(layers), unit="exits")
    for exit in range(len(layers)):
        progress.advance(1)
        own = fit(rows[exit], targets, len(labels), decay) if labels else fit_number(rows[exit], targets, decay)
        weights.append(own)
    weight, bias = (np.stack(parts).astype(np.float64) for parts in zip(*weights, strict=True))
    return weight, bias


def _train_jointly(
    opened: Opened,
    data: LabelledTexts,
    labels: Sequence[str],
    out: Path,
    layers: tuple[int, ...],
    pooling: str,
    joint: JointConfig,
    progress: Progress,
    interrupt: Interrupt | None,
) -> ExitWeights:
    """Train all exits together with the encoder, and write the encoder to `out`."""
    texts = encode_texts(partial(opened.tokenizer.encode, parse_special=False), data.texts)
    targets = _targets(labels, data)
    centre, width = (0.0, 1.0) if labels else spread(targets)
    learned = targets.tolist() if labels else ((targets - centre) / width).tolist()
    trained = learn(opened, texts, learned, len(labels) or 1, layers, pooling, joint, progress, out / WORK, interrupt)
    save_model(out, trained.model, opened)
    return trained.weight.astype(np.float64) * width, trained.bias.astype(np.float64) * width + centre
