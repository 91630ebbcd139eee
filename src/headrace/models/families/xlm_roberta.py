"""XLM-R (bge-m3, multilingual e5): RoBERTa with a vocabulary of many languages."""

from headrace.models.families import roberta
from headrace.models.family import Family, FileFormat

FAMILY = Family(architecture="xlm-roberta", shape="bert", hf=FileFormat(roberta.from_hf, roberta.HF), gguf=roberta.BY_BERT)
