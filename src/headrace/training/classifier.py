"""Train a classifier with early exits: a linear layer after each chosen layer of an encoder, which stays frozen or learns with
them (training.joint_classifier).

Exits over a frozen encoder are trained on the rows that the engine itself computes, the ones they read later. Each exit is a
logistic regression of its own. Learn-then-Test calibrates the thresholds on texts that trained nothing.
"""

import csv
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from headrace.data.outputs import whole
from headrace.data.params import SamplingParams
from headrace.decoding.prompts import Classifying
from headrace.llm import LLM
from headrace.runner.classifier import BOTH, CRITERIA, Exits, leave_at, probabilities
from headrace.startup.exits import Pair, Rule, encoded, save
from headrace.startup.opening import Opened, open_model
from headrace.stats.calibration import calibrate
from headrace.training.joint_classifier import WORK, Schedule, Stopped, check_new, learn, save_model
from headrace.training.overlap import hashes, parts_of, split, without
from headrace.training.run import alone_in

STEPS = 200  # of L-BFGS, at most
BATCH = 64  # texts that the engine is given at a time
FINE = 100  # thresholds of a grid
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Labelled:
    """Texts, or pairs of them, and what they are."""

    texts: list[str | Pair]
    labels: list[str]

    def part(self, which: Sequence[int]) -> "Labelled":
        return Labelled([self.texts[at] for at in which], [self.labels[at] for at in which])


def read_labelled(path: Path, most: int | None = None) -> Labelled:
    """JSON lines, or .tsv and .csv with a header: "text" (or "sentence") and "label"; of pairs "text" and "pair" (or
    "sentence1" and "sentence2"). Raises ValueError, naming the line."""
    texts: list[str | Pair] = []
    labels: list[str] = []
    for number, row in enumerate(_rows(path), 1):
        text = row.get("text", row.get("sentence", row.get("sentence1")))
        second, label = row.get("pair", row.get("sentence2")), row.get("label")
        if not isinstance(text, str) or not text or not isinstance(label, str | int) or isinstance(label, bool):
            raise ValueError(f'{path}, entry {number}: wants "text" (or "sentence") and "label"')
        if second is not None and (not isinstance(second, str) or not second):
            raise ValueError(f'{path}, entry {number}: "pair" (or "sentence2") is the second text, and is empty')
        texts.append(text if second is None else (text, second))
        labels.append(str(label))
        if most is not None and len(texts) == most:
            break
    if not texts:
        raise ValueError(f"{path} has no texts")
    return Labelled(texts, labels)


def _rows(path: Path) -> Iterator[dict[str, object]]:
    """The entries of a file. Raises ValueError where they cannot be read."""
    try:
        yield from _read(path)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text (byte {error.start} of a part)") from None
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as a table ({error})") from None


def _read(path: Path) -> Iterator[dict[str, object]]:
    with path.open(encoding="utf-8", newline="") as file:
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


class Rows(Exits):
    """In place of exits: what each would read, the pooled rows themselves."""

    def logits(self, exit: int, pooled: np.ndarray) -> np.ndarray:
        return pooled


def pooled_rows(
    llm: LLM, texts: Sequence[str | Pair], layers: tuple[int, ...], pooling: str, progress: OnProgress
) -> np.ndarray:
    """[exits, texts, width] float32: what exits after these layers read. The engine must be idle."""
    nothing = np.empty(0)
    made = np.empty((len(layers), len(texts), llm.model_config.hidden_size * (1 + (pooling == BOTH))), np.float32)
    with llm.runner.classifying(Rows(layers, (), pooling, nothing, nothing)):
        for start in range(0, len(texts), BATCH):
            made[:, start : start + BATCH] = np.swapaxes(exit_logits(llm, texts[start : start + BATCH]), 0, 1)
            progress("reading", min(start + BATCH, len(texts)), len(texts))
    return made


def exit_logits(llm: LLM, texts: Sequence[str | Pair]) -> list[list[tuple[float, ...]]]:
    """For each text the logits [exits, classes] of all exits; no text exits early."""
    read = partial(llm.tokenizer.encode, parse_special=False)
    outputs = whole(llm.generate(encoded(read, texts), SamplingParams(max_tokens=1), strategy=Classifying()))
    return [output.classified for output in outputs]


