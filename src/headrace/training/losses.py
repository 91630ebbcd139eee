"""How far a student is from its teacher, or from a text: losses of distillation, each a mean over rows."""

import torch
from torch.nn.functional import cosine_similarity, cross_entropy, log_softmax


def soft(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    """T² KL(p_T ‖ q_T) in nats of logits [r, vocabulary], both divided by the temperature T (Hinton et al. 2015).

    Its gradient in a row of the student's logits is T (q_T − p_T): with T² it is of the size of the cross-entropy's.
    """
    p, q = log_softmax(teacher / temperature, -1), log_softmax(student / temperature, -1)
    return temperature**2 * (p.exp() * (p - q)).sum(-1).mean()


def hard(student: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Cross-entropy in nats of logits [r, vocabulary] and the tokens [r] that came."""
    return cross_entropy(student, wanted)


def apart(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """Mean square of what hidden rows [r, hidden] differ by, over that of the teacher's: 0 where they are equal, 1 of zeros."""
    return (student - teacher).square().mean() / teacher.square().mean()


def angle(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """1 − cosine of hidden rows [r, hidden] (DistilBERT, Sanh et al. 2019)."""
    return 1.0 - cosine_similarity(student, teacher, dim=-1).mean()


def looks(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student) in nats of attention maps [heads, rows, keys], whose logarithms are given (−inf: not seen)."""
    apart = teacher - student
    return torch.where(teacher.isinf(), 0.0, teacher.exp() * apart).sum(-1).mean()
