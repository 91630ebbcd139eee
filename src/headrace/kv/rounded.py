"""K/V in fewer bits, in torch: the numbers that the native core's pools store. The reference of its kernels."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch.nn.functional import pad

Rounding = Callable[[torch.Tensor], torch.Tensor]  # of vectors [tokens, heads, head_dim]

LINE = 16  # the core pads heads with zeros to a multiple of this


def unrounded(x: torch.Tensor) -> torch.Tensor:
    return x


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Signed 8-bit integers with one scale per vector, as numbers."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return scale * torch.where(scale > 0, x / scale, 0).round()


def to_int4(x: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Integers 0 to 15 above a minimum, for each of `parts` equal runs of a vector's dimensions, as numbers. Scale and minimum
    are bfloat16."""
    padded = pad(x, (0, -x.shape[-1] % LINE))
    runs = padded.reshape(*x.shape[:-1], parts, -1)
    return _range(runs, -1).flatten(-2)[..., : x.shape[-1]]


def by_channel(x: torch.Tensor, tokens: int = 32) -> torch.Tensor:
    """Integers 0 to 15 per dimension, over `tokens` tokens in a row, as numbers; the last tokens, fewer than that, are not
    rounded. A key depends on later keys here, so no pool stores K this way.

    Source: Liu et al., "KIVI", arXiv 2402.02750.
    """
    whole = len(x) // tokens * tokens
    return torch.cat([_range(x[:whole].reshape(-1, tokens, *x.shape[1:]), 1).flatten(0, 1), x[whole:]])


def _range(x: torch.Tensor, dim: int) -> torch.Tensor:
    least = to_bfloat16(x.amin(dim, keepdim=True))
    scale = to_bfloat16((x.amax(dim, keepdim=True) - least) / 15)
    return least + scale * torch.where(scale > 0, (x - least) / scale, 0).round().clamp(0, 15)


FORMATS: dict[str, tuple[Rounding, Rounding]] = {  # of K and of V
    "int8": (to_int8, to_int8),
    "int4": (partial(to_int4, parts=2), to_int4),
}


class Rounded:
    """Rounding of a KVPool: K/V have the values of a format of FORMATS, without its memory. centre: constants subtracted
    from K, [kv_heads, head_dim] by layer; layers without one keep their K."""

    def __init__(self, format: str, centre: Mapping[int, torch.Tensor] | None = None) -> None:
        self._of_k, self._of_v = FORMATS[format]
        self._centre = centre or {}

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(k.dtype, torch.float32)
        if layer in self._centre:
            k = k - self._centre[layer].to(k.device, wide)
        return self._of_k(k.to(wide)), self._of_v(v.to(wide))
