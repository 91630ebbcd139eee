"""The same tiny models written as GGUF load to the same logits, and give llama.cpp's: the check of name maps and layouts."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from tests.models.feeding import feed
from tests.models.gguf_writer import write_gguf
from tests.models.zoo import CONFIGS, largest_gap, oracle, oracle_logits, prompts

# GGUF has no key for these: a window in some layers only, and gemma's query_pre_attn_scalar.
NOT_IN_GGUF = {"qwen2-window", "gemma3-query-scale", "smollm3-window"}
# llama.cpp does not build these: a window for llama files, biases of qwen3.
NOT_IN_LLAMA_CPP = {"mistral-window", "qwen3-biases-tied"}
WRITTEN = [name for name in CONFIGS if name not in NOT_IN_GGUF]


@pytest.mark.parametrize("name", WRITTEN)
def test_gguf_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = oracle(name)
    model = load_model(GGUFFile(write_gguf(theirs, tmp_path / "model.gguf")))
    batch = prompts(3)
    assert largest_gap(feed(model, batch, "chunks"), oracle_logits(theirs, batch)) <= 1e-4


def test_rows_without_the_permutation_are_seen(tmp_path: Path) -> None:
    """Negative control: a llama file whose q and k were never reordered loads, and gives other logits."""
    theirs = oracle("llama-gqa")
    model = load_model(GGUFFile(write_gguf(theirs, tmp_path / "model.gguf", permute=False)))
    batch = prompts(3)
    assert largest_gap(feed(model, batch, "whole"), oracle_logits(theirs, batch)) > 1e-2


def _peer_python() -> str:
    """An interpreter that has llama-cpp-python: HEADRACE_PEER_PYTHON, or this one."""
    if named := os.environ.get("HEADRACE_PEER_PYTHON"):
        return named
    if find_spec("llama_cpp") is None:
        pytest.skip("needs llama-cpp-python here (extra `peers`) or HEADRACE_PEER_PYTHON naming a Python that has it")
    return sys.executable


@pytest.mark.peers
def test_gguf_gives_the_logits_of_llama_cpp(tmp_path: Path) -> None:
    """All variants in one llama.cpp process, with a float32 KV cache."""
    python = _peer_python()
    batch = prompts(4)
    names = [name for name in WRITTEN if name not in NOT_IN_LLAMA_CPP]
    for name in names:
        write_gguf(oracle(name), tmp_path / f"{name}.gguf")
    (tmp_path / "prompts.json").write_text(json.dumps(batch))
    script = Path(__file__).with_name("llama_cpp_logits.py")
    files = [str(tmp_path / f"{name}.gguf") for name in names]
    subprocess.run([python, str(script), str(tmp_path / "prompts.json"), *files], check=True, timeout=1800)
    gaps = {}
    for name in names:
        ours = feed(load_model(GGUFFile(tmp_path / f"{name}.gguf")), batch, "whole")
        with np.load(tmp_path / f"{name}.npz") as stored:
            theirs = [torch.from_numpy(stored[str(i)]) for i in range(len(batch))]
        gaps[name] = largest_gap(ours, theirs)
    print({name: f"{gap:.1e}" for name, gap in gaps.items()})
    assert {name: gap for name, gap in gaps.items() if gap > llama_cpp_tolerance(name)} == {}


def llama_cpp_tolerance(name: str) -> float:
    """llama.cpp looks GELU up in a table of float16, so models that use it agree to three digits only."""
    return 1e-2 if name.startswith(("gemma3", "gpt2")) else 1e-4
