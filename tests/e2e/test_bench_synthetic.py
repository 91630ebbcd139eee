"""bench synthetic: files of published shapes with random weights, which every reader opens and which run."""

import json
import warnings
from dataclasses import asdict, replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from benchmarks.plan_memory import measure
from headrace import LLM, SamplingParams
from headrace.bench.synthetic import write_synthetic
from headrace.models.configs import read_config
from headrace.models.layers import frequencies
from headrace.startup.fit.headers import PlannedSource, config_of, open_shape
from headrace.startup.fit.sizes import Load, bytes_of
from headrace.weights.gguf import GGUFFile
from headrace.weights.source import WeightError
from tests.cli_shell import Shell
from tests.models import zoo
from tests.models.test_configs import GEMMA3_1B, LLAMA31_8B, QWEN25_05B

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320}


BERT = {"model_type": "bert", "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2,
        "max_position_embeddings": 64, "vocab_size": 320, "type_vocab_size": 2, "layer_norm_eps": 1e-12}  # fmt: skip
# GGUF files of Qwen2 cannot say that upper layers alone have a window.
PARTLY = {**QWEN25_05B, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 12}
# Variants of tests/models/zoo.py whose settings GGUF files of the architecture cannot have.
REFUSED = ("qwen2-window", "smollm3-window", "gemma3-query-scale")


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
        ([config(tmp_path, "bert.json", **BERT)], "bert: shapes of decoders that GGUF files can hold are written"),
        ([config(tmp_path, "window.json", **PARTLY)], "qwen2: the GGUF file of this shape would have another layers"),
    ):
        code, _, err = shell("bench", "synthetic", *arguments, "-o", out)
        assert (code, err.count("\n")) == (1, 1)
        assert message in err
        assert not out.exists()


@pytest.mark.parametrize("name", [name for name in zoo.CONFIGS if name not in REFUSED])
def test_a_file_of_every_family_has_the_config_of_its_shape(name: str, tmp_path: Path) -> None:
    """Windows, rotary scalings, softcaps and multipliers; the file is read by the family, as any other."""
    shape = zoo.CONFIGS[name]()
    shape.vocab_size = 320
    place = config(tmp_path, **shape.to_dict())
    with warnings.catch_warnings(action="error"):  # pairs without rotation have the divisor infinity
        out = write_synthetic(place, tmp_path / "out.gguf", "F32").path
    stored, given = read_config(GGUFFile(out)), read_config(PlannedSource(tmp_path, "safetensors", config_of(place)))
    numbers = [asdict(replace(one, architecture="", layers=())) for one in (stored, given)]
    floats = {key for key, value in numbers[0].items() if isinstance(value, float)}
    assert {key: numbers[0][key] for key in floats} == pytest.approx({key: numbers[1][key] for key in floats}, rel=1e-6)
    assert {**numbers[0], **dict.fromkeys(floats)} == {**numbers[1], **dict.fromkeys(floats)}
    rows = [[(layer.window, layer.heads, layer.kv_heads, layer.ffn) for layer in one.layers] for one in (stored, given)]
    assert rows[0] == rows[1]
    for mine, theirs in zip(stored.layers, given.layers, strict=True):
        assert (mine.rope is None) == (theirs.rope is None)
        if mine.rope is not None and theirs.rope is not None:
            turns = [frequencies(rope, rope.dim or mine.head_dim) for rope in (mine.rope, theirs.rope)]
            np.testing.assert_allclose(*turns, rtol=1e-6)
            assert mine.rope.amplitude == pytest.approx(theirs.rope.amplitude, rel=1e-6)
            assert mine.rope.short == pytest.approx(theirs.rope.short)


@pytest.mark.parametrize("name", REFUSED)
def test_a_shape_that_a_file_would_change_is_refused(name: str, tmp_path: Path) -> None:
    shape = zoo.CONFIGS[name]()
    shape.vocab_size = 320
    with pytest.raises(WeightError, match="would have another"):
        write_synthetic(config(tmp_path, **shape.to_dict()), tmp_path / "out.gguf", "F32")
    assert not (tmp_path / "out.gguf").exists()


SIZES = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 32000}
SHAPES = {
    "llama": {**LLAMA31_8B, **SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8},
    "qwen2": {**QWEN25_05B, **SIZES, "num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 8},
    # The head alone is a third of the plan: its stored pages must not stay next to its packed rows.
    "head": {
        **LLAMA31_8B,
        **SIZES,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "vocab_size": 131072,
    },
    "gemma3": {**GEMMA3_1B, **SIZES, "num_hidden_layers": 8, "sliding_window": 128},
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_process_takes_the_planned_memory(name: str, tmp_path: Path) -> None:
    """Resident memory at its peak, with every sequence at its longest, is within 5 % of the plan. Control: without K/V or
    without buffers the plan is off by more."""
    file = write_synthetic(config(tmp_path, **SHAPES[name]), tmp_path / "out.gguf", "Q8_0").path
    load = Load(context=1024, batch=8 if name != "head" else 1, chunk=512 if name != "head" else 64)
    found, plan = measure(str(file), load), bytes_of(open_shape(str(file)), load)
    assert found.planned == plan.total
    assert abs(found.error) <= 0.05, found
    for part in (plan.weights, plan.kv, plan.buffers, plan.process) if name != "head" else ():
        assert found.peak > 1.05 * (plan.total - part)


@pytest.mark.parametrize("name", ["olmo3", "internlm3", "mistral-no-window", "granite"])
def test_the_plan_of_a_config_is_that_of_its_file(name: str, tmp_path: Path) -> None:
    """Also of families whose GGUF files have another name: the head of a Q4_K_M file is Q6_K there, too."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    changes = {**sizes, "vocab_size": 3000, "tie_word_embeddings": False}
    shape = config(tmp_path, **{**zoo.CONFIGS[name]().to_dict(), **changes})
    file, load = write_synthetic(shape, tmp_path / "out.gguf").path, Load(context=64, batch=1, chunk=64)
    assert bytes_of(open_shape(shape, "Q4_K_M"), load) == bytes_of(open_shape(str(file)), load)
    assert open_shape(shape, "Q4_K_M").architecture == name.partition("-")[0]


def test_a_vocabulary_has_room_for_all_bytes(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="a vocabulary of 100 tokens has no room for 257"):
        write_synthetic(config(tmp_path, **{**LLAMA31_8B, **SMALL, "vocab_size": 100}), tmp_path / "out.gguf")
    assert config_of("smollm2-135m")["num_hidden_layers"] == 30
