"""Healing within `compress`: a pruned or rounded model learns from the original by KL and cross-entropy."""

from pathlib import Path

import torch

from headrace.compress.healing import BATCH, Healed, HealReport
from headrace.compress.pipeline import Heal
from headrace.compress.texts import WINDOW, Texts
from headrace.data.progress import Progress
from headrace.startup.opening import Opened
from headrace.training.distil import HELD_OUT, DistilConfig, judge_untrained, tokens_seen, train
from headrace.training.examples import held_apart, windows
from headrace.training.losses import DistillationLoss
from headrace.training.run import Budget, Interrupt, Run, record_job
from headrace.training.students import Student, ends
from headrace.training.teacher_forward import AUTO, backend_of, forward_of
from headrace.weights.loader import load_model

LOSSES = ("kl", "ce")


class Healing:
    """Implements `Healer` of compress.healing. backend: where the original runs, one of `teacher_forward.BACKENDS`."""

    def __init__(self, interrupt: Interrupt | None = None, backend: str = AUTO) -> None:
        self._interrupt, self._backend = interrupt, backend

    def heal(self, original: Opened, cut: Opened, texts: Texts, how: Heal, folder: Path, tell: Progress) -> Healed:
        """Train on all texts but those held out to judge by. Restores torch's thread count.

        The same bytes for the same request on the same machine and threads, whether it was stopped or not.
        """
        backend = backend_of(self._backend, original, maps=False)
        record_job(folder, {"backend": backend})
        threads = torch.get_num_threads()
        torch.set_num_threads(how.threads)
        try:
            return self._heal(original, cut, texts, how, folder, tell, backend)
        finally:
            torch.set_num_threads(threads)

    def _heal(
        self, original: Opened, cut: Opened, texts: Texts, how: Heal, folder: Path, progress: Progress, backend: str
    ) -> Healed:
        model = load_model(cut.source)
        student = Student(model, cut, ends(model.config.num_layers, original.config.num_layers))
        config = DistilConfig(
            "", Budget(steps=how.steps), LOSSES, batch=BATCH, rate=how.rate, seed=how.seed, threads=how.threads
        )
        teacher = forward_of(backend, original, min(WINDOW, original.config.max_position), how.threads, maps=False)
        loss = DistillationLoss(teacher, student, LOSSES, config.temperature, config.share)
        learned, held = held_apart(windows(texts), HELD_OUT, how.seed)
        progress.start("judging")
        before, _ = judge_untrained(loss, original, folder, held, config)
        run = Run(loss.tensors, folder, config.budget, how.rate)
        train(run, loss, learned, config, progress, self._interrupt)
        progress.start("judging")
        after = loss.judge(held)
        progress.finish()
        return Healed(model, HealReport(run.steps, *tokens_seen(learned, run.steps, config), before, after))
