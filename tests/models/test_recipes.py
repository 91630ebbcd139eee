"""Recipes of several methods in one command, as files and as folders; heads and budgets of folders."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.compress import calibration_pass as measured
from headrace.compress.containers.folder import FolderPlan
from headrace.compress.judge import judge
from headrace.compress.report import Report
from headrace.compress.texts import draw_texts, passage_hashes
from headrace.compress.write import compress, prepare, work_path
from headrace.data.params import SamplingParams
from headrace.data.progress import Progress
from headrace.llm import LLM
from headrace.models.registry import read_config
from headrace.startup.opening import open_files
from headrace.training.distil import Healing
from headrace.weights.decode import read_floats
from headrace.weights.describe import describe
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.folder import QuantizedFolder, open_folder
from headrace.weights.source import WeightError
from tests import tiny_files
from tests.killed import each_step, forgetful, killed_at
from tests.models.test_compress import write_folder
from tests.models.test_walk import book, model, pipeline  # noqa: F401

GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
CUTS: dict[str, Any] = {"keep_neurons": 0.5, "kv_heads": 1, "drop_layers": 1}
SMALLER = ("neurons", "kv-heads", "layers")


def opened(path: Path) -> QuantizedFolder:
    found = open_folder(path)
    assert isinstance(found, QuantizedFolder)
    return found


def test_a_smaller_model_as_a_folder_is_that_of_two_commands(model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """Cut and rounded at once, and first cut as a file: the same numbers; and what was cut is told."""
    report = compress(model, tmp_path / "out", pipeline(book, method=SMALLER, format="int4-g32", **CUTS))
    assert [(cut.before, cut.after) for cut in report.cuts] == [(64, 32), (2, 1), (2, 1)]
    assert not work_path(tmp_path / "out").exists()
    compress(model, tmp_path / "cut.gguf", pipeline(book, method=SMALLER, format="F32", **CUTS))
    compress(tmp_path / "cut.gguf", tmp_path / "two", pipeline(book, method=("rtn",), format="int4-g32", calibrate=None))
    one, two = (tmp_path / name / "model.safetensors" for name in ("out", "two"))
    assert one.read_bytes() == two.read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["intermediate_size"], config["num_key_value_heads"], config["num_hidden_layers"]) == (32, 1, 1)
    assert read_config(opened(tmp_path / "out")).layers == read_config(GGUFFile(tmp_path / "cut.gguf")).layers
    assert describe(tmp_path / "out")["compress"] == "neurons,kv-heads,layers int4-g32"
    llm = LLM(str(tmp_path / "out"), max_model_len=64)
    assert len(llm.generate(["the water of"], GREEDY)[0].outputs[0].token_ids) == 4


def test_pruned_rounded_and_two_of_four_in_one_command(model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """neurons, then AWQ's scales, then SparseGPT into the layout 2:4; killed within a cut and within the last walk, the same
    command goes on to the same bytes."""
    method = ("neurons", "awq", "sparsegpt")
    wanted = pipeline(book, method=method, format="int4-g32-sym", sparsity="2:4", keep_neurons=0.5)
    report = compress(model, tmp_path / "whole", wanted)
    assert report.zeros is not None
    assert report.zeros >= 0.5
    assert describe(tmp_path / "whole")["quantised"] == "2:4, 4 bits, groups of 32"
    assert {told.kind for told in report.outputs.values()} == {"int4-g32-sym"}
    for name in opened(tmp_path / "whole").scheme.matrices:
        quads = read_floats(opened(tmp_path / "whole"), name).reshape(-1, 4)
        assert ((quads != 0).sum(1) <= 2).all(), name
    for file in ("layer_0001.safetensors", "0-neurons.gguf", "0-neurons.json", "state.json"):
        killed_at(file, 1, lambda: compress(model, tmp_path / "out", wanted))
    cut = work_path(tmp_path / "out") / "0-neurons.gguf"
    right = cut.read_bytes()
    cut.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    with pytest.raises(WeightError, match=r"0-neurons.gguf is damaged; remove .*out.work to begin again"):
        compress(model, tmp_path / "out", wanted)
    cut.write_bytes(right)
    compress(model, tmp_path / "out", wanted)
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert one.read_bytes() == other.read_bytes()


def test_cut_healed_and_rounded_in_one_command(
    model: Path,  # noqa: F811
    book: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was cut learns; killed within the training, before its file and in the last walk, the same
    command goes on to the same bytes. The control forgets the optimiser's state, and comes to others."""
    each_step(monkeypatch)
    heal: dict[str, Any] = {"heal_steps": 6, "heal_rate": 3e-3, "keep_neurons": 0.5, "format": "int4-g32"}
    wanted = pipeline(book, method=("neurons", "heal", "gptq"), **heal)

    def compress_to(name: str) -> Report:
        return compress(model, tmp_path / name, wanted, healer=Healing())

    report = compress_to("whole")
    healed = report.record()["healed"]
    assert (healed["steps"], healed["tokens"]) == (6, 6 * 4 * 256)
    assert 0 < healed["different"] <= healed["tokens"]
    assert healed["after"]["perplexity"] < 0.9 * healed["before"]["perplexity"]
    assert set(passage_hashes(draw_texts(open_files(model), str(book), 1024, 0, Progress()))) < set(report.passages)
    for file, count in (("checkpoint.safetensors", 3), ("healed.gguf", 1), ("heal.json", 1), ("layer_0001.safetensors", 1)):
        killed_at(file, count, lambda: compress_to("out"))
    compress_to("out")
    whole, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "out"))
    assert other == whole
    killed_at("checkpoint.safetensors", 3, lambda: compress_to("forgetful"))
    forgetful(monkeypatch)
    compress_to("forgetful")
    assert (tmp_path / "forgetful" / "model.safetensors").read_bytes() != whole


