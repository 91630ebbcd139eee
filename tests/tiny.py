"""Tiny random models and engines around them: the oracles of tests that need real attention but no real weights."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from headrace.backends.eager.program import EagerProgram
from headrace.backends.memory import window_blocks
from headrace.data.config import CacheConfig, EngineConfig, LayerConfig, ModelConfig, RopeConfig, SchedulerConfig
from headrace.data.params import SamplingParams
from headrace.data.types import Request
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.engine.executor import InProcess
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.runner.runner import Runner
from headrace.weights.loader import Allocator

VOCAB = 97


# Of families by numbers: fields of the model, and rotary settings for heads of a size.
NUMBERS: dict[str, dict[str, Any]] = {
    "granite": {"embed_scale": 5.7, "attn_scale": 0.3, "head_scale": 0.5, "norm_eps": 1e-4},
    "olmo2": {"wide_qk_norm": True},
    "exaone4": {"qk_norm": True},
    "gemma2": {"embed_scale": 32**0.5, "activation": "gelu_tanh", "attn_softcap": 5.0, "logit_softcap": 7.0},
    "glm4": {"qkv_bias": True, "activation": "silu"},
}
ROPES: dict[str, Callable[[int], RopeConfig]] = {
    "glm4": lambda head_dim: RopeConfig(dim=head_dim // 2),
    "arcee": lambda head_dim: RopeConfig(scaling="yarn", factor=4.0, original_context=64, beta_fast=2.0, amplitude=1.2),
    "ministral3": lambda head_dim: RopeConfig(growth=0.5, original_context=8),
}


def tiny_config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    """Two layers, four heads over two K/V heads. `changes` are of the model, or of each of its layers; `num_layers` and, of
    gemma, which of them slide; `sliding`: changes of these, as pairs; `share`: how many neighbours read one layer's K and V;
    `kv_from`: by layer, the one whose K and V it reads."""
    share, sources = changes.pop("share", 1), changes.pop("kv_from", None)
    of_sliding = dict(changes.pop("sliding", ()))
    layer: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 8, "ffn": 48, "rope": RopeConfig()}
    model: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "max_position": 512}
    slides = [False] * changes.pop("num_layers", 2)
    if architecture == "gpt2":
        layer |= {"kv_heads": 4, "rope": None}
        model |= {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
    if architecture == "qwen2":
        model |= {"qkv_bias": True}
    if architecture == "qwen3":
        model |= {"qk_norm": True}
    if architecture == "gemma3_text":
        layer |= {"kv_heads": 1}
        model |= {"embed_scale": 32**0.5, "qk_norm": True, "activation": "gelu_tanh"}
        slides = list(changes.pop("slides", (True, False)))
    head_dim = changes.get("head_dim", layer["head_dim"])
    model |= NUMBERS.get(architecture, {})
    layer |= {"rope": ROPES[architecture](head_dim)} if architecture in ROPES else {}
    slides = list(changes.pop("slides", (True, False))) if architecture in ("gemma2", "exaone4") else slides
    numbers = {field.name for field in fields(LayerConfig)}
    each = LayerConfig(**{**layer, **{name: value for name, value in changes.items() if name in numbers}})
    sliding = replace(each, window=12, rope=RopeConfig(theta=1000.0), **of_sliding)
    each = replace(each, rope=None) if architecture in ("smollm3", "exaone4") else each
    model |= {name: value for name, value in changes.items() if name not in numbers}
    layers = [sliding if slid else each for slid in slides]
    if sources is not None:
        layers = [replace(layer, kv_from=source) for layer, source in zip(layers, sources, strict=True)]
    config = ModelConfig(architecture, layers=tuple(layers), **model)
    return config if share == 1 else config.sharing(share)


def tiny_model(config: ModelConfig | None = None, dtype: torch.dtype = torch.float64, seed: int = 0) -> Model:
    """Random weights, large enough that next tokens differ and small enough that nothing saturates."""
    model = describe(config or tiny_config())
    generator = torch.Generator().manual_seed(seed)
    for _, holder in model.holders():
        holder.create(Allocator(dtype))
        for name in holder.params():
            parameter = getattr(holder, name)
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + values * 0.1 if values.dim() == 1 and name == "weight" else values * 0.3)
        holder.finish()
    return model


def tiny_engine(
    model: Model,
    *,
    budget: int = 64,
    blocks: int = 64,
    block_size: int = 4,
    seqs: int = 16,
    speculation: Speculation | None = None,
    windows: bool = True,
    **cache: bool,
) -> Engine:
    """An engine without a tokenizer over a torch runner. windows: layers with a window give up blocks, if there are any."""
    window = window_sizes(model, block_size, seqs, budget, blocks) if windows else kept_windows(model, blocks)
    config = EngineConfig(
        SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=256),
        CacheConfig(blocks, block_size, **cache, **window),
    )
    dtype = next(model.parameters()).dtype
    pool = KVPool(model.config, blocks, block_size, dtype, **window)
    executor = InProcess(Runner(EagerProgram(model, pool)))
    start = None if model.config.source is None else model.config.start
    return Engine(executor, config, vocab_size=model.config.vocab_size, speculation=speculation, start=start)


def window_sizes(model: Model, block_size: int, seqs: int, budget: int, blocks: int) -> dict[str, int]:
    """Window and blocks of the window layers' pool for contexts of 256 tokens, as a memory plan has them."""
    window = model.config.shared_window(256)
    return {"window": window, "window_blocks": min(blocks, window_blocks(window, block_size, seqs, budget))} if window else {}


def kept_windows(model: Model, blocks: int) -> dict[str, int]:
    """Window and blocks of a pool of window layers that keeps all K and V; none if all layers fit one pool."""
    return {"window": 1 << 20, "window_blocks": blocks} if len(model.config.kv_sizes) > 1 else {}


def finish(engine: Engine) -> None:
    """Step until nothing is left, with the books checked after every step."""
    for _ in range(5000):
        if not engine.busy:
            return
        for delta in engine.step():
            assert delta.error is None, delta.error
        engine.check()
    raise AssertionError("the engine does not come to an end")


def tokens_of(request: Request) -> list[list[int]]:
    """The outputs of a finished request, by child."""
    return [seq.output for seq in sorted(request.finished, key=lambda seq: seq.decode.index)]


def run_alone(model: Model, prompt: list[int], params: SamplingParams, child: int = 0) -> list[int]:
    """One request in an engine of its own, fed whole, with all K and V kept; `child` sets the noise key."""
    engine = tiny_engine(model, budget=256, prefix_caching=False, windows=False)
    request = engine.add(prompt, params.replace(n=1))
    request.seqs[0].decode.index = child
    finish(engine)
    return tokens_of(request)[0]
