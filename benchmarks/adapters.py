"""Time of decoding with adapters (LoRA) of random weights, relative to the same model opened without adapters.

usage: python -m benchmarks.adapters FILE.gguf [--rank 16] [--targets all] [--new 32] [--rounds 9] [--threads 2]

Cells: one and eight sequences without an adapter, one sequence with an adapter, eight sequences with one adapter, eight
sequences with an adapter each. A model opened without adapters and one opened with eight take turns in one process. Prints
the median ratio of the rounds and its quartiles.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import quantiles

import numpy as np
from safetensors.numpy import save_file

from headrace import LLM, SamplingParams
from headrace.data.config import ModelConfig
from headrace.models.registry import read_config
from headrace.weights.gguf import GGUFFile

COUNT = 8  # adapters, and sequences of a batch
PROMPT = 4  # tokens
TARGETS = {"attention": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}
TARGETS["all"] = TARGETS["attention"] + TARGETS["mlp"]


def write_adapter(folder: Path, config: ModelConfig, rank: int, targets: Sequence[str], seed: int) -> None:
    """Write a folder of peft for a model of Llama's tensor names."""
    rng, tensors, hidden = np.random.default_rng(seed), {}, config.hidden_size
    for number, layer in enumerate(config.layers):
        q, k, ffn = layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim, layer.ffn
        sizes = {"q_proj": (hidden, q), "k_proj": (hidden, k), "v_proj": (hidden, k), "o_proj": (q, hidden)}
        sizes |= {"gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden)}
        for name in targets:
            inputs, outputs = sizes[name]
            block = "mlp" if name in TARGETS["mlp"] else "self_attn"
            key = f"base_model.model.model.layers.{number}.{block}.{name}.lora_"
            tensors[f"{key}A.weight"] = (rng.standard_normal((rank, inputs)) * inputs**-0.5).astype(np.float32)
            tensors[f"{key}B.weight"] = (rng.standard_normal((outputs, rank)) * 0.01).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def seconds(llm: LLM, names: Sequence[str | None], new: int) -> float:
    """Seconds of a batch with the adapter of each sequence."""
    prompts = [[(7 * i + 3 * j) % 200 + 5 for j in range(PROMPT)] for i in range(len(names))]
    params = [SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, adapter=name) for name in names]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    taken = time.perf_counter() - start
    assert all(output.error is None and len(output.outputs[0].token_ids) == new for output in outputs)
    return taken


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.adapters", description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--targets", choices=sorted(TARGETS), default="all")
    for name, default in (("rank", 16), ("new", 32), ("rounds", 9), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(argv)
    config = read_config(GGUFFile(given.file))
    with tempfile.TemporaryDirectory() as place:
        names = [f"a{number}" for number in range(COUNT)]
        for seed, name in enumerate(names):
            write_adapter(Path(place) / name, config, given.rank, TARGETS[given.targets], seed)
        adapters = ",".join(f"{name}={Path(place) / name}" for name in names)
        settings = {"threads": given.threads, "max_model_len": 256, "max_num_seqs": COUNT, "speculate": None}
        settings |= {"enable_prefix_caching": False}
        with LLM(given.file, **settings) as plain, LLM(given.file, adapter=adapters, **settings) as adapted:
            for label, used in cells(names):
                ratios = []
                for _ in range(given.rounds + 1):
                    without = seconds(plain, [None] * len(used), given.new)
                    ratios.append(seconds(adapted, used, given.new) / without)
                low, middle, high = quantiles(ratios[1:], n=4)
                print(f"{label}: {middle:.3f} of plain ({low:.3f}..{high:.3f})", flush=True)


def cells(names: Sequence[str]) -> list[tuple[str, list[str | None]]]:
    """Label and each sequence's adapter of what is measured."""
    return [
        ("1 sequence, base rows", [None]),
        ("8 sequences, base rows", [None] * COUNT),
        ("1 sequence, 1 adapter", [names[0]]),
        ("8 sequences, 1 adapter", [names[0]] * COUNT),
        ("8 sequences, 8 adapters", list(names)),
    ]


if __name__ == "__main__":
    main()
