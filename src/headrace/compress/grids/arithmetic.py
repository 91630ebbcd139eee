"""What a model costs a token: bytes, operations, and the ceilings they set. Pure numbers, in bytes and seconds."""

from dataclasses import dataclass
from math import ceil, inf, log2

from headrace.data.config import ModelConfig
from headrace.kv.layout import kv_shape

# Of a number, and of the scales of a vector; int4 has two pairs for K and one for V.
KV_BITS = {"float32": (32, 0), "bfloat16": (16, 0), "int8": (8, 32), "int4": (4, 48)}


def kv_token_bytes(config: ModelConfig, kv_dtype: str = "bfloat16") -> float:
    """Bytes of K and V of one token over all layers. Raises ValueError on an unknown format."""
    if kv_dtype not in KV_BITS:
        raise ValueError(f"unknown number format {kv_dtype!r} of K and V; choose {', '.join(KV_BITS)}")
    shape = kv_shape(config)
    number, scale = KV_BITS[kv_dtype]
    return shape.block_bytes(1, 1) * (number + scale / shape.head_dim) / 8


def sparse_bytes(bits: float, kept: int = 2, of: int = 4) -> float:
    """What numbers of so many bits take where `kept` of each `of` are stored, with the places of these, of what all would."""
    return kept * (bits + ceil(log2(of))) / (of * bits)


@dataclass(frozen=True, slots=True)
class Cost:
    """`file_bytes`: all that is stored. `read_bytes` and `multiplied`: bytes and weights that each step passes through (of a
    table of tokens only a row is read, unless it is the head, too). `kv_bytes`: of K and V of a token."""

    weights: int
    file_bytes: int
    multiplied: int
    read_bytes: int
    kv_bytes: float

    @property
    def bits(self) -> float:
        """Bits a weight, scales included."""
        return 8 * self.file_bytes / self.weights

    @property
    def operations(self) -> int:
        """Multiplications and additions of a token, 2 · P; formats of weights alone leave them as they are."""
        return 2 * self.multiplied

    def step_bytes(self, context: int, batch: int = 1) -> float:
        """Bytes read in a step for `batch` sequences of `context` tokens each: weights once, K and V of all."""
        return self.read_bytes + batch * context * self.kv_bytes

    def ceiling(self, bandwidth: float, context: int, batch: int = 1, speed: float = inf) -> float:
        """Tokens/s that `bandwidth` (bytes/s) and `speed` (operations/s) allow for all sequences together."""
        return batch / max(self.step_bytes(context, batch) / bandwidth, batch * self.operations / speed)

    def critical_batch(self, bandwidth: float, speed: float) -> float:
        """The batch from which reading the weights takes no longer than multiplying: their bytes stop mattering there."""
        return speed / bandwidth * self.read_bytes / self.operations
