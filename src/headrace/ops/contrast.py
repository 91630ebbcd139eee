"""Combines a model's logits with an amateur's, in torch: contrastive decoding and speculative cascades."""

import math

import torch


def combine(
    rule: str, own: torch.Tensor, amateur: torch.Tensor, a: float, b: float, permitted: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of logits [r, V] by the rule of a request: `contrast` with alpha a and beta b, or a cascade rule with threshold
    a."""
    return contrast(own, amateur, a, b, permitted) if rule == "contrast" else cascade(rule, own, amateur, a)


def cascade(rule: str, own: torch.Tensor, amateur: torch.Tensor, at: float) -> torch.Tensor:
    """Of each row the amateur's [r, W] if it is good enough, else the model's own [r, V].

    With the probabilities p of the own row and q of the amateur's over the shared ids: "chow" takes the amateur's if max q >= 1
    - at, "opt" if max q >= max p - at * TV(p, q). Decided before penalties and filters.

    Source: Narasimhan et al., "Faster Cascades via Speculative Decoding", arXiv 2405.19261.
    """
    width = min(own.shape[-1], amateur.shape[-1])
    theirs = torch.full_like(own, -math.inf)
    theirs[:, :width] = amateur[:, :width].to(own.dtype)
    p, q = own.double().softmax(-1), theirs.double().softmax(-1)
    bar = 1 - at if rule == "chow" else p.amax(-1) - at * (p - q).abs().sum(-1) / 2
    return torch.where((q.amax(-1) >= bar)[:, None], theirs, own)


def contrast(
    expert: torch.Tensor, amateur: torch.Tensor, alpha: float, beta: float, permitted: torch.Tensor | None = None
) -> torch.Tensor:
    """Contrastive decoding in its logit form: expert [r, V] and amateur [r, W] logits.

    A token is plausible if s_e >= max s_e + ln(alpha). Its result is (1 + beta) * s_e - beta * s_a, that of others -inf. This
    equals p_e * (p_e / p_a) ** beta up to a constant. Padding that the amateur lacks (W < V) is -inf. permitted [r, V]: the
    expert's logits, -inf for barred tokens (grammar, list, ban); the maximum is taken from these, so that at least one
    permitted token stays.

    Source: O'Brien and Lewis, arXiv 2309.09117; Li et al., "Contrastive Decoding", arXiv 2210.15097.
    """
    width = min(expert.shape[-1], amateur.shape[-1])
    out = torch.full_like(expert, -math.inf)
    mine, other = expert[:, :width], amateur[:, :width].to(expert.dtype)
    least = (expert if permitted is None else permitted)[:, :width].amax(-1, keepdim=True) + (
        math.log(alpha) if alpha > 0 else -math.inf
    )
    out[:, :width] = torch.where(mine < least, -math.inf, (1 + beta) * mine - beta * other)
    return out
