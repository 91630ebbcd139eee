"""RoBERTa: BERT whose positions begin after two rows for padding."""

from dataclasses import replace

from headrace.data.config import ModelConfig
from headrace.models.families import bert
from headrace.models.family import Family, FileFormat
from headrace.models.reader import Reader
from headrace.weights.origins import PADDED_ROWS, NameMap, laid_out, origins

NAMES = laid_out(origins(bert.NAMES), "padded", "positions.weight")
HF = NameMap(NAMES, "roberta.", bert.HEADS)
BY_BERT = "GGUF files of this family have the architecture bert"


def without_padding(read: Reader, config: ModelConfig) -> ModelConfig:
    """The config with the positions of tokens alone. Raises WeightError for another padding token."""
    if read.get("pad_token_id", 1) != PADDED_ROWS - 1 or config.max_position <= PADDED_ROWS:
        raise read.error(f"must have pad_token_id 1 and more than {PADDED_ROWS} positions: the first ones stand for padding")
    return replace(config, max_position=config.max_position - PADDED_ROWS)


def from_hf(read: Reader) -> ModelConfig:
    return without_padding(read, bert.from_hf(read))


FAMILY = Family(architecture="roberta", shape="bert", hf=FileFormat(from_hf, HF), gguf=BY_BERT)
