"""Contrastive decoding: what an amateur makes of an expert's logits, in torch."""

import math

import torch


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
