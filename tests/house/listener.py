"""A source of frames of its own: an encoder with another activation of its convolutions, and with the MLP before attention."""

from dataclasses import replace
from typing import Any

from headrace.data.config import ModelConfig
from headrace.models.base import Value
from headrace.models.families import whisper
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.models.whisper import Whisper, WhisperEncoder
from headrace.ops.vocabulary import act, linear


class ListenerEncoder(WhisperEncoder):
    def convolve(self, i: int, x: Value, ctx: Any) -> Value:
        return act(linear(x, (self.conv1, self.conv2)[i], ctx), "silu")

    def layer(self, i: int, x: Value, ctx: Any) -> Value:
        return self.layers[i].attend(i, self.layers[i].mlp(x, ctx), ctx, causal=False)


class Listener(Whisper):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        assert config.source is not None
        self.encoder = ListenerEncoder(config.source)


def from_hf(read: Reader) -> ModelConfig:
    config = whisper.from_hf(read)
    assert config.source is not None
    return replace(config, architecture="listener", source=replace(config.source, architecture="listener"))


FORMAT = FileFormat(from_hf, whisper.FAMILY.hf.names)
FAMILY = Family("listener", shape="listener", hf=FORMAT, gguf="listeners are read from safetensors")
