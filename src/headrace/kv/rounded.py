"""K and V in fewer bits, in torch: what the native core's pools keep, as numbers. The reference for its kernels."""

from collections.abc import Callable
from functools import partial

import torch
from torch.nn.functional import pad

Rounding = Callable[[torch.Tensor], torch.Tensor]  # of vectors [tokens, heads, head_dim]

LINE = 16  # the core pads heads to so many dimensions, with zeros


def as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


def to_bfloat16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().to(x.dtype)


def to_int8(x: torch.Tensor) -> torch.Tensor:
    """Integers of 8 bits with a scale for each vector."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return scale * torch.where(scale > 0, x / scale, 0).round()


def to_int4(x: torch.Tensor, parts: int = 1) -> torch.Tensor:
    """Integers from 0 to 15 above a minimum, for each of `parts` equal runs of a vector's dimensions; their scale and minimum
    are bfloat16."""
    padded = pad(x, (0, -x.shape[-1] % LINE))
    runs = padded.reshape(*x.shape[:-1], parts, -1)
    return _range(runs, -1).flatten(-2)[..., : x.shape[-1]]


def by_channel(x: torch.Tensor, tokens: int = 32) -> torch.Tensor:
    """The same for each dimension of `tokens` tokens in a row; the last ones, fewer than that, stay as they are (KIVI, Liu et
    al. 2024). What a key becomes depends on those after it, so no pool keeps it so."""
    whole = len(x) // tokens * tokens
    return torch.cat([_range(x[:whole].reshape(-1, tokens, *x.shape[1:]), 1).flatten(0, 1), x[whole:]])


def _range(x: torch.Tensor, dim: int) -> torch.Tensor:
    least = to_bfloat16(x.amin(dim, keepdim=True))
    scale = to_bfloat16((x.amax(dim, keepdim=True) - least) / 15)
    return least + scale * torch.where(scale > 0, (x - least) / scale, 0).round().clamp(0, 15)


FORMATS: dict[str, tuple[Rounding, Rounding]] = {  # of K, and of V
    "int8": (to_int8, to_int8),
    "int4": (partial(to_int4, parts=2), to_int4),
}


class Rounded:
    """The rounding of a KVPool whose K and V are as a format of FORMATS holds them: the same output, without its memory.
    `centre` [layers, KV heads, head_dim]: what K is stored less."""

    def __init__(self, format: str, centre: torch.Tensor | None = None) -> None:
        self._of_k, self._of_v = FORMATS[format]
        self._centre = centre

    def __call__(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(k.dtype, torch.float32)
        if self._centre is not None:
            k = k - self._centre[layer].to(k.device, wide)
        return self._of_k(k.to(wide)), self._of_v(v.to(wide))
