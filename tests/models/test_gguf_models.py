"""The same tiny models written as GGUF load to the same logits, and give llama.cpp's: the check of name maps and layouts."""

import json
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES

from headrace.models.families import FAMILIES
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from tests.models.feeding import feed
from tests.models.gguf_writer import ARCHES, RENAMED, write_gguf
from tests.models.test_encoders import IN_GGUF
from tests.models.zoo import CONFIGS, THETA, TWINS, YARN, largest_gap, oracle, oracle_logits, prompts
from tests.places import peer_python

# GGUF has no key for these: a window in some layers only, and gemma's query_pre_attn_scalar.
NOT_IN_GGUF = {"qwen2-window", "gemma3-query-scale", "smollm3-window"}
# llama.cpp does not build these: a window for llama files, biases of qwen3, of ERNIE and of Seed-OSS's attention output.
NOT_IN_LLAMA_CPP = {"mistral-window", "qwen3-biases-tied", "seed_oss-out-bias", "ernie4_5-biases"}
# llama.cpp ignores keys of these files: the window of every phi3 (it says so when it loads one), that of an exaone4 without
# 64 layers, and yarn_beta_fast of arcee and olmo2 (32 is used; it reads that key for mistral3, grok and deepseek2). Without
# windows it rotates q and k in every layer of EXAONE. Its logits are those of these changed models.
YARN_32 = {**YARN, "beta_fast": 32.0}
AS_LLAMA_CPP_READS: dict[str, dict[str, Any]] = {
    "phi3-window": {"sliding_window": None},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 5},
    "arcee-yarn": {"rope_parameters": YARN_32},
    "olmo3-yarn": {"rope_parameters": {"full_attention": YARN_32, "sliding_attention": THETA}},
}
WRITTEN = [name for name in CONFIGS if name not in NOT_IN_GGUF]


@pytest.mark.parametrize("name", WRITTEN)
def test_gguf_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = oracle(name)
    model = load_model(GGUFFile(write_gguf(theirs, tmp_path / "model.gguf")))
    batch = prompts(3)
    assert largest_gap(feed(model, batch, "chunks"), oracle_logits(theirs, batch)) <= 1e-4


def test_a_split_model_gives_the_logits_of_the_whole(tmp_path: Path) -> None:
    theirs = oracle("llama-gqa")
    whole = load_model(GGUFFile(write_gguf(theirs, tmp_path / "model.gguf")))
    (tmp_path / "parts").mkdir()
    first = write_gguf(theirs, tmp_path / "parts" / "model.gguf", part_tensors=7)
    paths = sorted(first.parent.iterdir())
    assert len(paths) > 2
    batch = prompts(3)
    expected = feed(whole, batch, "chunks")
    for path in (first, paths[-1]):  # any part names the model
        assert all(map(torch.equal, feed(load_model(GGUFFile(path)), batch, "chunks"), expected))


def test_rows_without_the_permutation_are_seen(tmp_path: Path) -> None:
    """Negative control: a llama file whose q and k were never reordered loads, and gives other logits."""
    theirs = oracle("llama-gqa")
    model = load_model(GGUFFile(write_gguf(theirs, tmp_path / "model.gguf", permute=False)))
    batch = prompts(3)
    assert largest_gap(feed(model, batch, "whole"), oracle_logits(theirs, batch)) > 1e-2


def llama_cpp_logits(names: Sequence[str], batch: list[list[int]], folder: Path) -> dict[str, list[torch.Tensor]]:
    """Logits of llama.cpp for each FOLDER/NAME.gguf, all in one process; names that it does not open are missing."""
    (folder / "prompts.json").write_text(json.dumps(batch))
    script = Path(__file__).with_name("llama_cpp_logits.py")
    files = [str(folder / f"{name}.gguf") for name in names]
    python = peer_python("llama_cpp")
    subprocess.run([python, str(script), str(folder / "prompts.json"), *files], check=True, timeout=1800)
    logits = {}
    for path in folder.glob("*.npz"):
        with np.load(path) as stored:
            logits[path.stem] = [torch.from_numpy(stored[str(i)]) for i in range(len(batch))]
    return logits


