"""Folders with 2:4: what compress writes is read back, runs packed, and is the same numbers with their zeros."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from headrace import core
from headrace.compress.containers.folder import FolderPlan
from headrace.compress.pipeline import Pipeline
from headrace.compress.write import compress, prepare
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.text.tokenizer import Tokenizer
from headrace.weights.describe import describe
from headrace.weights.gguf import GGUFFile
from headrace.weights.kinds import KINDS
from headrace.weights.loader import load_model, read_tensor
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes import two_four
from headrace.weights.schemes.folder import QuantizedFolder, open_folder
from headrace.weights.schemes.rows import integer_rows
from headrace.weights.schemes.two_four import TwoFourReader
from headrace.weights.source import TensorInfo, WeightError
from headrace.weights.sparse import DENSE, sparse_parts, spread
from tests.models.feeding import feed
from tests.models.gates import program_of
from tests.models.test_compress import write_folder
from tests.models.zoo import largest_gap
from tests.tiny_files import TEMPLATE, write_tiny_gguf
from tests.tiny_native import Feeder

BATCH = [[5, 6, 7, 8, 9, 300, 11, 4], [3, 399]]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
TWO_OF_FOUR = Pipeline(format="int4-g32-sym", method=("magnitude",), sparsity="2:4")


def as_dense(source: Path, out: Path) -> Path:
    """The folder with its zeros written out in float32: what everyone reads."""
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    read = open_folder(source)
    assert isinstance(read, QuantizedFolder)
    state = {name: read_tensor(read, name) for name in read.names()}
    missing, surplus = model.load_state_dict(state, strict=False)
    assert (set(missing) <= {"lm_head.weight"}, surplus) == (True, [])
    model.save_pretrained(out)
    return out


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["qwen2-tied", "llama-gqa"])
def test_a_folder_of_two_of_four(name: str, bits: int, tmp_path: Path) -> None:
    """It holds what a GGUF file of the dense kind holds, number for number; said by inspect, read back as the same model."""
    source = write_folder(tmp_path / "folder", name)
    pipeline = Pipeline(format=f"int{bits}-g32-sym", method=("magnitude",), sparsity="2:4")
    report = compress(source, tmp_path / "sparse", pipeline)
    dense = compress(
        source, tmp_path / "dense.gguf", Pipeline(format=f"Q{bits}_0", method=("magnitude",), sparsity="2:4", head="F32")
    )
    read = open_folder(tmp_path / "sparse")
    assert isinstance(read, QuantizedFolder)
    sparse = {one for one in read.names() if read.info(one).kind == f"S{bits}"}
    pruned = {one for one in report.matrices if report.matrices[one].zeros is not None}
    assert pruned - sparse == {one for one in pruned if "down_proj" in one}, "whose rows are no multiple of 32"
    assert len(sparse) >= 12
    told = describe(tmp_path / "sparse")
    assert told["quantised"] == f"2:4, {bits} bits, groups of 32"
    assert told["types"][f"S{bits}"] == len(sparse)
    assert report.bytes == (tmp_path / "sparse" / "model.safetensors").stat().st_size
    assert report.zeros is not None
    assert report.zeros >= 0.5
    assert {one.kind for one in dense.matrices.values()} >= {f"Q{bits}_0"}
    ours, theirs = (load_model(one) for one in (read, GGUFFile(tmp_path / "dense.gguf")))
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        for part in ("qkv", "out", "gate_up"):
            assert torch.equal(getattr(layer, part).weight, getattr(other, part).weight), part
        assert torch.equal(layer.down.weight == 0, other.down.weight == 0)
        torch.testing.assert_close(layer.down.weight, other.down.weight, rtol=1e-3, atol=0)  # F16 there
    tokenizers = [Tokenizer.from_folder(tmp_path / each) for each in ("folder", "sparse")]
    assert len({tuple(each.encode("the water of the river")) for each in tokenizers}) == 1
    plain = load_model(SafetensorsFolder(as_dense(tmp_path / "sparse", tmp_path / "plain")))
    assert largest_gap(feed(ours, BATCH, "whole"), feed(plain, BATCH, "whole")) == 0


def test_a_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    """With its vocabulary and chat template; the zeros written out, it writes the same text."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    report = compress(model, tmp_path / "sparse", TWO_OF_FOUR)
    assert len(report.warnings) == 1
    assert (
        "matrices of 32 x 48 cannot be divided into groups of int4-g32-sym: they are written as floats with"
        in report.warnings[0]
    )
    llm, original = (
        LLM(str(path), backend="torch", dtype="float32", max_model_len=64) for path in (tmp_path / "sparse", model)
    )
    assert llm.tokenizer.encode("the water") == original.tokenizer.encode("the water")
    assert open_template(tmp_path / "sparse") == TEMPLATE
    dense = LLM(str(dense_twin(tmp_path / "sparse", tmp_path / "twin")), backend="torch", dtype="float32", max_model_len=64)
    texts = [each.generate(["the water of"], GREEDY)[0].outputs[0].token_ids for each in (llm, dense)]
    assert texts[0] == texts[1]


