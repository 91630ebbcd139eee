"""Distillation of encoders: a student of some of the teacher's layers learns its hidden states on given texts.

Losses: "features", the mean square between the rows of paired layers; "cosine", one minus the cosine of the rows after the
last layer. DistilBERT adds the masked tokens of pretraining, for which an encoder of embeddings has no head.

Source: Sanh et al., "DistilBERT", arXiv 1910.01108; Sun et al., "Patient Knowledge Distillation", arXiv 1908.09355.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cosine_similarity, mse_loss

from headrace.compress.export import write_json
from headrace.data.progress import Progress
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.startup.opening import Opened
from headrace.training.joint_classifier import check_new, pooled, save_model
from headrace.training.run import Interrupt, Run, record_job
from headrace.training.sequence_forward import run_sequences
from headrace.training.students import Student, student_of
from headrace.weights.loader import load_model

# Texts held out to judge by, at most a quarter of all.
HELD_OUT = 128
REPORT = "distil.json"
ENCODER_LOSSES = ("features", "cosine")
RATE = 1e-4
BETAS = (0.9, 0.98)


@dataclass(frozen=True, slots=True)
class Likeness:
    """Means over held-out texts: cosine of the student's embedding with the teacher's, and share of texts whose nearest other
    text is the same."""

    cosine: float
    same_nearest: float


@dataclass(frozen=True, slots=True)
class EncoderReport:
    """Result of a distillation, also written to distil.json. weights: number of weights of the student and of the teacher."""

    steps: int
    texts: int
    seconds: float
    weights: tuple[int, int]
    before: Likeness
    after: Likeness
    losses: list[float] = field(default_factory=list)


def distil_encoder(
    opened: Opened, out: Path, config: Any, job: dict[str, Any], progress: Progress, interrupt: Interrupt | None
) -> EncoderReport:
    """Train a student of an open encoder into the model folder `out`. config: a DistilConfig.

    Raises ValueError (WeightError) for an invalid job, and KeyboardInterrupt if `interrupt` stopped the training.
    """
    _check(config)
    check_new(out, opened)
    student = _student(config.student, opened)
    lines = Path(config.texts).read_text("utf-8-sig").splitlines()
    texts = [opened.tokenizer.encode(line, parse_special=False)[: config.window] for line in lines if line.strip()]
    learned, held = _held_apart(texts, config.seed)
    work = out / "work"
    record_job(work, job)
    if config.threads:
        torch.set_num_threads(config.threads)
    teacher, pooling = load_model(opened.source), opened.pooling
    progress.start("judging")
    goal = _embeddings(teacher, held, pooling)
    before = _likeness(_embeddings(student.model, held, pooling), goal)
    run = Run(dict(student.model.named_parameters()), work, config.budget, config.rate or RATE, betas=BETAS)
    losses: list[float] = []

    def step(number: int) -> float:
        rng = random.Random(config.seed * 1_000_003 + number)
        loss = loss_of(teacher, student, rng.sample(learned, min(config.batch, len(learned))), config.losses)
        loss.backward()
        losses.append(loss.item())
        return losses[-1]

    run.train(step, progress, interrupt)
    progress.start("judging")
    model = student.model
    after = _likeness(_embeddings(model, held, pooling), goal)
    save_model(out, model, opened)
    weights = model.num_parameters, describe(opened.config).num_parameters
    report = EncoderReport(run.steps, len(learned), run.seconds, weights, before, after, losses[-1:])
    progress.finish()
    write_json(out / REPORT, {**job, **asdict(report)})
    return report


def loss_of(teacher: Model, student: Student, texts: Sequence[list[int]], losses: Sequence[str]) -> torch.Tensor:
    """Sum of the chosen losses over the tokens of some texts."""
    with torch.no_grad():
        aims = run_sequences(teacher, texts, student.pairs).after
    rows = run_sequences(student.model, texts, range(len(student.pairs))).after
    total = torch.zeros(())
    if "features" in losses:
        total = total + torch.stack([mse_loss(one, aim) for one, aim in zip(rows, aims, strict=True)]).mean()
    if "cosine" in losses:
        total = total + 1 - cosine_similarity(rows[-1], aims[-1], dim=-1).mean()
    return total


def _check(config: Any) -> None:
    unknown = [name for name in config.losses if name not in ENCODER_LOSSES]
    if unknown:
        raise ValueError(f"an encoder predicts no tokens: its losses are features and cosine, not {unknown[0]}")
    if not Path(config.texts).is_file():
        raise ValueError("an encoder writes no texts; name a file of texts, one a line, with texts")
    if config.as_draft:
        raise ValueError("an encoder drafts no tokens; leave as_draft out")


def _student(wanted: str, opened: Opened) -> Student:
    if not wanted.startswith(("layers:", "depth=")) or "width=" in wanted:
        raise ValueError(f"the student of an encoder is some of its layers, layers:0,2,4 or depth=3, not {wanted!r}")
    return student_of(wanted, opened)


def _held_apart(texts: list[list[int]], seed: int) -> tuple[list[list[int]], list[list[int]]]:
    if len(texts) < 8:
        raise ValueError(f"{len(texts)} texts are too few to learn from, as some are held out; give 8 or more")
    random.Random(seed).shuffle(texts)
    held = min(HELD_OUT, len(texts) // 4)
    return texts[held:], texts[:held]


@torch.no_grad()
def _embeddings(model: Model, texts: Sequence[list[int]], pooling: str) -> torch.Tensor:
    """Pooled last rows [texts, hidden] of length 1."""
    parts = [texts[start : start + 16] for start in range(0, len(texts), 16)]
    rows = [pooled(run_sequences(model, part).rows, [len(text) for text in part], pooling) for part in parts]
    return torch.nn.functional.normalize(torch.cat(rows).float(), dim=-1)


def _likeness(student: torch.Tensor, teacher: torch.Tensor) -> Likeness:
    nearest = [(rows @ rows.T).fill_diagonal_(-1).argmax(-1) for rows in (student, teacher)]
    return Likeness(float((student * teacher).sum(-1).mean()), float((nearest[0] == nearest[1]).float().mean()))
