"""Tiny rerankers as Hugging Face folders, with random weights: cross-encoders, and a decoder that answers yes or no."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import models, pre_tokenizers, processors

from tests.models.gguf_writer import write_gguf
from tests.models.zoo import FLOAT32, SMALL, draw_weights, in_float64
from tests.tiny_bert import WORDS, write_tiny_bert

HEADS = {"num_attention_heads": 4, "num_labels": 1}
SIZES = {**SMALL, "vocab_size": len(WORDS.split()), **HEADS}
# As XLM-R's: <s> a </s></s> b </s>.
IDS = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3}
PAIRS = processors.TemplateProcessing(
    single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
)
CONFIGS = {
    "bert": lambda: transformers.BertConfig(**SIZES),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**SIZES, pad_token_id=1, type_vocab_size=1),
    "mpnet": lambda: transformers.MPNetConfig(**SIZES, pad_token_id=1),
    "modernbert": lambda: transformers.ModernBertConfig(**SIZES, **IDS, local_attention=8),
    "modernbert-mean": lambda: transformers.ModernBertConfig(**SIZES, **IDS, local_attention=8, classifier_pooling="mean"),
}


def write_cross_encoder(folder: Path, name: str, **config: Any) -> Any:
    """Write a cross-encoder, with more keys in its config.json. Returns the model of `transformers` in float64."""
    write_tiny_bert(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if name != "bert":
        backend.post_processor = PAIRS
    (folder / "model.safetensors").unlink()
    with in_float64():
        model = transformers.AutoModelForSequenceClassification.from_config(CONFIGS[name]())
    draw_weights(model)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if "embedding" in key:
                value.mul_(2.0)  # so that types and positions matter
    _save(model, folder)
    backend.save(str(folder / "tokenizer.json"))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return model.eval()


# A Unigram vocabulary of as many pieces as WORDS, with XLM-R's control tokens in front.
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁the", "▁mill", "▁river", "▁wheel", "water", "▁turn", "s", "ed", ","]
PIECES += [*"abcdefghijklmnopqrtuvwxyz"]
PIECES += [f"{start}{letter}" for start in ("▁", "▁▁") for letter in "abcdefghijklmnopqrstuvwxyz"]
PIECES = PIECES[: len(WORDS.split())]
SCORES = [0.0] * 4 + [-1.0 - 0.1 * number for number in range(len(PIECES) - 4)]


def unigram() -> tokenizers.Tokenizer:
    """The tokenizer of those pieces, as XLM-R's: the oracle of the GGUF form."""
    backend = tokenizers.Tokenizer(models.Unigram(list(zip(PIECES, SCORES, strict=True)), PIECES.index("<unk>")))
    backend.normalizer = tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_special_tokens(PIECES[:3])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return backend


def write_gguf_cross_encoder(theirs: Any, path: Path, labels: int = 1, pooling: int | None = None) -> Path:
    """Write a cross-encoder as llama.cpp's converter does, with the Unigram vocabulary. pooling: of ModernBERT's head."""

    def vocabulary(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("t5")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(PIECES)
        writer.add_token_scores(SCORES)
        writer.add_token_types([3, 3, 3, 2] + [1] * (len(PIECES) - 4))
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
        for key, number in (("bos", 0), ("eos", 2), ("unk", 3), ("sep", 2), ("pad", 1)):
            getattr(writer, f"add_{key}_token_id")(number)
        writer.add_token_type_count(1)
        writer.add_classifier_output_labels([f"LABEL_{number}" for number in range(labels)])
        if pooling is not None:
            writer.add_uint32("modern-bert.classifier.pooling_type", pooling)

    return write_gguf(theirs, path, more=vocabulary)


def write_gguf_answering(theirs: Any, folder: Path, path: Path) -> Path:
    """Write the model of `write_answering` as llama.cpp's converter does: two rows of the output matrix as the head."""
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = theirs.config.vocab_size
    tokens = [backend.id_to_token(number) or f"[PAD{number}]" for number in range(size)]

    def head(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("qwen2")
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token.startswith("<|") else 4 if token in ("yes", "no") else 1 for token in tokens])
        writer.add_token_merges(["t h"])
        writer.add_eos_token_id(backend.token_to_id("<|im_end|>"))
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"])
        rows = theirs.get_input_embeddings().weight[[backend.token_to_id(word) for word in ("yes", "no")]]
        writer.add_tensor("cls.output.weight", np.ascontiguousarray(rows.detach().float().numpy()))

    return write_gguf(theirs, path, more=head)


def write_answering(folder: Path, kind: str = "Qwen3ForCausalLM", **config: Any) -> Any:
    """Write a Qwen3 with the vocabulary of bytes, yes and no; no file but the folder's name says that it is a reranker."""
    folder.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {text: number for number, text in enumerate([*alphabet, "th"])}
    backend = tokenizers.Tokenizer(models.BPE(pieces, [("t", "h")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(["yes", "no"])
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    sizes = {**SMALL, "vocab_size": backend.get_vocab_size() + 4, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    with in_float64():
        model = getattr(transformers, kind)(transformers.Qwen3Config(**{**sizes, **heads, **config}))
    draw_weights(model)
    _save(model, folder)
    return model.eval()


def _save(model: Any, folder: Path) -> None:
    """Write config.json and the weights as float32, which they are exactly."""
    model.config.dtype, model.config.architectures = None, [type(model).__name__]
    model.config.save_pretrained(folder)
    tied = getattr(model, "_tied_weights_keys", None) or ()
    tensors = {name: value.to(FLOAT32) for name, value in model.state_dict().items() if name not in tied}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
