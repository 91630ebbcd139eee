"""Healing within `compress`: what a cut has left learns what the original says, by its probabilities and the texts' tokens."""

from contextlib import nullcontext
from pathlib import Path

import torch

from headrace.compress.healing import BATCH, Healed, HealReport
from headrace.compress.pipeline import Heal
from headrace.compress.texts import WINDOW, Texts
from headrace.data.progress import Progress
from headrace.startup.opening import Opened
from headrace.training.distil import HELD, Recipe, Stopped, before_training, tokens_seen, train
from headrace.training.examples import held_apart, windows
from headrace.training.losses import Lesson
from headrace.training.run import Budget, Run, begin
from headrace.training.students import Student, ends
from headrace.training.teacher_forward import AUTO, backend_of, forward_of
from headrace.weights.loader import load_model

LOSSES = ("kl", "ce")


class Healing:
    """The Healer of compress.healing. `interrupt` is entered while it trains and says whether to stop; `backend`: where the
    original runs meanwhile, one of forward.BACKENDS."""

    def __init__(self, interrupt: Stopped | None = None, backend: str = AUTO) -> None:
        self._interrupt = interrupt or nullcontext(lambda: False)
        self._backend = backend

    def heal(self, original: Opened, cut: Opened, texts: Texts, how: Heal, folder: Path, tell: Progress) -> Healed:
        """Train on all texts but those held out to judge by. The same bytes for the same request on the same machine and
        threads, whether it was stopped on the way or not."""
        backend = backend_of(self._backend, original, maps=False)
        begin(folder, {"backend": backend})
        before = torch.get_num_threads()
        torch.set_num_threads(how.threads)
        try:
            return self._healed(original, cut, texts, how, folder, tell, backend)
        finally:
            torch.set_num_threads(before)

    def _healed(
        self, original: Opened, cut: Opened, texts: Texts, how: Heal, folder: Path, tell: Progress, backend: str
    ) -> Healed:
        model = load_model(cut.source)
        student = Student(model, cut, ends(model.config.num_layers, original.config.num_layers))
        recipe = Recipe("", Budget(steps=how.steps), LOSSES, batch=BATCH, seed=how.seed, threads=how.threads, rate=how.rate)
        teacher = forward_of(backend, original, min(WINDOW, original.config.max_position), how.threads, maps=False)
        lesson = Lesson(teacher, student, LOSSES, recipe.temperature, recipe.share)
        learned, held = held_apart(windows(texts), HELD, how.seed)
        tell.start("judging")
        before, _ = before_training(lesson, original, folder, held, recipe)
        run = Run(lesson.tensors, folder, recipe.budget, how.rate)
        train(run, lesson, learned, recipe, tell, self._interrupt)
        for x in lesson.tensors.values():
            x.requires_grad_(False)
        tell.start("judging")
        after = lesson.judge(held)
        tell.finish()
        return Healed(model, HealReport(run.steps, *tokens_seen(learned, run.steps, recipe), before, after))
