"""What an amateur makes of a model's logits, in torch: contrastive decoding, and speculative cascades."""

import math

import torch


def combine(
    rule: str, own: torch.Tensor, amateur: torch.Tensor, a: float, b: float, permitted: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows of logits [r, V] by the rule of a request: `contrast` (alpha, beta), or `cascade` by chow or opt (the bar)."""
    return contrast(own, amateur, a, b, permitted) if rule == "contrast" else cascade(rule, own, amateur, a)


def cascade(rule: str, own: torch.Tensor, amateur: torch.Tensor, at: float) -> torch.Tensor:
    """Of each row the amateur's [r, W] where that is good enough, else the own one [r, V] (speculative cascades, Narasimhan
    et al. 2024). With the probabilities p of the own row and q of the amateur's over the ids that both have: "chow" takes the
    amateur's where max q >= 1 - at, "opt" where max q >= max p - at * TV(p, q). Looked at before penalties and filters.
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
    """Contrastive decoding in its logit form (O'Brien and Lewis 2023; Li et al. 2022): expert [r, V] and amateur [r, W] logits.

    A token is plausible where s_e >= max s_e + ln(alpha); there the result is (1 + beta) * s_e - beta * s_a, elsewhere -inf.
    That is p_e * (p_e / p_a) ** beta up to a constant. Padding that the amateur does not have (W < V) is ruled out. `permitted`
    [r, V]: the expert's logits, -inf where a token may not come (a grammar, a list, a ban); the best is taken from those, so
    that the mask always leaves one of them.
    """
    width = min(expert.shape[-1], amateur.shape[-1])
    out = torch.full_like(expert, -math.inf)
    mine, other = expert[:, :width], amateur[:, :width].to(expert.dtype)
    least = (expert if permitted is None else permitted)[:, :width].amax(-1, keepdim=True) + (
        math.log(alpha) if alpha > 0 else -math.inf
    )
    out[:, :width] = torch.where(mine < least, -math.inf, (1 + beta) * mine - beta * other)
    return out
