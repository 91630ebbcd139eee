"""Healing: a cut or pruned model is trained to predict what the original predicts (distillation), before anything is rounded.

The trainer is passed in, because training imports this package. This module holds its interface, texts and report.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.compress.judge import Judgement
from headrace.compress.pipeline import SELF, Heal
from headrace.compress.texts import WINDOW, Texts, check_apart, draw_texts, load_texts, passage_hashes, save_texts
from headrace.compress.work_folder import WorkFolder
from headrace.data.config import ModelConfig
from headrace.data.progress import Progress
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.startup.opening import Opened

BATCH = 4  # texts in a step
OWN = 256  # most texts that the model writes; longer trainings repeat them
TEXTS = "heal.texts.json"


@dataclass(frozen=True, slots=True)
class HealReport:
    """Training of `steps` steps over `tokens` tokens, `different` of them distinct.

    before, after: judgement on held-out texts before and after it; with rounds of pruning, `before` is of the model that is
    pruned at once and not trained.
    """

    steps: int
    tokens: int
    different: int
    before: Judgement
    after: Judgement


class Healer(Protocol):
    """Trainer of cut models (training.distil.Healing)."""

    def heal(
        self, original: Opened, cut: Opened, texts: Texts, how: Heal, folder: Path, progress: Progress
    ) -> tuple[Model, HealReport]:
        """Train a cut model, resuming from `folder`. Returns it in float32, with the report of the training.

        Raises ValueError, and KeyboardInterrupt once stopped.
        """


def heal_texts(opened: Opened, source: str, how: Heal, work: WorkFolder, judged: Texts, progress: Progress) -> Texts:
    """Training texts, kept in the work folder; none is in `judged`. As many as the steps take, or as there are.

    Raises ValueError as `draw_texts` and `check_apart` do.
    """
    if not (work.folder / TEXTS).is_file():
        count = how.steps * BATCH if source != SELF else min(OWN, how.steps * BATCH)
        drawn = draw_texts(opened, source, max(count, 2) * WINDOW, how.seed, progress, WINDOW, how.threads)
        save_texts(work, TEXTS, drawn)
    texts = load_texts(work, TEXTS)
    check_apart(passage_hashes(texts), judged)
    return texts


def heal_bytes(original: ModelConfig, cut: ModelConfig, pruned: bool = False) -> int:
    """Peak memory of training in bytes: weights, gradients and optimizer moments; the packed original; logits of a text.

    pruned: also a mask of zeros.
    """
    table = original.vocab_size * original.hidden_size
    student, teacher = describe(cut).num_parameters, describe(original).num_parameters
    return (16 + pruned) * student + 2 * teacher + 4 * table + 10 * 4 * original.vocab_size * WINDOW