def test_a_healed_file_is_the_healed_model(model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """As float32, trained on its own texts, beside the file that was only cut: nearer to the original, on others, too."""
    lost, fresh = [], [[*range(1, 200)], [*range(100, 299)]]
    for method, more in ((("layers", "heal"), {"heal_steps": 12, "heal_rate": 1e-2}), (("layers",), {})):
        out = tmp_path / f"{len(lost)}.gguf"
        wanted = pipeline(book, method=method, drop_layers=1, format="F32", calibrate="self", tokens=512, **more)
        report = compress(model, out, wanted, healer=Healing())
        if report.healed is not None:
            assert report.healed.after.kl < 0.8 * report.healed.before.kl
        lost.append(judge(GGUFFile(model), GGUFFile(out), fresh, "").kl)
        assert GGUFFile(out).metadata["headrace.compress"].startswith(",".join(method))
    assert lost[0] < 0.9 * lost[1]
    with pytest.raises(ValueError, match=r"the method heal needs a trainer: pass healer=Healing\(\)"):
        compress(model, tmp_path / "x.gguf", pipeline(book, method=("layers", "heal"), drop_layers=1, heal_steps=1))


def test_a_cut_folder_keeps_its_tokenizer_and_settings(book: Path, tmp_path: Path) -> None:  # noqa: F811
    """Qwen2 with biases and a tied head: what stays a float has the format it had, config.json all that no size is."""
    source = write_folder(tmp_path / "folder", "qwen2-tied")
    wanted = pipeline(book, method=("kv-heads", "gptq"), kv_heads=1, format="int4-g32", tokens=512)
    predicted = prepare(source, wanted, FolderPlan).report
    report = compress(source, tmp_path / "out", wanted)
    assert (report.bytes, set(report.matrices)) == (predicted.bytes, set(predicted.matrices))
    before, after = SafetensorsFolder(source), opened(tmp_path / "out")
    table = "model.embed_tokens.weight"
    assert before.info(table) == after.info(table)
    assert np.array_equal(before.raw(table), after.raw(table))
    was, now = (json.loads((path / "config.json").read_text()) for path in (source, tmp_path / "out"))
    changed = {key for key in was if was[key] != now.get(key)}
    assert {"num_key_value_heads"} <= changed <= {"num_key_value_heads", "torch_dtype", "dtype", "head_dim", "layer_types"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    load_model(after)


def test_scales_zeros_and_the_loop_in_one_walk(model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """awq,wanda,gptq: half of the weights are 0, norms have the scales, and the loop gains on rounding to nearest. The control:
    scales that are not undone in the norms are another model."""
    errors = []
    for method in (("awq", "wanda", "gptq"), ("awq", "wanda")):
        out = tmp_path / f"{len(method)}.gguf"
        report = compress(model, out, pipeline(book, method=method, sparsity="2:4"))
        assert report.zeros is not None
        assert report.zeros >= 0.5
        norms = [GGUFFile(path).raw("blk.1.ffn_norm.weight") for path in (model, out)]
        assert not np.array_equal(*norms)
        errors.append(sum(told.error for told in report.outputs.values()))
    assert errors[0] < 0.9 * errors[1]

    def planted(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.0.ffn_norm.weight"][[3, 17]] *= 40
        for name in ("gate", "up"):
            tensors[f"blk.0.ffn_{name}.weight"][:, [3, 17]] /= 40

    source = tiny_files.write_tiny_gguf(tmp_path / "planted.gguf", edit=planted, sizes=tiny_files.Sizes(ffn=64))
    lost, right = [], measured.PassOutput.changed
    for changed in (right, lambda self, target: right(self, target) and "norm" not in target):
        out = tmp_path / f"{len(lost)}.gguf"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(measured.PassOutput, "changed", changed)
            compress(source, out, pipeline(book, method=("awq", "wanda"), sparsity="0.05", format="Q8_0"))
        lost.append(judge(GGUFFile(source), GGUFFile(out), [[*range(1, 200)], [*range(100, 299)]], "").kl)
    assert lost[1] > 1.5 * lost[0]


@pytest.mark.parametrize("name", ["qwen2-tied", "llama-gqa"])
def test_a_head_of_integers(name: str, tmp_path: Path) -> None:
    """Of a tied head the table of tokens: each number the nearest, named in config.json; the others are as without it."""
    source = write_folder(tmp_path / "folder", name)
    plain, wanted = (pipeline(source, method=("rtn",), format="int4-g32", head=head, calibrate=None) for head in (None, "int8"))
    compress(source, tmp_path / "plain", plain)
    report = compress(source, tmp_path / "out", wanted)
    table = "lm_head" if name == "llama-gqa" else "model.embed_tokens"
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert [group["targets"] for group in config["config_groups"].values()][1:] == [[table]]
    assert ("lm_head" in config["ignore"]) == (name != "llama-gqa")
    one, other = opened(tmp_path / "plain"), opened(tmp_path / "out")
    assert f"{table}.weight" in other.scheme.matrices
    for tensor in one.names():
        apart = np.abs(read_floats(one, tensor) - read_floats(other, tensor)).max()
        assert (apart > 0) == (tensor == f"{table}.weight"), tensor
        assert apart < 0.02 * np.abs(read_floats(one, tensor)).max()
    assert report.matrices[f"{table}.weight"].kind == "int8"
    assert len(LLM(str(tmp_path / "out"), max_model_len=64).generate(["the water of"], GREEDY)[0].outputs[0].token_ids) == 4


def test_bytes_go_where_they_take_most_error_away(model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """More bytes, less error; no more than was allowed; and a budget for everything gives 8 bits to all."""
    found, sizes = [], []
    for name in ("int4-g32", "int8"):
        predicted = prepare(model, pipeline(book, format=name, method=("rtn",), calibrate=None), FolderPlan).report
        sizes.append(sum(one.nbytes for one in predicted.matrices.values()))
    for budget in (sizes[0], sum(sizes) // 2, sizes[1] + 999):
        out = tmp_path / str(budget)
        report = compress(model, out, pipeline(book, format="int4-g32", budget=budget, method=("gptq",)))
        assert sum(one.nbytes for one in report.matrices.values()) <= budget
        kinds = {told.kind for told in report.outputs.values()}
        found.append((kinds, sum(told.error for told in report.outputs.values())))
        assert read_config(open_files(out).source).num_layers == 2
        load_model(opened(out))
    assert [sorted(kinds) for kinds, _ in found] == [["int4-g32"], ["int4-g32", "int8"], ["int8"]]
    assert found[0][1] > found[1][1] > found[2][1]
