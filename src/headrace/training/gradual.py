"""Gradual magnitude pruning: rounds that set the smallest weights of a model to 0, with training between them.

A weight that is 0 stays 0: it gets no gradient, and later rounds only add zeros. One round removes all at once, before the
training. The schedule is `compress.pruning.PruningSchedule`.

Source: Zhu & Gupta, "To prune, or not to prune", arXiv 1710.01878.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from headrace.compress.pruning import PruningSchedule
from headrace.models.base import Model
from headrace.models.layers import Linear


class GradualPruning:
    """Rounds of pruning over the matrices of a model's layers, during a training of `steps` steps.

    It has no state but the weights: a training that continues from its checkpoint has the same zeros.
    """

    def __init__(self, model: Model, schedule: PruningSchedule, steps: int) -> None:
        self.schedule = schedule
        self.starts = {step: number for number, step in enumerate(schedule.first_steps(steps), 1)}
        self.linears = [one for name, one in model.holders() if isinstance(one, Linear) and name.startswith("layers.")]
        self.zeros: list[torch.Tensor] = []

    @property
    def matrices(self) -> list[np.ndarray]:
        """Views of all pruned matrices; a fused parameter has several."""
        return [part.numpy() for linear in self.linears for part in linear.weight.data.split(linear.sizes)]

    def before_step(self, step: int) -> None:
        """Prune if a round begins with this step."""
        if (finished := self.starts.get(step)) is not None:
            self.schedule.prune(self.matrices, finished)

    def before_update(self) -> None:
        """Remember the zeros, and drop their gradients."""
        self.zeros = [linear.weight.data == 0 for linear in self.linears]
        for linear, zero in zip(self.linears, self.zeros, strict=True):
            if linear.weight.grad is not None:
                linear.weight.grad[zero] = 0.0

    def after_update(self) -> None:
        """Set the zeros again: the moments of the optimizer may have moved them."""
        for linear, zero in zip(self.linears, self.zeros, strict=True):
            linear.weight.data[zero] = 0.0

    @contextmanager
    def pruned_at_once(self) -> Iterator[None]:
        """Prune to the final sparsity within the `with` block, and restore the weights after it."""
        kept = [matrix.copy() for matrix in self.matrices]
        self.schedule.prune(self.matrices, self.schedule.rounds)
        try:
            yield
        finally:
            for matrix, values in zip(self.matrices, kept, strict=True):
                matrix[...] = values
