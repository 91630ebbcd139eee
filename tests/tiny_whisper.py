"""Tiny Whisper models with random weights, by `transformers` (the oracle), and their folders."""

import json
import re
import struct
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers.audio_utils import mel_filter_bank

RATE = 16_000
POSITIONS = 50  # one second of sound: 100 log-mel rows
LANGUAGES = ("en", "fr", "de")
CONTROLS = (
    *("<|endoftext|>", "<|startoftranscript|>", *(f"<|{language}|>" for language in LANGUAGES)),
    *("<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
TEXT = 256  # one token for each byte
EOT = TEXT
VOCAB = TEXT + len(CONTROLS) + POSITIONS + 1


NAMES = [  # of Hugging Face's tensors in openai-whisper
    (r"^model\.", ""),
    (r"\.layers\.", ".blocks."),
    (r"self_attn_layer_norm", "attn_ln"),
    (r"encoder_attn_layer_norm", "cross_attn_ln"),
    (r"final_layer_norm", "mlp_ln"),
    (r"self_attn", "attn"),
    (r"encoder_attn", "cross_attn"),
    (r"q_proj", "query"),
    (r"k_proj", "key"),
    (r"v_proj", "value"),
    (r"out_proj", "out"),
    (r"fc1", "mlp.0"),
    (r"fc2", "mlp.2"),
    (r"embed_positions\.weight", "positional_embedding"),
    (r"embed_tokens", "token_embedding"),
    (r"encoder\.layer_norm", "encoder.ln_post"),
    (r"decoder\.layer_norm", "decoder.ln"),
]


def renamed(name: str) -> str:
    """A tensor's name in openai-whisper and in ggml files."""
    for ours, theirs in NAMES:
        name = re.sub(ours, theirs, name)
    return name


def oracle(bins: int = 80, positions: int = POSITIONS, vocab_size: int = VOCAB, **more: Any) -> Any:
    """A Whisper model in float64 with values that float32 has. more: sizes of the config."""
    sizes = {
        f"{half}_{name}": size
        for half, layers in (("encoder", 2), ("decoder", 3))
        for name, size in (("layers", layers), ("attention_heads", 4), ("ffn_dim", 48))
    }
    tokens = {"pad_token_id": EOT, "bos_token_id": EOT, "eos_token_id": EOT, "decoder_start_token_id": EOT + 1}
    limits = {"max_source_positions": positions, "max_target_positions": 96}
    lists: dict[str, Any] = {"suppress_tokens": [], "begin_suppress_tokens": []}
    config = transformers.WhisperConfig(
        **{"vocab_size": vocab_size, "d_model": 32, "num_mel_bins": bins, **sizes, **tokens, **limits, **lists, **more}
    )
    model = transformers.WhisperForConditionalGeneration(config)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            scale = 0.3 if value.dim() == 1 else 1.0 if "embed" in name else 2 * value.shape[1] ** -0.5
            value.copy_(torch.randn(value.shape, generator=rng) * scale + ("norm" in name and name.endswith("weight")))
    return model.double().eval()


def frames(bins: int = 80, positions: int = POSITIONS, seed: int = 0) -> np.ndarray:
    """Random log-mel rows, [2 * positions, bins] float32."""
    return np.random.default_rng(seed).standard_normal((2 * positions, bins)).astype(np.float32)


def write_tokenizer(folder: Path) -> None:
    """A vocabulary of the 256 bytes and Whisper's control tokens; timestamps are not listed, as in some files."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: at for at, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in CONTROLS])
    tokenizer.save(str(folder / "tokenizer.json"))


def with_likely_ends(model: Any) -> Any:
    """The model with higher logits of the end token and of timestamps."""
    decoder = model.model.decoder
    with torch.no_grad():
        bias = decoder.layer_norm.bias / decoder.layer_norm.bias.square().sum()
        decoder.embed_tokens.weight[EOT] += 13 * bias
        decoder.embed_tokens.weight[TEXT + len(CONTROLS) :] += 6 * bias
    return model


def write_folder(folder: Path, bins: int = 80, likely_ends: bool = False, **more: Any) -> Path:
    """A Hugging Face folder of the tiny model, in float32. more: as in `oracle`."""
    model = oracle(bins, **more).float()
    (with_likely_ends(model) if likely_ends else model).save_pretrained(folder)
    write_tokenizer(folder)
    generation = {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7, EOT]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def write_ctranslate2(folder: Path, model: Any) -> Path:
    """The same model as a CTranslate2 folder, in float16."""
    state = {name.removeprefix("model."): value.half().numpy() for name, value in model.state_dict().items()}
    variables: dict[str, np.ndarray] = {"decoder/num_heads": np.array(model.config.decoder_attention_heads, np.int16)}
    for side in ("encoder", "decoder"):
        variables[f"{side}/position_encodings/encodings"] = state[f"{side}.embed_positions.weight"]
        _norm(variables, state, f"{side}/layer_norm", f"{side}.layer_norm")
        for layer in range(getattr(model.config, f"{side}_layers")):
            theirs, ours = f"{side}/layer_{layer}", f"{side}.layers.{layer}"
            attentions = {"self_attention": ("self_attn", ("qkv", "o"))}
            if side == "decoder":
                attentions["attention"] = ("encoder_attn", ("q", "kv", "o"))
            for name, (attention, linears) in attentions.items():
                _norm(variables, state, f"{theirs}/{name}/layer_norm", f"{ours}.{attention}_layer_norm")
                for at, parts in enumerate(linears):
                    names = [f"{ours}.{attention}.{'out' if part == 'o' else part}_proj" for part in parts]
                    _linear(variables, state, f"{theirs}/{name}/linear_{at}", *names)
            _norm(variables, state, f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            _linear(variables, state, f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            _linear(variables, state, f"{theirs}/ffn/linear_1", f"{ours}.fc2")
    for name in ("conv1", "conv2"):
        _linear(variables, state, f"encoder/{name}", f"encoder.{name}")
    variables["decoder/embeddings/weight"] = state["decoder.embed_tokens.weight"]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(ctranslate2_bytes(variables))
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [5, 6], "suppress_ids_begin": [7, EOT]}))
    write_tokenizer(folder)
    return folder


def _norm(variables: dict[str, np.ndarray], state: dict[str, np.ndarray], theirs: str, ours: str) -> None:
    variables[f"{theirs}/gamma"], variables[f"{theirs}/beta"] = state[f"{ours}.weight"], state[f"{ours}.bias"]


def _linear(variables: dict[str, np.ndarray], state: dict[str, np.ndarray], theirs: str, *names: str) -> None:
    weights = [state[f"{name}.weight"] for name in names]
    biases = [state.get(f"{name}.bias", np.zeros(len(one), np.float16)) for name, one in zip(names, weights, strict=True)]
    variables[f"{theirs}/weight"], variables[f"{theirs}/bias"] = np.concatenate(weights), np.concatenate(biases)


def words() -> list[bytes]:
    """The words of `write_tokenizer`, without control tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    codes = {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
    return [bytes([codes[char]]) for char in sorted(pre_tokenizers.ByteLevel.alphabet())]


def mel_filters(bins: int) -> np.ndarray:
    """Mel filters by transformers, [bins, 201] float32."""
    values: np.ndarray = mel_filter_bank(201, bins, 0.0, 8000.0, RATE, "slaney", "slaney")
    return values.T.astype(np.float32)


def ggml_tensor(name: str, value: np.ndarray, kind: str) -> bytes:
    """A tensor of a ggml file; kind: a type of the package gguf."""
    code = getattr(gguf.GGMLQuantizationType, kind)
    data = gguf.quants.quantize(value, code).tobytes()
    raw = name.encode()
    return struct.pack(f"<3i{value.ndim}i", value.ndim, len(raw), code, *value.shape[::-1]) + raw + data


def ggml_sizes(config: Any, number: int) -> list[int]:
    """The sizes at the start of a ggml file. number: its number format."""
    encoder = [config.max_source_positions, config.d_model, config.encoder_attention_heads, config.encoder_layers]
    decoder = [config.max_target_positions, config.d_model, config.decoder_attention_heads, config.decoder_layers]
    return [config.vocab_size, *encoder, *decoder, config.num_mel_bins, number]


def ggml_head(sizes: Sequence[int], filters: np.ndarray, ranked: Sequence[bytes]) -> bytes:
    """A ggml file up to its tensors."""
    data = struct.pack("<I11i2i", 0x67676D6C, *sizes, *filters.shape) + filters.tobytes() + struct.pack("<i", len(ranked))
    return data + b"".join(struct.pack("<i", len(word)) + word for word in ranked)


def ggml_bytes(state: Mapping[str, np.ndarray], config: Any, ranked: Sequence[bytes], kind: str = "F16") -> bytes:
    """A ggml file as whisper.cpp's converter and quantizer write it: matrices in `kind`, convolutions in float16 (float32 if
    all are), the rest in float32. state: tensors by the names of Hugging Face."""
    number = {"F32": 0, "F16": 1, "Q4_0": 2002, "Q4_1": 2003, "Q8_0": 2007, "Q5_0": 2008, "Q5_1": 2009}[kind]
    data = ggml_head(ggml_sizes(config, number), mel_filters(config.num_mel_bins), ranked)
    for name, value in state.items():
        theirs, stored = renamed(name), value.astype(np.float32)
        if "proj_out" in theirs:
            continue
        used = "F32"
        if "conv" in theirs:
            stored = stored.reshape(-1, 1) if stored.ndim == 1 else stored
            used = "F16" if stored.ndim == 3 and kind != "F32" else "F32"
        elif stored.ndim == 2 and "positional" not in theirs:
            used = kind if stored.shape[1] % 32 == 0 else "F16"
        data += ggml_tensor(theirs, stored, used)
    return data


def write_ggml(path: Path, model: Any, kind: str = "F16") -> Path:
    """The tiny model as a ggml file."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    path.write_bytes(ggml_bytes(state, model.config, words(), kind))
    return path


def ctranslate2_bytes(variables: dict[str, np.ndarray], specification: str = "WhisperSpec", version: int = 6) -> bytes:
    """A model.bin with these variables."""

    def number(value: int, size: int = 4) -> bytes:
        return value.to_bytes(size, "little")

    def text(value: str) -> bytes:
        return number(len(value) + 1, 2) + value.encode() + b"\0"

    types = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4}
    data = number(version) + text(specification) + number(3) + number(len(variables))
    for name, value in variables.items():
        data += text(name) + number(value.ndim, 1) + b"".join(map(number, value.shape))
        data += number(types[value.dtype.name], 1) + number(value.nbytes) + value.tobytes()
    return data + number(0)


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(int(seconds * RATE)) * 0.1).astype(np.float32)


def write_wav(path: Path, samples: np.ndarray) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(np.round(samples * 32767).astype("<i2").tobytes())
    return path
