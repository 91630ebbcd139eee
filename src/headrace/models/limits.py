"""Bounds on what a file may claim of a model, so that a damaged or hostile one is refused before anything is built."""

from collections.abc import Callable

from headrace.data.config import RopeConfig

MAX_LAYERS = 1024
MAX_SIZE = 1 << 31


def check_rope(rope: RopeConfig, head_dim: int, error: Callable[[str], Exception]) -> RopeConfig:
    """The same settings, once they are known to give finite frequencies for heads of `head_dim`."""
    dim = rope.dim or head_dim
    if dim % 2 or not 0 < dim <= head_dim:
        raise error(f"turns {dim} values of heads of {head_dim}; rotary needs an even number, at most the whole head")
    if rope.scaling == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise error("has a llama3 rotary scaling whose low_freq_factor is not below its high_freq_factor")
    if rope.scaling == "divisors" and (len(rope.divisors) != dim // 2 or not all(d > 0 for d in rope.divisors)):
        raise error(f"has {len(rope.divisors)} rotary divisors and needs {dim // 2}, all above 0")
    return rope
