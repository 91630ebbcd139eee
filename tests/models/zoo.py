"""Tiny random models of every architecture, made by `transformers` (the oracle), and ways to hand their weights to Headrace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from headrace.models.base import Model
from headrace.weights.loader import load_model, write_parts
from headrace.weights.parts import stored_as
from headrace.weights.source import TensorInfo, WeightError

VOCAB = 96
FLOAT32 = torch.float32
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _llama(**changes: Any) -> Any:
    settings = {**SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}
    return transformers.LlamaConfig(**settings)


def _mistral(**changes: Any) -> Any:
    return transformers.MistralConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2, **changes)


def _qwen2(**changes: Any) -> Any:
    return transformers.Qwen2Config(**SMALL, num_attention_heads=4, **{"num_key_value_heads": 2, **changes})


def _qwen3(**changes: Any) -> Any:
    return transformers.Qwen3Config(**SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=32, **changes)


def _gemma3(**changes: Any) -> Any:
    settings = {**SMALL, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 32, "sliding_window": 6}
    return transformers.Gemma3TextConfig(**{**settings, "num_key_value_heads": 1, "query_pre_attn_scalar": 32, **changes})


def _gpt2(**changes: Any) -> Any:
    return transformers.GPT2Config(vocab_size=VOCAB, n_positions=256, n_embd=64, n_layer=3, n_head=4, **changes)


THETA = {"rope_type": "default", "rope_theta": 10000.0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 2.0}
# Of the 8 pairs of a head, the first 4 are rotated.
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "factor": 2.0}
# Of a head of 16 values, of which 12 are rotated.
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.0, 1.25, 1.25, 1.5, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
}
HYBRID = {"num_hidden_layers": 5, "sliding_window": 6}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.21875,
    "logits_scaling": 0.5,
}


def _granite(**changes: Any) -> Any:
    return transformers.GraniteConfig(**SMALL, **HEADS, **GRANITE, **changes)


def _smollm3(**changes: Any) -> Any:
    return transformers.SmolLM3Config(**{**SMALL, **HEADS, "num_hidden_layers": 5, **changes})


def _phi3(**changes: Any) -> Any:
    return transformers.Phi3Config(**{**SMALL, **HEADS, **changes})


def _gemma2(**changes: Any) -> Any:
    settings = {**SMALL, **HEADS, **HYBRID, "head_dim": 32, "query_pre_attn_scalar": 32}
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
    return transformers.Gemma2Config(**{**settings, **caps, **changes})


def _olmo2(**changes: Any) -> Any:
    return transformers.Olmo2Config(**SMALL, **HEADS, **changes)


def _olmo3(**changes: Any) -> Any:
    return transformers.Olmo3Config(**{**SMALL, **HEADS, **HYBRID, **changes})


def _exaone4(**changes: Any) -> Any:
    return transformers.Exaone4Config(**{**SMALL, **HEADS, **HYBRID, "sliding_window_pattern": 4, **changes})


def _glm4(**changes: Any) -> Any:
    settings = {**SMALL, **HEADS, "head_dim": 32, "attention_bias": True}
    return transformers.Glm4Config(**{**settings, **changes})


def _seed_oss(**changes: Any) -> Any:
    return transformers.SeedOssConfig(**{**SMALL, **HEADS, "head_dim": 32, "attention_bias": True, **changes})


def _ernie(**changes: Any) -> Any:
    return transformers.Ernie4_5Config(**{**SMALL, **HEADS, "head_dim": 32, **changes})


def _arcee(**changes: Any) -> Any:
    return transformers.ArceeConfig(**SMALL, **HEADS, **changes)


def _internlm3(**changes: Any) -> Any:
    return transformers.InternLM3Config(**SMALL, **HEADS, head_dim=32, **changes)


def _ministral3(**changes: Any) -> Any:
    rope = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.5}
    settings = {**SMALL, **HEADS, "head_dim": 32, "rope_parameters": rope}
    return transformers.Ministral3Config(**{**settings, **changes})


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama-mha-tied": lambda: _llama(num_key_value_heads=4, tie_word_embeddings=True),
    "llama-gqa": _llama,
    "llama-mqa": lambda: _llama(num_key_value_heads=1),
    "llama-rope-llama3": lambda: _llama(rope_parameters={"rope_theta": 500000.0, **LLAMA3_ROPE}),
    "llama-rope-linear": lambda: _llama(rope_parameters={"rope_theta": 10000.0, "rope_type": "linear", "factor": 4.0}),
    "llama-rope-proportional": lambda: _llama(rope_parameters=PROPORTIONAL),
    "llama-wide-heads": lambda: _llama(head_dim=24),
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "mistral-window": lambda: _mistral(sliding_window=7),
    "mistral-no-window": lambda: _mistral(sliding_window=None),
    "qwen2-tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen2-mqa": lambda: _qwen2(num_key_value_heads=1),
    "qwen2-window": lambda: _qwen2(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": _qwen3,
    "qwen3-biases-tied": lambda: _qwen3(attention_bias=True, tie_word_embeddings=True),
    "gemma3-one-kv-head": _gemma3,
    "gemma3-ropes": lambda: _gemma3(num_key_value_heads=2, final_logit_softcapping=9.0, rope_parameters=_gemma_ropes()),
    "gemma3-query-scale": lambda: _gemma3(num_key_value_heads=4, query_pre_attn_scalar=20),
    "gpt2": _gpt2,
    "gpt2-narrow": lambda: _gpt2(n_inner=80),
    "granite": _granite,
    "granite-biases": lambda: _granite(attention_bias=True, tie_word_embeddings=True),
    "smollm3": _smollm3,
    "smollm3-window": lambda: _smollm3(use_sliding_window=True, sliding_window=6),
    "phi3-window": lambda: _phi3(sliding_window=7, rope_parameters={**THETA, "partial_rotary_factor": 0.5}),
    "phi3-longrope": lambda: _phi3(original_max_position_embeddings=256, rope_parameters=LONGROPE, tie_word_embeddings=True),
    "olmo2": _olmo2,
    "gemma2": _gemma2,
    "exaone4": _exaone4,
    "exaone4-full": lambda: _exaone4(
        sliding_window=None,
        layer_types=["full_attention"] * 5,
        rope_parameters={**THETA, "rope_type": "linear", "factor": 4.0},
    ),
    "glm4": _glm4,
    "seed_oss": _seed_oss,
    "seed_oss-out-bias": lambda: _seed_oss(attention_out_bias=True),
    "ernie4_5": _ernie,
    "ernie4_5-biases": lambda: _ernie(use_bias=True),
    "falcon3": lambda: _llama(head_dim=32, rope_parameters={"rope_theta": 1000042.0, "rope_type": "default"}),
    "arcee": _arcee,
    "arcee-yarn": lambda: _arcee(rope_parameters=YARN),
    "internlm3": lambda: _internlm3(rope_parameters={"rope_type": "dynamic", "factor": 6.0, "rope_theta": 10000.0}),
    "internlm3-biases": lambda: _internlm3(attention_bias=True, mlp_bias=True),
    "ministral3": _ministral3,
    "olmo3": _olmo3,
    "olmo3-yarn": lambda: _olmo3(rope_parameters={"full_attention": YARN, "sliding_attention": THETA}),
}

# Families that transformers lacks: the variant with the same arithmetic, and changes of its config. MiniCPM has no number for
# the scale of attention, 1 / √16.
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "minicpm": ("granite", {"attention_multiplier": 0.25}),
    "internlm2": ("llama-gqa", {}),
}


def _gemma_ropes() -> dict[str, Any]:
    return {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }


def oracle(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """The transformers model of a variant, with weights large enough that every part of it shows in the logits.

    changes: of its config.
    """
    config = CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype).eval()
    draw_weights(model, 0.0 if name.startswith("gemma") else 1.0, seed)
    return model


def draw_weights(model: Any, centre: float = 1.0, seed: int = 0) -> None:
    """Fill a model of transformers. centre: of the norms' weights."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in model.named_parameters():
            drawn = torch.randn(value.shape, generator=rng, dtype=torch.float64)
            if value.dim() == 1:
                is_norm = "norm" in key.lower() or ".ln_" in key
                # In steps of 1 / 4096: gemma's 1 + w is exact in float32.
                drawn = (drawn * 0.3).mul(4096).round().div(4096) + (centre if is_norm and key.endswith("weight") else 0.0)
            else:
                drawn = drawn * (0.3 if "embed" in key or ".wte" in key or ".wpe" in key else value.shape[1] ** -0.5)
            value.copy_(drawn.to(FLOAT32))  # files hold float32


