"""SmolLM3: llama without rotary positions in every fourth layer."""

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import llama
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, turned_layers, windowed

PERIOD = 4


def from_hf(read: Reader) -> ModelConfig:
    config = hf.decoder(read, tied=True, theta=2000000.0)
    period = read.size("no_rope_layer_interval", PERIOD)
    turns = read.get("no_rope_layers") or [int((i + 1) % period != 0) for i in range(config.num_layers)]
    if not isinstance(turns, list) or len(turns) < config.num_layers:
        raise read.error(f"must have no_rope_layers as a list of 0 and 1 for its {config.num_layers} layers")
    if read.get("use_sliding_window", False):
        config = windowed(config, hf.windows(read, lambda layer: not turns[layer]))
    return turned_layers(config, turns[: config.num_layers])


def from_gguf(read: Reader) -> ModelConfig:
    config = gguf.decoder(read)
    return turned_layers(config, [(i + 1) % PERIOD for i in range(config.num_layers)])


FAMILY = Family(
    architecture="smollm3", shape="llama", hf=FileFormat(from_hf, llama.HF), gguf=FileFormat(from_gguf, llama.GGUF_PAIRED)
)
