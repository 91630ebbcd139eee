"""Cost of a model for each token: bytes, operations and the throughput limits they set. Units: bytes, seconds."""

from dataclasses import dataclass
from math import inf

from headrace.data.config import ModelConfig
from headrace.kv.layout import PAGE, all_kv_shapes


def kv_token_bytes(config: ModelConfig, kv_dtype: str = "bfloat16") -> float:
    """Bytes of K and V of one token over all layers, in the native core. Raises ValueError for an unknown format."""
    return sum(shape.native_block_bytes(PAGE, kv_dtype) for shape in all_kv_shapes(config)) / PAGE


@dataclass(frozen=True, slots=True)
class Cost:
    """file_bytes: all that is stored. read_bytes, multiplied: bytes and weights that each step reads (of a token table one row,
    unless it is also the head). kv_bytes: K and V of a token.
    """

    weights: int
    file_bytes: int
    multiplied: int
    read_bytes: int
    kv_bytes: float

    @property
    def bits(self) -> float:
        """Bits a weight, with scales."""
        return 8 * self.file_bytes / self.weights

    @property
    def operations(self) -> int:
        """Multiplications and additions for a token: 2 * parameters. Formats of weights alone do not change it."""
        return 2 * self.multiplied

    def step_bytes(self, context: int, batch: int = 1) -> float:
        """Bytes read in a step for `batch` sequences of `context` tokens: weights once, K and V of all."""
        return self.read_bytes + batch * context * self.kv_bytes

    def ceiling(self, bandwidth: float, context: int, batch: int = 1, speed: float = inf) -> float:
        """Most tokens/s of all sequences together with `bandwidth` bytes/s and `speed` operations/s."""
        return batch / max(self.step_bytes(context, batch) / bandwidth, batch * self.operations / speed)

    def critical_batch(self, bandwidth: float, speed: float) -> float:
        """Batch size at which reading the weights takes as long as multiplying (roofline ridge point)."""
        return speed / bandwidth * self.read_bytes / self.operations