def fit(rows: np.ndarray, classes: np.ndarray, count: int, decay: float) -> tuple[np.ndarray, np.ndarray]:
    """Logistic regression of rows [texts, hidden] on classes [texts]: weight [count, hidden], bias [count], float32. Rows are
    brought to mean 0 and variance 1, which is folded into both."""
    mean, scale = rows.mean(0), rows.std(0) + 1e-6
    x, y = torch.from_numpy((rows - mean) / scale).double(), torch.from_numpy(classes)
    weight = torch.zeros(count, x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(count, dtype=torch.float64, requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        solver.zero_grad()
        lost: torch.Tensor = cross_entropy(x @ weight.t() + bias, y) + decay * weight.square().sum()
        lost.backward()
        return lost

    solver.step(loss)
    folded = weight.detach().numpy() / scale
    return folded.astype(np.float32), (bias.detach().numpy() - folded @ mean).astype(np.float32)


def grid_of(criterion: str, classes: int, exits: int) -> list[float]:
    """Thresholds from the safest on, the same whatever the data."""
    if criterion == "patience":
        return [float(count) for count in range(exits - 1, 0, -1)]
    if criterion in ("entropy", "kl"):
        return np.geomspace(1e-6, np.log(classes), FINE).tolist()
    least = 1 / classes if criterion == "max_prob" else 0.0
    return (1 - np.geomspace(1e-6, 1 - least, FINE)).tolist()


def calibrated(
    exits: Exits,
    probs: np.ndarray,
    classes: np.ndarray,
    delta: float,
    epsilon: float,
    criteria: Iterable[str] = CRITERIA,
) -> list[Rule]:
    """For each criterion the least careful threshold that can be shown, on probabilities [exits, texts, classes] of texts that
    trained nothing. A text is lost where the exit is wrong and the whole model is right. Without one the criterion is left out.
    """
    best = probs.argmax(-1)
    rules = []
    for criterion in criteria:
        if criterion == "patience" and len(exits.layers) < 2:
            continue

        def losses(threshold: float, criterion: str = criterion) -> np.ndarray:
            at = leave_at(criterion, threshold, probs)
            left = best[at, np.arange(len(at))]
            return ((left != classes) & (best[-1] == classes)).astype(float)

        grid = grid_of(criterion, len(exits.labels), len(exits.layers))
        found = calibrate(losses, grid, delta=delta, epsilon=epsilon)
        if found.threshold is not None and found.risk is not None:
            at = leave_at(criterion, found.threshold, probs)
            layers = float(np.array(exits.layers)[at].mean())
            rules.append(Rule(criterion, found.threshold, delta, epsilon, found.bound, found.n, found.risk, layers))
    return rules


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a classifier is trained. `layers`: where exits stand, None after every layer. `pooling`: first, mean, both, None what
    the encoder was trained with. `held_out`: the share of the texts that thresholds are calibrated on, where there are none.
    `joint`: how the encoder learns with its exits; None: it stays as it is."""

    layers: tuple[int, ...] | None = None
    pooling: str | None = None
    decay: float = 1e-3
    delta: float = 0.01
    epsilon: float = 0.05
    held_out: float = 0.3
    seed: int = 0
    threads: int | None = None
    joint: Schedule | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Accuracy of each exit on the texts of the calibration, the calibrated rules, and `notes` on texts left out."""

    exits: Exits
    accuracy: list[float]
    rules: list[Rule]
    notes: list[str]


def train(
    model: str,
    data: Labelled,
    out: Path,
    recipe: Recipe,
    progress: OnProgress,
    check: Labelled | None = None,
    interrupt: Stopped | None = None,
) -> Result:
    """Train and calibrate a classifier for an encoder, and write it to a folder, with the encoder where that learns, too; then
    the same call goes on where one was stopped. `interrupt` is entered while both learn and says whether to stop. Raises
    ValueError, and KeyboardInterrupt once stopped."""
    with alone_in(out):
        return _train(model, data, out, recipe, progress, check, interrupt)


def _train(
    model: str,
    data: Labelled,
    out: Path,
    recipe: Recipe,
    progress: OnProgress,
    check: Labelled | None,
    interrupt: Stopped | None,
) -> Result:
    labels = tuple(sorted(set(data.labels)))
    data, check, notes = _apart(data, check, recipe)
    if len(set(data.labels)) < 2 or len(check.texts) < 2:
        raise ValueError("a classifier needs texts of two labels at least, and some to calibrate with; give more")
    if strange := sorted(set(check.labels) - set(labels)):
        raise ValueError(f"the label {strange[0]!r} is in no text to train with; give one, or leave its texts out")
    opened = open_model(model)
    layers, pooling = _places(opened, recipe), recipe.pooling or opened.pooling
    about: dict[str, float | str] = {"texts": float(len(data.texts))}
    if recipe.joint is not None:
        stopped = interrupt or nullcontext(lambda: False)
        weight, bias = _learn_together(opened, data, labels, out, layers, pooling, recipe, progress, stopped)
        about |= {"parent": opened.path.name, "epochs": recipe.joint.epochs, "rate": recipe.joint.rate}
    with LLM(out if recipe.joint is not None else model, threads=recipe.threads) as llm:
        if recipe.joint is None:
            weight, bias = _fit_all(llm, data, labels, layers, pooling, recipe, progress)
            about |= {"decay": recipe.decay}
        exits = Exits(layers, labels, pooling, weight, bias)
        rows = pooled_rows(llm, check.texts, layers, pooling, progress).astype(np.float64)
        probs = probabilities(np.stack([exits.logits(exit, rows[exit]) for exit in range(len(layers))]))
        classes = _numbers(labels, check)
        rules = calibrated(exits, probs, classes, recipe.delta, recipe.epsilon)
        accuracy = (probs.argmax(-1) == classes).mean(-1).tolist()
        save(out, exits, llm.opened, about | {"accuracy": float(accuracy[-1])}, rules)
    if recipe.joint is not None:
        shutil.rmtree(out / WORK)
    return Result(exits, accuracy, rules, notes)


def _apart(data: Labelled, check: Labelled | None, recipe: Recipe) -> tuple[Labelled, Labelled, list[str]]:
    """Texts to train with and texts to calibrate with, none of which is among the former, and notes on what was left out.
    Raises ValueError if every text of `check` is in `data`."""
    if check is None:
        learned, held, left_out = split(data.texts, recipe.held_out, recipe.seed)
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


def _places(opened: Opened, recipe: Recipe) -> tuple[int, ...]:
    """After which layers exits stand. Raises ValueError."""
    if not opened.config.encoder:
        raise ValueError(f"classifiers are of encoders (BERT, MiniLM), and {opened.name} is none; take another model")
    depth = opened.config.num_layers
    layers = recipe.layers or tuple(range(1, depth + 1))
    if list(layers) != sorted(set(layers)) or layers[0] < 1 or layers[-1] != depth:
        raise ValueError(f"exits stand after ascending layers, the last after layer {depth}; not {layers}")
    return layers


def _numbers(labels: Sequence[str], data: Labelled) -> np.ndarray:
    """The classes of texts, by number."""
    number = {label: at for at, label in enumerate(labels)}
    return np.array([number[label] for label in data.labels])


Weights = tuple[np.ndarray, np.ndarray]  # [exits, classes, width] and [exits, classes], float64


def _fit_all(
    llm: LLM, data: Labelled, labels: Sequence[str], layers: tuple[int, ...], pooling: str, recipe: Recipe, progress: OnProgress
) -> Weights:
    """Each exit by itself, on the rows of an encoder that stays as it is."""
    rows, classes, weights = pooled_rows(llm, data.texts, layers, pooling, progress), _numbers(labels, data), []
    for exit in range(len(layers)):
        progress("training", exit + 1, len(layers))
        weights.append(fit(rows[exit], classes, len(labels), recipe.decay))
    weight, bias = (np.stack(each).astype(np.float64) for each in zip(*weights, strict=True))
    return weight, bias


def _learn_together(
    opened: Opened,
    data: Labelled,
    labels: Sequence[str],
    out: Path,
    layers: tuple[int, ...],
    pooling: str,
    recipe: Recipe,
    progress: OnProgress,
    interrupt: Stopped,
) -> Weights:
    """All exits with the encoder, which is written to the folder."""
    assert recipe.joint is not None
    check_new(out, opened)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    texts = encoded(partial(opened.tokenizer.encode, parse_special=False), data.texts)
    numbers = _numbers(labels, data).tolist()
    learnt = learn(opened, texts, numbers, len(labels), layers, pooling, recipe.joint, progress, out / WORK, interrupt)
    save_model(out, learnt.model, opened)
    return learnt.weight.astype(np.float64), learnt.bias.astype(np.float64)
