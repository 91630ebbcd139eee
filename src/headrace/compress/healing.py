"""Healing: a model that was cut is trained on what the original says, before anything is rounded. Who trains is given, since
training stands above this room; here is what is asked of it, on which texts, and what it tells."""

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

BATCH = 4  # texts of a step
OWN = 256  # texts that the model writes at the most; beyond, they come again
TEXTS = "heal.texts.json"


@dataclass(frozen=True, slots=True)
class HealReport:
    """`tokens` were seen in `steps`, of which so many are `different`; judged beside the original on held-out texts."""

    steps: int
    tokens: int
    different: int
    before: Judgement
    after: Judgement


@dataclass(frozen=True, slots=True)
class Healed:
    """A filled model in float32, and what became of it."""

    model: Model
    report: HealReport


class Healer(Protocol):
    """Who trains (training.healing)."""

    def heal(self, original: Opened, cut: Opened, texts: Texts, how: Heal, folder: Path, tell: Progress) -> Healed:
        """Train what a cut has left, going on from what an earlier run left in `folder`. Raises ValueError, and
        KeyboardInterrupt once stopped."""


def heal_texts(opened: Opened, source: str, how: Heal, work: WorkFolder, judged: Texts, tell: Progress) -> Texts:
    """What there is to learn from, kept in the work: as many texts as the steps take, or as there are, other than `judged`.

    Raises ValueError as `draw_texts` and `check_apart` do."""
    if not (work.folder / TEXTS).is_file():
        count = how.steps * BATCH if source != SELF else min(OWN, how.steps * BATCH)
        made = draw_texts(opened, source, max(count, 2) * WINDOW, how.seed, tell, WINDOW, how.threads)
        save_texts(work, TEXTS, made)
    texts = load_texts(work, TEXTS)
    check_apart(passage_hashes(texts), judged)
    return texts


def heal_bytes(original: ModelConfig, cut: ModelConfig) -> int:
    """What training takes in memory at the most: weights, gradients and the optimiser's two moments, the original as the core
    packs it and its head, and the logits of a text some times over."""
    table = original.vocab_size * original.hidden_size
    student, teacher = describe(cut).num_parameters, describe(original).num_parameters
    return 16 * student + 2 * teacher + 4 * table + 10 * 4 * original.vocab_size * WINDOW
