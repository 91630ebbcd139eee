"""Tiny folders in the formats of others, written by plain arithmetic of the formats' own documents, and what they stand for."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

DATA = Path(__file__).with_name("data") / "quantized"

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 96, 2, 1, 32, 80
LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN, "intermediate_size": FFN,
    "num_hidden_layers": 1, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "vocab_size": VOCAB, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "tie_word_embeddings": True,
}  # fmt: skip
LAYER = "model.layers.0"


def matrices(ffn: int = FFN) -> dict[str, tuple[int, int]]:
    """Outputs and inputs."""
    heads, kv_heads = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    made = {f"self_attn.{name}": (n, HIDDEN) for name, n in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))}
    made |= {"self_attn.o_proj": (HIDDEN, heads), "mlp.gate_proj": (ffn, HIDDEN), "mlp.up_proj": (ffn, HIDDEN)}
    return {f"{LAYER}.{name}": shape for name, shape in {**made, "mlp.down_proj": (HIDDEN, ffn)}.items()}


MATRICES = matrices()
Tensors = dict[str, torch.Tensor]


@dataclass
class Made:
    """A model: the tensors of its compressed folder, what its settings say, and its matrices in float32."""

    settings: dict[str, Any]
    tensors: Tensors = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=lambda: LLAMA)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**self.config, "quantization_config": self.settings}))
        tensors = {name: x.contiguous() for name, x in self.tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder


def load_fixture(name: str) -> Made:
    """What tools/quantized_fixtures.py wrote, in another project's own code."""
    config = json.loads((DATA / name / "config.json").read_text())
    return Made(config.pop("quantization_config"), load_file(DATA / name / "model.safetensors"), config=config)


def others(rng: np.random.Generator) -> Tensors:
    """What is no matrix of a layer, in numbers that bfloat16 and float16 hold."""
    made = {"model.embed_tokens.weight": rng.standard_normal((VOCAB, HIDDEN)) * 0.5, "model.norm.weight": np.ones(HIDDEN)}
    for name in ("input_layernorm", "post_attention_layernorm"):
        made[f"{LAYER}.{name}.weight"] = 1 + rng.standard_normal(HIDDEN) * 0.1
    bits = {name: x.astype(np.float32).view(np.uint32) & 0xFFFF0000 for name, x in made.items()}
    return {name: torch.from_numpy(x.view(np.float32).astype(np.float16)) for name, x in bits.items()}


