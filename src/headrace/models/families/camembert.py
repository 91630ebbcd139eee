"""CamemBERT: RoBERTa for French."""

from headrace.models.families import roberta
from headrace.models.family import Family, FileFormat

FAMILY = Family(architecture="camembert", shape="bert", hf=FileFormat(roberta.from_hf, roberta.HF), gguf=roberta.BY_BERT)
