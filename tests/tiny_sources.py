"""Tiny encoder-decoders: by `transformers` (the oracle), with random weights; Marian folders with SentencePiece files."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from headrace.backends.eager.program import EagerProgram
from headrace.data.sources import Tokens
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.ops.context import FeedRows, build
from headrace.weights.loader import load_model
from tests.models.zoo import MemorySource

VOCAB = 97
EOS, PAD = 0, VOCAB - 1
BLOCK = 4


def _marian(**changes: Any) -> Any:
    sizes = {
        f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in (("attention_heads", 4), ("ffn_dim", 48))
    }
    tokens: dict[str, Any] = {
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "decoder_start_token_id": PAD,
        "forced_eos_token_id": None,
    }
    given = {"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 96}
    more = {"activation_function": "swish", "scale_embedding": True, "share_encoder_decoder_embeddings": True}
    return transformers.MarianMTModel(transformers.MarianConfig(**{**sizes, **tokens, **given, **more, **changes}))


def _t5(**changes: Any) -> Any:
    given = {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 12,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
    }
    near = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "eos_token_id": 1, "pad_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**given, **near, **changes}))


def oracle(kind: str, **changes: Any) -> Any:
    """marian, marian-gelu, t5 (1.0: a tied, scaled head) or t5-gated (1.1), in float64 with values that float32 has."""
    if kind.startswith("marian"):
        gelu = {"activation_function": "gelu", "scale_embedding": False} if kind == "marian-gelu" else {}
        model = _marian(**gelu, **changes)
    else:
        gated = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
        model = _t5(**(gated if kind == "t5-gated" else {}), **changes)
    if kind == "t5-gated":
        model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, 32))
    rng = torch.Generator().manual_seed(1)
    wide, table = (2.0, 0.3) if kind.startswith("marian") else (1.0, 1.0)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if "embed_positions" in name:
                continue
            drawn = torch.randn(value.shape, generator=rng)
            if value.dim() == 1:
                drawn = drawn * 0.3 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
            elif "final_logits" not in name:
                drawn = drawn * (table if "shared" in name else 0.5 if "bias" in name else wide * value.shape[1] ** -0.5)
            value.copy_(drawn)
        if kind.startswith("marian"):  # which may not be written takes nothing from the others
            model.final_logits_bias[0, PAD] = -40.0
    return model.double().eval()


def source_of(model: Any) -> MemorySource:
    """As a folder holds it: every tensor once, but for the copies of the shared table that files carry."""
    tied = model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    tensors = {name: value.detach() for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    return MemorySource("safetensors", tensors, model.config.to_dict())


def loaded(model: Any) -> Model:
    return load_model(source_of(model), torch.float64)


@torch.inference_mode()
def logits(model: Model, source: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """Logits [n, vocabulary] of an output's tokens, from a source whose blocks are in disorder."""
    pool = KVPool(model.config, 32, BLOCK, torch.float64)
    blocks = torch.randperm(32, generator=torch.Generator().manual_seed(2)).tolist()
    own, read = blocks[:8], blocks[8 : 8 + -(-len(source) // BLOCK)]
    EagerProgram(model, pool).encode([(Tokens(tuple(source)), read)])
    rows: torch.Tensor = model(build(pool, [FeedRows(ids, own, source=len(source), source_table=read)]))
    return rows


# -- folders -----------------------------------------------------------------------------------------------------------
WORDS = "a dog runs on the grass . un chien court sur l' herbe le la".split()


def varint(number: int) -> bytes:
    made = b""
    while number > 127:
        made, number = made + bytes([number & 127 | 128]), number >> 7
    return made + bytes([number])


def field(number: int, value: bytes | float | int) -> bytes:
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def spm_bytes(pieces: Sequence[tuple[str, float, int]], *, model_type: int = 1, **normalizer: Any) -> bytes:
    """A SentencePiece file of pieces (text, score, type). `normalizer`: charsmap, dummy_prefix, extra_spaces."""
    numbers = {"charsmap": 2, "dummy_prefix": 3, "extra_spaces": 4}
    made = b"".join(
        field(1, field(1, text.encode()) + field(2, float(score)) + (field(3, kind) if kind != 1 else b""))
        for text, score, kind in pieces
    )
    made += field(2, field(3, model_type))
    return made + field(3, b"".join(field(numbers[name], value) for name, value in normalizer.items()))


def pieces() -> list[tuple[str, float, int]]:
    letters = sorted(set("".join(WORDS)))
    made = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    made += [(f"▁{word}", -2.0 - at / 100, 1) for at, word in enumerate(WORDS)]
    return made + [("▁", -5.0, 1)] + [(letter, -6.0 - at / 100, 1) for at, letter in enumerate(letters)]


def write_tiny_marian(folder: Path, **changes: Any) -> Path:
    """A folder as opus-mt models are published, with safetensors. Its translations are nonsense of readable words. `changes`:
    of its numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    known = [text for text, _, kind in pieces() if kind == 1]
    names = ["</s>", "<unk>", *known, ">>fra<<"]
    names += [f"▁filler{n}" for n in range(VOCAB - 1 - len(names))] + ["<pad>"]
    (folder / "vocab.json").write_text(json.dumps({text: number for number, text in enumerate(names)}, ensure_ascii=False))
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(spm_bytes(pieces()))
    theirs = oracle("marian", **changes).float()
    (folder / "config.json").write_text(json.dumps(theirs.config.to_dict(), default=str))
    tensors = {name: value.contiguous().clone() for name, value in source_of(theirs).tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