def open_template(folder: Path) -> str:
    said = json.loads((folder / "tokenizer_config.json").read_text())
    return str(said["chat_template"])


def dense_twin(sparse: Path, out: Path) -> Path:
    as_dense(sparse, out)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(sparse / name, out / name)
    return out


class WithZeros:
    """The same matrices as rows of the dense kinds."""

    def __init__(self, sparse: TwoFourReader) -> None:
        self.sparse, self.summary = sparse, sparse.summary
        self.matrices = {}
        for name, coded in sparse.matrices.items():
            (n, k), kind = coded.info.shape, DENSE[coded.info.kind]
            self.matrices[name] = replace(coded, info=TensorInfo(name, (n, k), kind, n * k // 32 * KINDS[kind].nbytes))

    def rows(self, name: str) -> np.ndarray:
        kind = self.sparse.matrices[name].info.kind
        numbers, indices, scales = sparse_parts(kind, self.sparse.rows(name))
        return integer_rows(DENSE[kind], spread(numbers, indices), scales)

    def columns(self, name: str) -> None:
        pass


@pytest.mark.skipif(not core.available(), reason=core.reason())
@pytest.mark.parametrize("bits", [4, 8])
def test_the_core_runs_it_packed(bits: int, tmp_path: Path) -> None:
    """Logits are bit for bit those of the same numbers with their zeros, in fewer bytes."""
    source = write_folder(tmp_path / "folder", "llama-gqa")
    compress(source, tmp_path / "sparse", Pipeline(format=f"int{bits}-g32-sym", method=("magnitude",), sparsity="2:4"))
    folder = SafetensorsFolder(tmp_path / "sparse")
    scheme = TwoFourReader(folder, {})
    programs = [program_of(QuantizedFolder(folder, each)) for each in (scheme, WithZeros(scheme))]
    ours, dense = (Feeder(program, BATCH).whole() for program in programs)
    assert all(np.array_equal(a.view(np.uint32), b.view(np.uint32)) for a, b in zip(ours, dense, strict=True))
    assert programs[0].weights.bytes < programs[1].weights.bytes


def test_damaged_folders_are_one_line(tmp_path: Path) -> None:
    compress(write_folder(tmp_path / "folder", "llama-gqa"), tmp_path / "sparse", TWO_OF_FOUR)
    weights = tmp_path / "sparse" / "model.safetensors"
    whole = SafetensorsFolder(tmp_path / "sparse")
    name = next(one for one in whole.names() if one.endswith("_index"))
    raw = bytearray(weights.read_bytes())
    at = raw.find(whole.array(name).tobytes())
    assert at > 0
    raw[at] = 0x45
    weights.write_bytes(raw)
    with pytest.raises(WeightError, match="is damaged: indices of four neighbours do not ascend") as found:
        load_model(open_folder(tmp_path / "sparse"))
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (Pipeline(format="Q4_0", method=("magnitude",), sparsity="2:4"), "Q4_0 is a format of GGUF"),
        (Pipeline(format="int4-g32-sym", method=("magnitude",), sparsity="0.5", layout="2:4"), "the layout 2:4 holds two of"),
        (Pipeline(format="int8", method=("magnitude",), sparsity="2:4", layout="2:4"), "the layout 2:4 holds two of"),
    ],
)
def test_other_folders_are_refused(pipeline: Pipeline, message: str, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=message):
        compress(model, tmp_path / "out", pipeline)
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="there exists; give another name"):
        compress(model, tmp_path / "there", TWO_OF_FOUR)
    with pytest.raises(WeightError, match="folders of gpt2 hold matrices by columns"):
        prepare(write_folder(tmp_path / "gpt2", "gpt2"), TWO_OF_FOUR, FolderPlan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpt2", "there", "tiny.gguf"]


def test_an_error_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(two_four, "stored_parts", fail)
    with pytest.raises(OSError, match="no space left"):
        compress(model, tmp_path / "out", TWO_OF_FOUR)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
