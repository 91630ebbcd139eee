"""The supported architectures, one file each: config keys, tensor names, and the model class."""

from headrace.models.families import bert, gemma3, gpt2, llama, marian, mistral, qwen2, qwen3, t5
from headrace.models.family import Family

FAMILIES: dict[str, Family] = {
    each.FAMILY.architecture: each.FAMILY for each in (bert, gemma3, gpt2, llama, marian, mistral, qwen2, qwen3, t5)
}