def words(fields: np.ndarray, bits: int) -> torch.Tensor:
    """int32 words of the last axis, the first field lowest; a field below 0 takes one from the next, as subtraction does. Where
    no whole fields make a word, they run on into the next one."""
    each, count = (32 // bits, 1) if 32 % bits == 0 else (32, bits)  # fields, and the words they make
    parts = fields.reshape(*fields.shape[:-1], -1, each).astype(object)
    whole = sum(parts[..., i] * (1 << bits * i) for i in range(each))
    made = np.stack([whole >> 32 * i & 0xFFFFFFFF for i in range(count)], axis=-1).astype(np.uint32)
    return torch.from_numpy(made.reshape(*fields.shape[:-1], -1).view(np.int32))


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    sym: bool = True,
    act_order: bool = False,
    version: int = 1,
    ffn: int = FFN,
    seed: int = 0,
    **said: Any,
) -> Made:
    """w = scale * (q - zero): words of qweight along the inputs, of qzeros along the outputs. Version 1 stores zero - 1; fields
    of 3 bits cross words there, so that a zero of 0 has no form."""
    rng = np.random.default_rng(seed)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order, **said}
    if version == 2:
        settings["checkpoint_format"] = "gptq_v2"
    made = Made(settings, others(rng), config={**LLAMA, "intermediate_size": ffn})
    for name, (n, k) in matrices(ffn).items():
        groups, most = (1 if group == -1 else k // group), (1 << bits) - 1
        index = np.arange(k) // (k // groups)
        index = rng.permutation(index) if act_order else index
        q = rng.integers(0, most + 1, (n, k))
        zero = np.full((groups, n), 1 << bits - 1) if sym else rng.integers(bits == 3, most + 1, (groups, n))
        scale = (rng.uniform(0.2, 1, (groups, n)) * 2 / most / k**0.5).astype(np.float16)
        made.tensors[f"{name}.qweight"] = words(q, bits).T
        made.tensors[f"{name}.qzeros"] = words(zero - (version == 1), bits)
        made.tensors[f"{name}.scales"] = torch.from_numpy(scale)
        made.tensors[f"{name}.g_idx"] = torch.from_numpy(index.astype(np.int32))
        made.values[name] = scale[index].T.astype(np.float32) * (q - zero[index].T).astype(np.float32)
    return made


def awq(group: int = 32, *, zeros: bool = True, seed: int = 0, **said: Any) -> Made:
    """w = scale * (q - zero): words along the outputs, whose fields are the outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    rng = np.random.default_rng(seed)
    made = Made({"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", **said}, others(rng))
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    for name, (n, k) in MATRICES.items():
        q = rng.integers(0, 16, (k, n))
        zero = rng.integers(0, 16, (k // group, n)) if zeros else np.full((k // group, n), 8)
        scale = (rng.uniform(0.2, 1, (k // group, n)) / 8 / k**0.5).astype(np.float16)
        for field_name, x in (("qweight", q), ("qzeros", zero)):
            made.tensors[f"{name}.{field_name}"] = words(x.reshape(len(x), -1, 8)[:, :, order].reshape(len(x), n), 4)
        made.tensors[f"{name}.scales"] = torch.from_numpy(scale)
        index = np.arange(k) // group
        made.values[name] = np.ascontiguousarray(scale[index].T.astype(np.float32) * (q - zero[index]).T.astype(np.float32))
    return made


def packed_integers(bits: int, *, padded: bool = False, sym: bool = True, group: int = 32, seed: int = 0) -> Made:
    """compressed-tensors, pack-quantized: integers + 2^(bits - 1), which run on from word to word, or (`padded`) fill one with
    as many as go into it; zero points so along the outputs."""
    rng, half = np.random.default_rng(seed), 1 << bits - 1
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group", "group_size": group}
    made = Made({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}, others(rng))

    def stored(x: np.ndarray) -> torch.Tensor:
        x = x + half
        each = 32 // bits if padded else 32
        x = np.pad(x, ((0, 0), (0, -x.shape[1] % each)))
        if padded:
            shifts = bits * np.arange(each)
            return torch.from_numpy((x.reshape(len(x), -1, each) << shifts).sum(2).astype(np.uint32).view(np.int32))
        return words(x, bits)

    for name, (n, k) in MATRICES.items():
        q = rng.integers(-half, half, (n, k))
        zero = np.zeros((n, k // group), np.int64) if sym else rng.integers(-half, half, (n, k // group))
        scale = (rng.uniform(0.2, 1, zero.shape) / half / k**0.5).astype(np.float16)
        made.tensors |= {f"{name}.weight_packed": stored(q), f"{name}.weight_shape": torch.tensor([n, k])}
        made.tensors[f"{name}.weight_scale"] = torch.from_numpy(scale)
        if not sym:
            made.tensors[f"{name}.weight_zero_point"] = stored(zero.T).T
        each = np.repeat(zero, group, axis=1)
        made.values[name] = np.repeat(scale, group, axis=1).astype(np.float32) * (q - each).astype(np.float32)
    return made


def nvfp4(seed: int = 0) -> Made:
    """compressed-tensors, nvfp4-pack-quantized: E2M1 in pairs, the low half of a byte first, times an E4M3 over a float32."""
    rng = np.random.default_rng(seed)
    made = Made({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, others(rng))
    sizes = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name, (n, k) in MATRICES.items():
        codes = rng.integers(0, 16, (n, k)).astype(np.uint8)
        scale = torch.from_numpy(rng.uniform(20, 448, (n, k // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
        whole = torch.tensor([float(np.float32(rng.uniform(500, 900) * k**0.5))])
        made.tensors[f"{name}.weight_packed"] = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
        made.tensors |= {f"{name}.weight_scale": scale, f"{name}.weight_global_scale": whole}
        numbers = np.concatenate([sizes, -sizes])[codes].reshape(n, -1, 16)
        made.values[name] = (numbers * (scale.float() / whole).numpy()[:, :, None]).reshape(n, k) + np.float32(0)
    return made


def fp8_blocks(seed: int = 0, ffn: int = FFN) -> Made:
    """E4M3 with a scale for each block of 128 x 128 in weight_scale_inv; w = weight * weight_scale_inv."""
    rng = np.random.default_rng(seed)
    made = Made({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}, others(rng))
    made.config = {**LLAMA, "intermediate_size": ffn}
    for name, (n, k) in matrices(ffn).items():
        weight = torch.from_numpy(rng.standard_normal((n, k)).astype(np.float32)).to(torch.float8_e4m3fn)
        scale = torch.from_numpy((rng.uniform(0.5, 1, (-(-n // 128), -(-k // 128))) / k**0.5).astype(np.float32))
        made.tensors |= {f"{name}.weight": weight, f"{name}.weight_scale_inv": scale}
        each = scale[torch.arange(n) // 128][:, torch.arange(k) // 128]
        made.values[name] = (weight.float() * each).numpy()
    return made


def fp8_whole(seed: int = 0) -> Made:
    """E4M3 with one scale for a matrix, in weight_scale."""
    made = fp8_blocks(seed)
    made.settings = {"quant_method": "fp8", "activation_scheme": "static"}
    for name in MATRICES:
        made.tensors[f"{name}.weight_scale"] = made.tensors.pop(f"{name}.weight_scale_inv").reshape(())
    return made


def sparse(seed: int = 0) -> Made:
    """2:4 of int8: `compressed` holds two numbers of each four, the bits of `bitmask` (lowest first) say which."""
    made = load_fixture("int8")
    rng = np.random.default_rng(seed)
    made.settings["sparsity_config"] = {"format": "sparse-24-bitmask"}
    for name, (n, k) in MATRICES.items():
        weight = made.tensors.pop(f"{name}.weight").numpy()
        places = np.argsort(rng.random((n, k // 4, 4)), axis=2)[:, :, :2]
        mask = np.zeros((n, k // 4, 4), bool)
        np.put_along_axis(mask, places, True, axis=2)
        mask = mask.reshape(n, k)
        made.tensors |= {
            f"{name}.compressed": torch.from_numpy(weight[mask].reshape(n, k // 2)),
            f"{name}.bitmask": torch.from_numpy(np.packbits(mask, axis=1, bitorder="little")),
            f"{name}.shape": torch.tensor([n, k]),
        }
        scale = made.tensors[f"{name}.weight_scale"].float().numpy()
        made.values[name] = np.where(mask, weight, 0).astype(np.float32) * scale
    return made


def mxfp4(seed: int = 0) -> Made:
    """E2M1 in pairs, the low half of a byte first, times 2^(scale - 127) of 32: as transformers stores matrices."""
    rng = np.random.default_rng(seed)
    made = Made({"quant_method": "mxfp4"}, others(rng))
    sizes = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = np.concatenate([sizes, -sizes])
    for name, (n, k) in MATRICES.items():
        codes = rng.integers(0, 16, (n, k // 32, 32)).astype(np.uint8)
        powers = rng.integers(121, 124, (n, k // 32)).astype(np.uint8)
        made.tensors[f"{name}.weight_blocks"] = torch.from_numpy(codes[:, :, ::2] | codes[:, :, 1::2] << 4)
        made.tensors[f"{name}.weight_scales"] = torch.from_numpy(powers)
        made.values[name] = (table[codes] * 2.0 ** (powers[:, :, None].astype(np.float32) - 127)).reshape(n, k) + np.float32(0)
    return made
