"""Writes tests/data/quantized: a tiny llama as other projects compress it, packed and read back by their own code.

    pip install torch transformers auto-round compressed-tensors bitsandbytes        # in an environment of its own; for
        # int8-2of4 and int5-words compressed-tensors 0.9.4, as later ones have no 2:4 and let fields cross words
    python tools/quantized_fixtures.py [FORMAT...]
    python tools/quantized_fixtures.py --gptq FOLDER OUT        # a whole model in 4 bits with zero points, for measurements

Each folder has config.json, model.safetensors and expected.json: who made it, and the SHA-256 of each matrix in float32 by the
project's own arithmetic, whose scales are widened to float32 first, so that no product is rounded; for formats that are read
with a bound, expected.safetensors with one matrix's numbers instead. The tests need none of these packages.
"""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np

from tests.quantized import FFN, LAYER, LLAMA, matrices, others

OUT = Path(__file__).parents[1] / "tests" / "data" / "quantized"
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors by field, the matrix in float32
GROUP = 32


def grid(w: torch.Tensor, group: int, symmetric: bool, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales (numbers that float16 holds) and zero points [n, groups] by the least and the largest of each group."""
    parts, most = w.reshape(len(w), -1, group), 2**bits - 1
    if symmetric:
        return (parts.abs().amax(-1) * 2 / most).half().float(), torch.full(parts.shape[:2], 2.0 ** (bits - 1))
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((high - low) / most).half().float()
    return scale, (-low / scale).round().clamp(1, most)


def linear(w: torch.Tensor) -> torch.nn.Linear:
    made = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    made.weight.data.copy_(w)
    return made


def gptq(w: torch.Tensor, symmetric: bool) -> Packed:
    from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

    layer = QuantLinear(4, GROUP, w.shape[1], w.shape[0], False, g_idx=True)
    scale, zero = grid(w, GROUP, symmetric)
    layer.pack(linear(w), scale, zero, None, "cpu")
    fields = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx") if hasattr(layer, name)}
    layer.scales = layer.scales.float()
    del layer.g_idx  # groups are in order, and with one it reads as many outputs as inputs
    return fields, layer(torch.eye(w.shape[1])).T


def awq(w: torch.Tensor) -> Packed:
    from auto_round.export.export_to_awq.utils import WQLinear_GEMM, dequantize_gemm

    scale, zero = grid(w, GROUP, False)
    layer = WQLinear_GEMM.from_linear(linear(w), 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous(), device="cpu")
    fields = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales")}
    return fields, dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).T


def compressed(w: torch.Tensor, name: str, arguments: dict[str, object]) -> Packed:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry(name)
    strategy, group = str(arguments["strategy"]), int(str(arguments.get("group_size", w.shape[1])))
    parts = w.reshape(len(w), -1, group) if strategy != "tensor" else w.reshape(1, 1, -1)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
    scale = scale.bfloat16() if "mxfp4" not in name else scale
    state = {"weight": w.to(scale.dtype), "weight_scale": scale, "weight_zero_point": zero}
    fields = compressor.compress(dict(state), scheme)
    wide = {key: x.float() if key == "weight_scale" and x.is_floating_point() else x for key, x in fields.items()}
    if "mxfp4" in name:
        return fields, compressor.decompress(fields, scheme)["weight"].float()
    return fields, compressor.decompress(wide, scheme)["weight"].float()


def nvfp4(w: torch.Tensor) -> Packed:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**NVFP4)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    whole = generate_gparam(w.amin(), w.amax()).float().reshape(1)
    parts = w.reshape(len(w), -1, 16)
    scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args, global_scale=whole)
    state = {"weight": w, "weight_scale": scale, "weight_zero_point": zero, "weight_global_scale": whole}
    fields = compressor.compress(dict(state), scheme)
    numbers = unpack_fp4_from_uint8(fields["weight_packed"], *w.shape, dtype=torch.float32)
    return fields, dequantize(numbers, fields["weight_scale"].float(), global_scale=whole, args=args, dtype=torch.float32)


def sparse(w: torch.Tensor) -> Packed:
    from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import Sparse24BitMaskTensor

    scale = (w.abs().amax(1, keepdim=True) / 127).bfloat16()
    held = Sparse24BitMaskTensor.from_dense((w / scale.float()).round().clamp(-127, 127).to(torch.int8))
    fields = {name.rpartition(".")[2]: x for name, x in held.dict("matrix.weight").items()}
    return {**fields, "weight_scale": scale}, held.decompress().float() * scale.float()


def whole_words(w: torch.Tensor, bits: int) -> Packed:
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import pack_to_int32, unpack_from_int32

    parts, half = w.reshape(len(w), -1, GROUP), 2 ** (bits - 1)
    scale = (parts.abs().amax(-1) / half).bfloat16()
    q = (parts / scale.float()[:, :, None]).round().clamp(-half, half - 1).to(torch.int8).reshape(w.shape)
    fields = {"weight_packed": pack_to_int32(q, bits), "weight_shape": torch.tensor(w.shape), "weight_scale": scale}
    read = unpack_from_int32(fields["weight_packed"], bits, w.shape)
    return fields, read.float() * scale.float().repeat_interleave(GROUP, 1)


def bitsandbytes(w: torch.Tensor, kind: str, nested: bool = False) -> Packed:
    from bitsandbytes import functional

    if kind == "int8":
        codes, scale, _ = functional.int8_vectorwise_quant(w.half())
        return {"weight": codes, "SCB": scale}, codes.float() * (scale[:, None] / 127)
    packed, state = functional.quantize_4bit(w, blocksize=64, quant_type=kind, compress_statistics=nested)
    fields = {"weight": packed, **{f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}}
    return fields, functional.dequantize_4bit(packed, state).float()


CT_NAME = "compressed-tensors"
CT = {"quant_method": CT_NAME, "quantization_status": "compressed", "ignore": ["lm_head"]}


def of_compressed(name: str, **arguments: object) -> tuple[Callable[[torch.Tensor], Packed], dict[str, object], str]:
    return (lambda w: compressed(w, name, arguments)), settings_of(name, arguments), CT_NAME


def settings_of(name: str, arguments: dict[str, object]) -> dict[str, object]:
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": None, "output_activations": None}
    return {**CT, "format": name, "config_groups": {"group_0": group}}


NVFP4: dict[str, object] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False}
BNB = {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "float32"}
FORMATS: dict[str, tuple[Callable[[torch.Tensor], Packed], dict[str, object], str]] = {
    "gptq-asym": (lambda w: gptq(w, False), {**GPTQ, "sym": False}, "auto-round"),
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        "auto-round",
    ),
    "int4-asym": of_compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
    "int8": of_compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True),
    "fp8": of_compressed("float-quantized", num_bits=8, type="float", strategy="channel", symmetric=True),
    "mxfp4": of_compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32, symmetric=True),
    "int3-asym": of_compressed("pack-quantized", num_bits=3, type="int", strategy="group", group_size=GROUP, symmetric=False),
    "nvfp4": (nvfp4, settings_of("nvfp4-pack-quantized", NVFP4), CT_NAME),
    "int8-2of4": (sparse, {**CT, "format": "int-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}}, CT_NAME),
    "int5-words": (lambda w: whole_words(w, 5), settings_of("pack-quantized", {"num_bits": 5, "group_size": GROUP}), CT_NAME),
    "bnb-int8": (lambda w: bitsandbytes(w, "int8"), {**BNB, "load_in_8bit": True}, "bitsandbytes"),
    "bnb-nf4-nested": (
        lambda w: bitsandbytes(w, "nf4", True),
        {**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        "bitsandbytes",
    ),
    "bnb-fp4": (lambda w: bitsandbytes(w, "fp4"), {**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}, "bitsandbytes"),
}


def write(name: str) -> None:
    make, settings, package = FORMATS[name]
    rng, folder = np.random.default_rng(1), OUT / name
    tensors = others(rng)
    hashes, values = {}, {}
    ffn = 128 if name.startswith("bnb") else FFN  # whose blocks of 64 are in one row
    for matrix, (n, k) in matrices(ffn).items():
        w = torch.from_numpy(rng.standard_normal((n, k)).astype(np.float32) / k**0.5)
        fields, meaning = make(w)
        tensors |= {f"{matrix}.{field}": x for field, x in fields.items()}
        values[matrix] = meaning.contiguous().float() + 0.0  # one zero, not two
        hashes[matrix] = hashlib.sha256(values[matrix].numpy().tobytes()).hexdigest()
        print(name, matrix, float((values[matrix] - w).square().mean() / w.square().mean()))
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: x.contiguous() for key, x in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(
        json.dumps({**LLAMA, "intermediate_size": ffn, "quantization_config": settings}, indent=1) + "\n"
    )
    said = {"made by": f"{package} {version(package)}, torch {torch.__version__}", "sha256": hashes}
    (folder / "expected.json").write_text(json.dumps(said, indent=1) + "\n")
    if name.startswith("bnb"):
        save_file({"k_proj": values[f"{LAYER}.self_attn.k_proj"]}, folder / "expected.safetensors")


def write_gptq(source: Path, out: Path) -> None:
    """Matrices of layers by rounding to the nearest, packed by auto-round; all else as it is."""
    shutil.copytree(source, out)
    tensors = load_file(source / "model.safetensors")
    for name in [name for name in tensors if ".layers." in name and tensors[name].ndim == 2]:
        fields, _ = gptq(tensors.pop(name).float(), False)
        tensors |= {f"{name.removesuffix('.weight')}.{field}": x.contiguous() for field, x in fields.items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": {**GPTQ, "sym": False}}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--gptq"]:
        write_gptq(Path(sys.argv[2]), Path(sys.argv[3]))
        sys.exit()
    for chosen in sys.argv[1:] or FORMATS:
        write(chosen)