@contextmanager
def in_float64() -> Iterator[None]:
    """transformers computes rotary angles, norms and softmax in float32 whatever the model's dtype; here in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(FLOAT32)


class MemorySource:
    """A WeightSource over tensors in memory, for either container."""

    def __init__(self, container: str, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
        self.path = Path("memory")
        self.format = container
        self.tensors = tensors
        self.config = self.metadata = settings

    def names(self) -> list[str]:
        return list(self.tensors)

    def info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise WeightError(f"{self.path}: there is no tensor {name!r}")
        tensor = self.tensors[name]
        return TensorInfo(name, tuple(tensor.shape), "F32", tensor.nbytes)

    def raw(self, name: str) -> np.ndarray:
        tensor = self.tensors[name].float()
        return tensor.reshape(-1, tensor.shape[-1]).numpy().view(np.uint8)

    def columns(self, name: str) -> None:
        pass

    def mapped(self, name: str) -> bool:
        return False

    def release(self, name: str) -> None:
        pass

    def close(self) -> None:
        self.tensors = {}


def hf_source(model: Any) -> MemorySource:
    """The model as a Hugging Face folder would hold it: config.json, and every tensor once."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            tensors[name] = tensor.detach()
    return MemorySource("safetensors", tensors, model.config.to_dict())