@pytest.mark.peers
def test_gguf_gives_the_logits_of_llama_cpp(tmp_path: Path) -> None:
    """All variants, with a float32 KV cache. One is deep: the only size of EXAONE 4 whose windows llama.cpp reads."""
    batch = prompts(4)
    names = [name for name in WRITTEN if name not in {*NOT_IN_LLAMA_CPP, *AS_LLAMA_CPP_READS}]
    for name in names:
        write_gguf(oracle(name), tmp_path / f"{name}.gguf")
    kinds = [("full" if layer % 4 == 3 else "sliding") + "_attention" for layer in range(64)]
    write_gguf(oracle("exaone4", num_hidden_layers=64, layer_types=kinds), tmp_path / "exaone4-deep.gguf")
    names.append("exaone4-deep")
    for name, (variant, changes) in TWINS.items():
        write_gguf(oracle(variant, **changes), tmp_path / f"{name}.gguf", architecture=name)
        names.append(name)
    theirs = llama_cpp_logits(names, batch, tmp_path)
    assert set(theirs) == set(names)
    ours = {name: feed(load_model(GGUFFile(tmp_path / f"{name}.gguf")), batch, "whole") for name in names}
    gaps = {name: largest_gap(ours[name], theirs[name]) for name in names}
    print({name: f"{gap:.1e}" for name, gap in gaps.items()})
    assert {name: gap for name, gap in gaps.items() if gap > llama_cpp_tolerance(name)} == {}


@pytest.mark.peers
def test_where_llama_cpp_ignores_keys_it_computes_the_model_without_them(tmp_path: Path) -> None:
    """The reason of each difference: its logits equal those of transformers for the changed model, and not for the model."""
    batch = prompts(4)
    for name in AS_LLAMA_CPP_READS:
        write_gguf(oracle(name), tmp_path / f"{name}.gguf")
    theirs = llama_cpp_logits(list(AS_LLAMA_CPP_READS), batch, tmp_path)
    for name, changes in AS_LLAMA_CPP_READS.items():
        assert largest_gap(oracle_logits(oracle(name, **changes), batch), theirs[name]) <= llama_cpp_tolerance(name)
        assert largest_gap(oracle_logits(oracle(name), batch), theirs[name]) > 1e-2


@pytest.mark.peers
def test_without_the_multipliers_minicpm_is_another_model(tmp_path: Path) -> None:
    """Control: the same tensors without them, whose logits are far from those of llama.cpp."""
    batch = prompts(4)
    variant, changes = TWINS["minicpm"]
    theirs = oracle(variant, **changes)
    write_gguf(theirs, tmp_path / "minicpm.gguf", architecture="minicpm")
    made = llama_cpp_logits(["minicpm"], batch, tmp_path)["minicpm"]
    ones = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0)
    for name, value in ones.items():
        setattr(theirs.config, name, value)
    plain = load_model(GGUFFile(write_gguf(theirs, tmp_path / "plain.gguf", architecture="minicpm")))
    assert largest_gap(feed(plain, batch, "whole"), made) > 1e-2


def test_every_architecture_is_compared_with_llama_cpp() -> None:
    """All families that are read from GGUF files: decoders in this file, encoders in test_llama_cpp_encoders."""
    read = {family.gguf_name or name for name, family in FAMILIES.items() if not isinstance(family.gguf, str)}
    written = {ARCHES[CONFIGS[name]().model_type] for name in WRITTEN if name not in NOT_IN_LLAMA_CPP}
    encoders = {ARCHES[name] for name in IN_GGUF if name in ARCHES} | {MODEL_ARCH.GEMMA_EMBEDDING}
    compared = {MODEL_ARCH_NAMES[arch] for arch in written | encoders | {*RENAMED.values()}}
    assert read == compared


PAGE = Path(__file__).resolve().parents[2] / "docs" / "en" / "reference" / "models.md"


def test_the_page_says_what_each_decoder_was_compared_with() -> None:
    """The last column: real weights, or the oracle and llama.cpp where its test has the architecture."""
    compared = {CONFIGS[name]().model_type for name in WRITTEN if name not in NOT_IN_LLAMA_CPP} | {*TWINS}
    rows = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4:
            rows |= dict.fromkeys(re.findall(r"`([\w-]+)`", cells[0]), cells[3])
    kinds = {CONFIGS[name]().model_type for name in CONFIGS} | {*TWINS}
    found = {kind: rows[kind] for kind in kinds if kind in rows}
    assert len(found) > 15
    expected = {kind: "oracle + llama.cpp" if kind in compared else "oracle" for kind in found}
    assert {kind: mark for kind, mark in found.items() if mark not in ("real weights", expected[kind])} == {}


def llama_cpp_tolerance(name: str) -> float:
    """llama.cpp looks GELU up in a table of float16, so models that use it agree to three digits only."""
    return 1e-2 if name.startswith(("gemma", "gpt2")) else 1e-4
