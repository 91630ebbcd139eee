"""A tiny llama as a GGUF file: random weights, a real byte-level vocabulary, a chat template. For tests of what people run.

Its answers are nonsense made of readable tokens, the same ones every time, and do not end by themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.unit.vocabularies import CONTROL, UNUSED, byte_level

HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 32, 2, 4, 2, 48


@dataclass(frozen=True)
class Sizes:
    """Heads and MLP columns of each layer. unused: tokens that no text has, at the end of the vocabulary."""

    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HIDDEN // HEADS
    ffn: int = FFN
    unused: int = 0


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


Tensors = dict[str, np.ndarray]


def write_tiny_gguf(
    path: Path,
    *,
    context: int = 256,
    template: str | None = TEMPLATE,
    seed: int = 0,
    control: str | None = None,
    layers: int = LAYERS,
    mask: int | None = None,
    sizes: Sizes = Sizes(),
    edit: Callable[[Tensors], object] = lambda tensors: None,
    metadata: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """The file, with a context of `context` tokens; without a chat template where `template` is None; with a control token
    `control`, the last of the vocabulary; with a mask token `mask`.

    `edit` may change the tensors (float32, by name) before they are written, `metadata` what the writer holds.
    """
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(sizes.ffn)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.head_dim)
    writer.add_value_length(sizes.head_dim)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_vocabulary(writer, template, control, sizes.unused)
    if mask is not None:
        writer.add_mask_token_id(mask)
    tensors = _tensors(seed, layers, sizes)
    edit(tensors)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    metadata(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@cache
def _vocabulary() -> dict[str, Any]:
    """All files of one process share it, so its lists are tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in byte_level().items()}


def _add_vocabulary(writer: gguf.GGUFWriter, template: str | None, control: str | None, unused: int) -> None:
    vocabulary = _vocabulary()
    if unused:
        kinds = [*vocabulary["tokenizer.ggml.token_type"], *[UNUSED] * unused]
        tokens = [*vocabulary["tokenizer.ggml.tokens"], *_unused(unused)]
        vocabulary = {**vocabulary, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(kinds)}
    if control is not None:
        kinds = [*vocabulary["tokenizer.ggml.token_type"][:-1], CONTROL]
        tokens = [*vocabulary["tokenizer.ggml.tokens"][:-1], control]
        vocabulary = {**vocabulary, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(kinds)}
    writer.add_tokenizer_model(vocabulary["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(vocabulary["tokenizer.ggml.pre"])
    writer.add_token_list(vocabulary["tokenizer.ggml.tokens"])
    writer.add_token_types(vocabulary["tokenizer.ggml.token_type"].tolist())
    writer.add_token_merges(vocabulary["tokenizer.ggml.merges"])
    writer.add_eos_token_id(vocabulary["tokenizer.ggml.eos_token_id"])
    if template is not None:
        writer.add_chat_template(template)


def _unused(count: int) -> list[str]:
    return [f"<unused{number}>" for number in range(count)]


def _tensors(seed: int, layers: int, sizes: Sizes) -> Tensors:
    """Random weights. The head gives every token that is not plain text the logit 0, far below the best of the others."""
    rng = np.random.default_rng(seed)
    tokens = [*_vocabulary()["tokenizer.ggml.tokens"], *_unused(sizes.unused)]
    heads, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {
        "attn_q": (heads, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, heads),
        "ffn_gate": (sizes.ffn, HIDDEN),
        "ffn_up": (sizes.ffn, HIDDEN),
        "ffn_down": (HIDDEN, sizes.ffn),
    }
    head = rng.standard_normal((len(tokens), HIDDEN))
    head[[not _readable(token) for token in tokens]] = 0
    made = {"token_embd.weight": rng.standard_normal((len(tokens), HIDDEN)), "output.weight": head}
    for layer in range(layers):
        for name, shape in shapes.items():
            made[f"blk.{layer}.{name}.weight"] = rng.standard_normal(shape) * 0.3
        for name in ("attn_norm", "ffn_norm"):
            made[f"blk.{layer}.{name}.weight"] = 1 + rng.standard_normal(HIDDEN) * 0.1
    made["output_norm.weight"] = np.ones(HIDDEN)
    return {name: values.astype(np.float32) for name, values in made.items()}


def _readable(token: str) -> bool:
    """Letters, with or without the space before them (Ġ)."""
    word = token.removeprefix("Ġ")
    return word.isascii() and word.isalpha()
