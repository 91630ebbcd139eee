"""A tiny BERT as a Hugging Face folder: random weights, a wordpiece vocabulary. For tests of embeddings."""

import json
from pathlib import Path

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

HIDDEN, LAYERS, HEADS, FFN, CONTEXT = 32, 3, 4, 64, 64
WORDS = "[PAD] [UNK] [CLS] [SEP] the mill stands by a river wheel water turn ##s ##ing ##ed , . " + " ".join(
    f"{a} ##{a}" for a in "abcdefghijklmnopqrstuvwxyz"
)


def write_tiny_bert(folder: Path) -> Path:
    """config.json, model.safetensors (with the prefix and the pooler that such files carry), tokenizer.json."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {word: number for number, word in enumerate(WORDS.split())}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "vocab_size": len(vocabulary), "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": FFN, "hidden_act": "gelu",
        "max_position_embeddings": CONTEXT, "type_vocab_size": 2, "layer_norm_eps": 1e-12,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_tensors(len(vocabulary)), folder / "model.safetensors", {"format": "pt"})
    return folder


def _tensors(vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (vocab_size, HIDDEN),
        "embeddings.position_embeddings.weight": (CONTEXT, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
        "pooler.dense.weight": (HIDDEN, HIDDEN),
        "pooler.dense.bias": (HIDDEN,),
    }
    linears = {"attention.self.query": (HIDDEN, HIDDEN), "attention.self.key": (HIDDEN, HIDDEN)}
    linears |= {"attention.self.value": (HIDDEN, HIDDEN), "attention.output.dense": (HIDDEN, HIDDEN)}
    linears |= {"intermediate.dense": (FFN, HIDDEN), "output.dense": (HIDDEN, FFN)}
    for layer in range(LAYERS):
        for name, shape in linears.items():
            shapes[f"encoder.layer.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layer.{layer}.{name}.bias"] = shape[:1]
    scales = {name: 1.0 if "embeddings" in name else 0.1 if name.endswith("bias") else 0.25 for name in shapes}
    tensors = {name: rng.standard_normal(shape) * scales[name] for name, shape in shapes.items()}
    norms = ["embeddings", *(f"encoder.layer.{i}.{part}" for i in range(LAYERS) for part in ("attention.output", "output"))]
    for name in norms:
        tensors[f"{name}.LayerNorm.weight"] = 1 + rng.standard_normal(HIDDEN) * 0.2
        tensors[f"{name}.LayerNorm.bias"] = rng.standard_normal(HIDDEN) * 0.2
    return {f"bert.{name}": values.astype(np.float32) for name, values in tensors.items()}
