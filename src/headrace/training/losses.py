"""A teacher and a student side by side: what the student's outputs on a text cost by each loss."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import cosine_similarity, cross_entropy, log_softmax

from headrace.compress.judge import Judgement, compare_logits
from headrace.data.config import ModelConfig
from headrace.runner.record import record
from headrace.training.examples import Example, Item
from headrace.training.sequence_forward import Passed, fed
from headrace.training.students import Student
from headrace.training.teacher_forward import Forward

MAPS = "attention"  # the loss that needs them
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
HARD = {"ce", "sequence", "steps"}  # of tokens


def check_maps(teacher: ModelConfig, student: ModelConfig) -> None:
    """Raise ValueError where maps of attention cannot be compared."""
    if {layer.heads for layer in teacher.layers} != {layer.heads for layer in student.layers}:
        raise ValueError("attention maps are compared head by head, and the student has other heads; leave them out")
    if student.kv_share > 1:
        raise ValueError("layers that share K and V have no maps of their own keys; leave the loss attention out")


class Lesson:
    """`tensors` by name are what is learned: the student's, and matrices between rows of both. `share`: λ of kl beside a loss
    of tokens: λ T² KL + (1 − λ) CE. `exits`: after so many of the student's layers its norm and head say what the teacher does.

    Raises ValueError where the maps of attention cannot be compared.
    """

    def __init__(
        self,
        teacher: Forward,
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
        self.between: list[torch.Tensor] = []
        if "features" in self.names or ("cosine" in self.names and wide != narrow):
            dtype = next(student.model.parameters()).dtype
            self.between = [torch.eye(wide, narrow, dtype=dtype) for _ in student.pairs]
            self.tensors |= {f"between.{number}.weight": matrix for number, matrix in enumerate(self.between)}
        self.recording = None
        if MAPS in self.names:
            check_maps(teacher.config, student.model.config)
            self.recording = record(student.model, embeds=False)

    def learn(self, items: Sequence[Item]) -> float:
        """The mean loss of items, whose gradients are added to the tensors'. One text is in memory at a time."""
        total = 0.0
        for item in items:
            for example in item:
                loss = self.loss(example) * (example.weight / len(items))
                loss.backward()
                total += loss.item()
        return total

    def loss(self, example: Example) -> torch.Tensor:
        """Of one text: a mean over the tokens that are learned."""
        theirs, ours = self._both(example.tokens)
        rows = slice(example.first - 1, len(example.tokens) - 1)
        parts = []
        if self.names & (HARD | {"kl"}):
            parts.append(self._of_logits(theirs.rows[rows], ours.rows[rows], example))
        if "features" in self.names:
            pairs = zip(ours.after, theirs.after, self.between, strict=True)
            found = [feature_distance(mine[rows] @ matrix.T, its[rows]) for mine, its, matrix in pairs]
            parts.append(torch.stack(found).mean())
        if "cosine" in self.names:
            final = self.student.model.final(ours.rows[rows])
            if final.shape[-1] != theirs.rows.shape[-1]:
                final = final @ self.between[-1].T
            parts.append(cosine_distance(final, self.teacher.final(theirs.rows[rows])))
        if "exits" in self.names:
            early = [ours.after[exit - 1][rows] for exit in self.exits]
            parts.append(self._of_exits(theirs.rows[rows], [*early, ours.rows[rows]]))
        if MAPS in self.names:
            maps = [(ours.maps[at], theirs.maps[layer]) for at, layer in enumerate(self.student.pairs)]
            parts.append(torch.stack([attention_divergence(mine[:, rows], its[:, rows]) for mine, its in maps]).mean())
        return torch.stack(parts).sum()

    def _of_logits(self, theirs: torch.Tensor, ours: torch.Tensor, example: Example) -> torch.Tensor:
        logits = self.student.model.head(ours)
        wanted = torch.tensor(example.tokens[example.first :])
        hard = token_loss(logits, wanted) if self.names & HARD else None
        if "kl" not in self.names and hard is not None:
            return hard
        truth = self.teacher.head(theirs)[:, : self.vocabulary]
        soft = softened_kl(logits[:, : self.vocabulary], truth, self.temperature)
        return soft if hard is None else self.share * soft + (1 - self.share) * hard

    def _of_exits(self, theirs: torch.Tensor, each: Sequence[torch.Tensor]) -> torch.Tensor:
        """A mean over exits and the whole student, of which the i-th counts i times (PABEE, Zhou et al. 2020; the layers of a
        model that drafts for itself are taught so too: LayerSkip, Elhoushi et al. 2024)."""
        truth = self.teacher.head(theirs)[:, : self.vocabulary]
        logits = [self.student.model.head(rows)[:, : self.vocabulary] for rows in each]
        total = sum(number * softened_kl(one, truth, self.temperature) for number, one in enumerate(logits, 1))
        return torch.as_tensor(total) / (len(each) * (len(each) + 1) / 2)

    def _both(self, tokens: Sequence[int]) -> tuple[Passed, Passed]:
        """A text through both; the teacher without gradients."""
        pairs = self.student.pairs if "features" in self.names else []
        after = range(self.student.model.config.num_layers) if self.names & {"features", "exits"} else ()
        return self.teacher.passed(tokens, pairs), fed(self.student.model, tokens, after, self.recording)

    def judge(self, items: Sequence[Item]) -> Judgement:
        """Both models on texts: of prompts what is answered, else the second half."""
        texts = [one for item in items for one in item]
        return compare_logits([one.tokens[len(one.given) :] for one in texts], self._logits(texts), "held out")

    @torch.no_grad()
    def _logits(self, texts: Sequence[Example]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for one in texts:
            rows = slice(len(one.given) - 1, len(one.tokens) - 1)
            student = self.student.model
            theirs = self.teacher.head(self.teacher.passed(one.tokens).rows[rows])
            ours = student.head(fed(student, one.tokens).rows[rows])
            yield theirs[:, : self.vocabulary].numpy(), ours[:, : self.vocabulary].numpy()


def softened_kl(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """T² KL(p_T ‖ q_T) in nats of logits [r, vocabulary], both divided by the temperature T (Hinton et al. 2015).

    Its gradient in a row of the student's logits is T (q_T − p_T): with T² it is of the size of the cross-entropy's.
    """
    p, q = log_softmax(teacher / temperature, -1), log_softmax(student / temperature, -1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1).mean()


def token_loss(student: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of logits [r, vocabulary] and the tokens [r] that came."""
    return cross_entropy(student, wanted)


def feature_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean square of what hidden rows [r, hidden] differ by, over that of the teacher's: 0 where they are equal, 1 of zeros."""
    return (student - teacher).square().mean() / teacher.square().mean()


def cosine_distance(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """1 − cosine of hidden rows [r, hidden] (DistilBERT, Sanh et al. 2019)."""
    return 1.0 - cosine_similarity(student, teacher, dim=-1).mean()


def attention_divergence(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) in nats of attention maps [heads, rows, keys], whose logarithms are given (−inf: not seen)."""
    apart = teacher - student
    return torch.where(teacher.isinf(), 0.0, teacher.exp() * apart).sum(-1).mean()
