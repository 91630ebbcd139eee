"""EmbeddingGemma in GGUF files. Its folders are of Gemma 3 with `use_bidirectional_attention`."""

from headrace.data.config import ModelConfig
from headrace.models.families import gemma3
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader


def from_gguf(read: Reader) -> ModelConfig:
    return gemma3.both_ways(gemma3.from_gguf(read))


FAMILY = Family(
    architecture="gemma-embedding",
    shape="gemma3",
    hf=FileFormat(gemma3.from_hf, gemma3.HF),
    gguf=FileFormat(from_gguf, gemma3.GGUF),
)
