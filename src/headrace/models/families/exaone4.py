"""EXAONE 4: OLMo 2's norms, with q and k normed by head; where layers slide, full ones have no rotary positions."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models import gguf, hf
from headrace.models.families import olmo2
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader, turned_layers, windowed

PERIOD = 4  # every fourth layer is full, where the file does not say
GGUF_32B_LAYERS, GGUF_32B_WINDOW = 64, 4096  # the one size that slides, which old GGUF files do not say


def _hybrid(config: ModelConfig, windows: list[int | None]) -> ModelConfig:
    slides = any(windows)
    return turned_layers(windowed(config, windows), [window or not slides for window in windows])


def from_hf(read: Reader) -> ModelConfig:
    config, pattern = replace(hf.decoder(read), qk_norm=True), read.get("sliding_window_pattern")
    period = pattern if isinstance(pattern, int) else len(pattern or "") or PERIOD
    last = config.num_layers - 1
    return _hybrid(config, hf.windows(read, lambda layer: (layer + 1) % period != 0 and layer != last))


def from_gguf(read: Reader) -> ModelConfig:
    config = replace(gguf.decoder(read), qk_norm=True)
    if config.num_layers == GGUF_32B_LAYERS and config.layers[0].window is None:
        config = windowed(config, [GGUF_32B_WINDOW] * config.num_layers)
    return _hybrid(config, gguf.windows(read, config, PERIOD))


FAMILY = Family(architecture="exaone4", shape="olmo2", hf=FileFormat(from_hf, olmo2.HF), gguf=FileFormat(from_gguf, olmo2.GGUF))