def pieces(model: Model) -> dict[str, torch.Tensor]:
    """The values of every part of every parameter, by target."""
    made = {}
    for path, holder in model.holders():
        for field, spec in holder.params().items():
            split = getattr(holder, field).split([rows for _, rows in spec.parts])
            for (name, _), piece in zip(spec.parts, split, strict=True):
                made[".".join(filter(None, (path, name, field)))] = piece
    return made


def written(model: Model, container: str) -> dict[str, torch.Tensor]:
    """The tensors of a file of this kind (gguf | safetensors) that holds the model."""
    values = pieces(model)
    return {name: write_parts(parts, values.__getitem__) for name, parts in stored_as(model, container).items()}


def loaded(model: Any, dtype: torch.dtype = torch.float32) -> Model:
    """The transformers model, loaded by Headrace."""
    return load_model(hf_source(model), dtype)


@torch.no_grad()
def oracle_logits(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Per prompt, logits [tokens, vocabulary]."""
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]


def prompts(seed: int = 0, lengths: tuple[int, ...] = (1, 5, 17, 40)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


def largest_gap(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest absolute difference over all rows of all prompts."""
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True))


def steps_of(mode: str, lengths: list[int], seed: int = 0) -> Iterator[list[tuple[int, int]]]:
    """Per step, the token range each sequence feeds (empty once it is done): whole, random chunks, or token by token."""
    rng = np.random.default_rng(seed)
    done = [0] * len(lengths)
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        step = []
        for i, n in enumerate(lengths):
            size = {"whole": n, "chunks": int(rng.integers(1, 9)), "tokens": 1}[mode]
            end = min(n, done[i] + size)
            step.append((done[i], end))
            done[i] = end
        yield step
