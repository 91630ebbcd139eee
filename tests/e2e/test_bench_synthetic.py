"""bench synthetic: files of published shapes with random weights, which every reader opens and which run."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace import LLM, SamplingParams
from headrace.bench.synthetic import write_synthetic
from headrace.startup.fit.headers import config_of, open_shape
from headrace.weights.gguf import GGUFFile
from headrace.weights.source import WeightError
from tests.cli_shell import Shell
from tests.models.test_configs import GEMMA3_1B, LLAMA31_8B, QWEN25_05B

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}


def config(tmp_path: Path, name: str = "config.json", **settings: object) -> str:
    path = tmp_path / name
    path.write_text(json.dumps(settings))
    return str(path)


@pytest.mark.parametrize("weights", ["Q4_K_M", "Q4_0", "Q8_0", "BF16"])
def test_a_small_shape_runs(tmp_path: Path, weights: str) -> None:
    shape, out = config(tmp_path, **{**LLAMA31_8B, **SMALL, "num_hidden_layers": 3}), tmp_path / "out.gguf"
    written = write_synthetic(shape, out, weights)
    assert out.stat().st_size == written.bytes
    names = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}  # another reader
    assert names["rope_freqs.weight"] == "F32"
    assert names["blk.2.ffn_gate.weight"] == ("Q4_K" if weights == "Q4_K_M" else weights)
    with LLM(out, max_model_len=64, threads=1) as llm:
        (output,) = llm.generate(["mill"], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0))
    assert len(output.outputs[0].token_ids) == 4


def test_the_file_takes_what_the_planner_predicts_of_its_shape(tmp_path: Path) -> None:
    """A published shape, cut to one layer; also the weights differ from tensor to tensor, and not from run to run."""
    shape = config(tmp_path, **{**QWEN25_05B, "num_hidden_layers": 1, "max_window_layers": 1})
    first, again, other = (write_synthetic(shape, tmp_path / f"{at}.gguf", "Q4_0", seed=at // 2).path for at in range(3))
    assert first.read_bytes() == again.read_bytes() != other.read_bytes()
    predicted, stored = open_shape(shape, "Q4_0"), open_shape(str(first))
    assert (stored.stored, stored.layers) == (predicted.stored, predicted.layers)
    file = GGUFFile(first)
    assert not np.array_equal(file.raw("blk.0.attn_q.weight")[0], file.raw("blk.0.ffn_gate.weight")[0])


def test_the_command_and_what_it_refuses(shell: Shell, tmp_path: Path) -> None:
    shape, out = config(tmp_path, **{**LLAMA31_8B, **SMALL}), tmp_path / "out.gguf"
    code, _, err = shell("bench", "synthetic", shape, "-o", out, "--layers", 2, "--weights", "q8_0")
    assert code == 0
    assert "llama, 2 layers of 256" in err
    assert GGUFFile(out).metadata["llama.block_count"] == 2
    out.unlink()
    for arguments, message in (
        ([tmp_path / "missing"], "missing is no shape; give a name of the catalog, a config.json, or a folder with one"),
        ([shape, "--weights", "Q9"], "--weights Q9: unknown number format"),
        ([shape, "--weights", "G4_128"], "--weights G4_128: G4_128 cannot be written"),
        ([config(tmp_path, "gemma.json", **GEMMA3_1B)], "not written as GGUF"),
    ):
        code, _, err = shell("bench", "synthetic", *arguments, "-o", out)
        assert (code, err.count("\n")) == (1, 1)
        assert message in err
        assert not out.exists()


def test_a_vocabulary_has_room_for_all_bytes(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="a vocabulary of 100 tokens has no room for 257"):
        write_synthetic(config(tmp_path, **{**LLAMA31_8B, **SMALL, "vocab_size": 100}), tmp_path / "out.gguf")
    assert config_of("smollm2-135m")["num_hidden_layers"] == 30
