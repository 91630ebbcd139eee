"""Memory that a served model takes, planned from its headers before it is loaded."""

from dataclasses import dataclass

from headrace.backends.memory import SHARE, usual_blocks, window_blocks
from headrace.data.config import parse_bytes
from headrace.data.settings import ModelSettings
from headrace.kv.layout import PAGE
from headrace.startup.fit.headers import open_shape
from headrace.startup.fit.sizes import BLOCK, Load, bytes_of
from headrace.startup.opening import is_heads


@dataclass(frozen=True, slots=True)
class ServedBytes:
    """Bytes of one served model. rest: weights, buffers and process, of its companions too. kv: its K/V cache."""

    rest: int
    kv: int

    @property
    def total(self) -> int:
        return self.rest + self.kv


def served_bytes(model: str, settings: ModelSettings, room: int) -> ServedBytes:
    """Plan the bytes of a model in an engine process of its own.

    room: bytes for models. As in the memory plan, a cache without a size of its own takes at most a quarter of the rest.
    Raises ValueError, one line.
    """
    kv_dtype = "bfloat16" if settings.kv_dtype == "auto" else settings.kv_dtype
    rest = kv = 0
    companions = [str(one) for one in settings.companions if not is_heads(one)]
    for number, name in enumerate(dict.fromkeys([model, *companions])):
        shape = open_shape(name, quantize=settings.quantize or "", rope=settings.rope)
        context = min(settings.max_model_len or shape.max_position, shape.max_position)
        chunk = min(settings.max_num_batched_tokens or 512, context)
        one = bytes_of(shape, Load(context, 1, chunk, kv_dtype))
        window = 0 if number or settings.kv_store is not None else shape.window(context)
        blocks = usual_blocks(context, BLOCK, settings.max_num_seqs)
        in_windows = min(blocks, window_blocks(window, BLOCK, settings.max_num_seqs, chunk)) if window else blocks
        for layer in shape.layers:
            count = in_windows if layer.slides(window) else blocks
            kv += shape.sides * layer.kv_bytes(kv_dtype) * count * BLOCK // PAGE
        rest += one.weights + one.buffers + (0 if number else one.process)
    if settings.kv_cache_memory is not None:
        return ServedBytes(rest, parse_bytes(settings.kv_cache_memory))
    return ServedBytes(rest, max(0, min(kv, int((room - rest) * SHARE))))
