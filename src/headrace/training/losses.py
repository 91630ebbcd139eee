"""Losses of distillation, and one training step of a student by them."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import cosine_similarity, cross_entropy, log_softmax

from headrace.compress.judge import Judgement, compare_logits
from headrace.data.config import ModelConfig
from headrace.runner.record import record
from headrace.training.examples import Example, Item
from headrace.training.sequence_forward import SequenceOutput, run_sequence
from headrace.training.students import Student
from headrace.training.teacher_forward import TorchForward

# The loss that needs attention maps of both models.
MAPS = "attention"
LOSSES = {
    "kl": "the teacher's probabilities, both softened by a temperature",
    "ce": "the tokens that came",
    "features": "hidden rows after each layer, through a learned matrix",
    "cosine": "the direction of the rows that the head reads",
    MAPS: "which tokens are looked at",
    "exits": "the teacher's probabilities, after some of the layers already",
    "sequence": "the tokens that the teacher answers",
    "steps": "answers, and the reasons for them",
}
# Losses of tokens: cross-entropy to one right token.
HARD = {"ce", "sequence", "steps"}


def check_maps(teacher: ModelConfig, student: ModelConfig) -> None:
    """Raise ValueError if the attention maps of both models cannot be compared."""
    if {layer.heads for layer in teacher.layers} != {layer.heads for layer in student.layers}:
        raise ValueError("attention maps are compared head by head, and the student has other heads; leave them out")
    if student.shares_kv:
        raise ValueError("layers that share K and V have no own keys to compare; leave the loss attention out")


class DistillationLoss:
    """Sum of the chosen losses of a student against its teacher.

    tensors: by name, the student's parameters and, for "features" and "cosine", learned matrices between both hidden sizes.
    share: λ of "kl" next to a loss of tokens, λ T² KL + (1 − λ) CE. exits: layers of the student for the loss "exits".
    Raises ValueError if the attention maps cannot be compared.
    """

    def __init__(
        self,
        teacher: TorchForward,
        student: Student,
        names: Sequence[str],
        temperature: float,
        share: float,
        exits: Sequence[int] = (),
    ) -> None:
        self.teacher, self.student, self.names = teacher, student, set(names)
        self.temperature, self.share, self.exits = temperature, share, tuple(exits)
        self.vocabulary = min(teacher.config.vocab_size, student.model.config.vocab_size)
        self.tensors = dict(student.model.named_parameters())
        wide, narrow = teacher.config.hidden_size, student.model.config.hidden_size
        self.projections: list[torch.Tensor] = []
        if "features" in self.names or ("cosine" in self.names and wide != narrow):
            dtype = next(student.model.parameters()).dtype
            self.projections = [torch.eye(wide, narrow, dtype=dtype) for _ in student.pairs]
            self.tensors |= {f"between.{number}.weight": matrix for number, matrix in enumerate(self.projections)}
        self.recording = None
        if MAPS in self.names:
            check_maps(teacher.config, student.model.config)
            self.recording = record(student.model, embeds=False)

    def backward(self, items: Sequence[Item]) -> float:
        """Add the gradients of the mean loss of `items`, and return it. Holds one text in memory at a time."""
        total = 0.0
        for item in items:
            for example in item:
                loss = self.loss(example) * (example.weight / len(items))
                loss.backward()
                total += loss.item()
        return total

    def loss(self, example: Example) -> torch.Tensor:
        """Loss of one text, a mean over its learned tokens."""
        teacher, student = self._run_both(example.tokens)
        rows = slice(example.first - 1, len(example.tokens) - 1)
        parts = []
        if self.names & (HARD | {"kl"}):
            parts.append(self._logits_loss(teacher.rows[rows], student.rows[rows], example))
        if "features" in self.names:
            pairs = zip(student.after, teacher.after, self.projections, strict=True)
            distances = [feature_distance(own[rows] @ matrix.T, target[rows]) for own, target, matrix in pairs]
            parts.append(torch.stack(distances).mean())
        if "cosine" in self.names:
            final = self.student.model.final(student.rows[rows])
            if final.shape[-1] != teacher.rows.shape[-1]:
                final = final @ self.projections[-1].T
            parts.append(cosine_distance(final, self.teacher.final(teacher.rows[rows])))
        if "exits" in self.names:
            early = [student.after[exit - 1][rows] for exit in self.exits]
            parts.append(self._exits_loss(teacher.rows[rows], [*early, student.rows[rows]]))
        if MAPS in self.names:
            maps = [(student.maps[number], teacher.maps[layer]) for number, layer in enumerate(self.student.pairs)]
            parts.append(torch.stack([attention_divergence(own[:, rows], target[:, rows]) for own, target in maps]).mean())
        return torch.stack(parts).sum()

    def _logits_loss(self, teacher: torch.Tensor, student: torch.Tensor, example: Example) -> torch.Tensor:
        """KL, cross-entropy or both, of hidden rows [tokens, hidden] after the last layer of each model."""
        logits = self.student.model.head(student)
        targets = torch.tensor(example.tokens[example.first :])
        hard = token_loss(logits, targets) if self.names & HARD else None
        if "kl" not in self.names and hard is not None:
            return hard
        target_logits = self.teacher.head(teacher)[:, : self.vocabulary]
        soft = softened_kl(logits[:, : self.vocabulary], target_logits, self.temperature)
        return soft if hard is None else self.share * soft + (1 - self.share) * hard

    def _exits_loss(self, teacher: torch.Tensor, students: Sequence[torch.Tensor]) -> torch.Tensor:
        """Weighted mean KL over exits and the full student; the i-th has weight i.

        Sources: PABEE, Zhou et al., arXiv 2006.04152; LayerSkip, Elhoushi et al., arXiv 2404.16710.
        """
        target_logits = self.teacher.head(teacher)[:, : self.vocabulary]
        logits = [self.student.model.head(rows)[:, : self.vocabulary] for rows in students]
        total = sum(number * softened_kl(own, target_logits, self.temperature) for number, own in enumerate(logits, 1))
        return torch.as_tensor(total) / (len(students) * (len(students) + 1) / 2)

    def _run_both(self, tokens: Sequence[int]) -> tuple[SequenceOutput, SequenceOutput]:
        """Run a text through the teacher, without gradients, and through the student."""
        pairs = self.student.pairs if "features" in self.names else []
        after = range(self.student.model.config.num_layers) if self.names & {"features", "exits"} else ()
        return self.teacher.run(tokens, pairs), run_sequence(self.student.model, tokens, after, self.recording)

    def judge(self, items: Sequence[Item]) -> Judgement:
        """Compare both models on texts: on the answers of prompts, otherwise on the second half."""
        texts = [example for item in items for example in item]
        return compare_logits([text.tokens[len(text.given) :] for text in texts], self._logits(texts), "held out")

    @torch.no_grad()
    def _logits(self, texts: Sequence[Example]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the logits [tokens, vocabulary] of teacher and student, text by text."""
        for text in texts:
            rows = slice(len(text.given) - 1, len(text.tokens) - 1)
            student = self.student.model
            targets = self.teacher.head(self.teacher.run(text.tokens).rows[rows])
            own = student.head(run_sequence(student, text.tokens).rows[rows])
            yield targets[:, : self.vocabulary].numpy(), own[:, : self.vocabulary].numpy()


def softened_kl(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """Mean over rows of T² KL(p_T ‖ q_T) in nats, of logits [rows, vocabulary] divided by the temperature T.

    The gradient in a row of the student's logits is T (q_T − p_T): T² makes it as large as that of a cross-entropy.

    Source: Hinton et al., arXiv 1503.02531.
    """
    p, q = log_softmax(teacher / temperature, -1), log_softmax(student / temperature, -1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1).mean()


def token_loss(student: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats of logits [rows, vocabulary] to token ids [rows]."""
    return cross_entropy(student, targets)


def feature_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean squared difference of hidden rows [rows, hidden], relative to the teacher's mean square: 0 if equal, 1 for zeros."""
    return (student - teacher).square().mean() / teacher.square().mean()


def cosine_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """1 − mean cosine of hidden rows [rows, hidden].

    Source: DistilBERT, Sanh et al., arXiv 1910.01108.
    """
    return 1.0 - cosine_similarity(student, teacher, dim=-1).mean()


def attention_divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean KL(teacher ‖ student) in nats of attention maps [heads, rows, keys], given as logarithms (−inf: masked)."""
    difference = teacher - student
    return torch.where(teacher.isinf(), 0.0, teacher.exp() * difference).sum(-1).mean()
