"""Folders of integers: what compress writes is what was rounded, runs packed, goes on where it was stopped."""

import json
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headrace import core
from headrace.compress import plan
from headrace.compress.containers import folder as folders
from headrace.compress.containers.folder import FolderPlan
from headrace.compress.grids.targets import target
from headrace.compress.layouts import grouped
from headrace.compress.pipeline import Pipeline
from headrace.compress.work_folder import WorkFolder
from headrace.compress.write import compress, prepare, work_path
from headrace.data.params import SamplingParams
from headrace.llm import LLM
from headrace.training.sequence_forward import run_sequence
from headrace.weights.decode import dequantize_numpy, read_floats
from headrace.weights.describe import describe
from headrace.weights.imatrix import read_imatrix
from headrace.weights.loader import load_model, read_tensor
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.schemes.folder import QuantizedFolder, open_folder
from headrace.weights.source import WeightError
from tests.models.test_compress import write_folder
from tests.models.test_compress_encoder import write_lines
from tests.models.test_static_scales import rounded_model
from tests.models.test_walk import book, model, pipeline  # noqa: F401
from tests.tiny_bert import write_tiny_bert

GREEDY = SamplingParams(max_tokens=6, temperature=0.0)
ROUNDED = [  # format, layout, what inspect says
    ("int4-g32", None, "compressed-tensors, 4 bits, groups of 32"),
    ("int4-g64-sym", None, "compressed-tensors, 4 bits, a scale a row"),  # rows of 64
    ("int8", None, "compressed-tensors, 8 bits, a scale a row"),
    ("w8a8", None, "compressed-tensors, 8 bits, a scale a row"),
    ("int4-g32-sym", "gptq", "GPTQ, 4 bits, groups of 32"),
    ("int4-g32", "awq", "AWQ, 4 bits, groups of 32"),
    ("int3-g32", "gptq", "GPTQ, 3 bits, groups of 32"),
    ("int6-g32", None, "compressed-tensors, 6 bits, groups of 32"),
    ("mxfp4", None, "compressed-tensors, MXFP4"),
    ("nvfp4", None, "compressed-tensors, NVFP4 as bfloat16"),
]


def opened(path: Path) -> QuantizedFolder:
    found = open_folder(path)
    assert isinstance(found, QuantizedFolder)
    return found


@pytest.mark.parametrize(("number_format", "layout", "said"), ROUNDED)
def test_each_number_is_the_nearest_of_its_grid(number_format: str, layout: str | None, said: str, tmp_path: Path) -> None:
    """Of a folder with biases and a tied head: matrices of whole groups are rounded, all else is as it was, which is said."""
    source = write_folder(tmp_path / "folder", "qwen2-tied")
    wanted = Pipeline(format=number_format, layout=layout, threads=1)
    report = compress(source, tmp_path / "out", wanted)
    assert prepare(source, wanted, FolderPlan).report.bytes == report.bytes
    assert report.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    before, after = SafetensorsFolder(source), opened(tmp_path / "out")
    rounded = {name for name in after.names() if name in after.scheme.matrices}
    assert rounded
    for name in after.names():
        expected = read_floats(before, name)
        if name in rounded:
            to = target(number_format)
            expected = dequantize_numpy(to.encode(expected).reshape(-1), to.kind).reshape(expected.shape)
        assert np.array_equal(read_floats(after, name), expected), name
    whole = {name for name in after.names() if "proj.weight" in name} - rounded
    assert bool(whole) == any("cannot be divided into groups" in line for line in report.warnings)
    told = describe(tmp_path / "out")
    assert (told["quantised"], told["compress"]) == (said, f"rtn {number_format}")
    assert told["activations"] == ("token" if number_format == "w8a8" else None)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert ("input_activations" in str(config) and config["config_groups"]["group_0"]["input_activations"] is not None) == (
        number_format == "w8a8"
    )
    llm = LLM(str(tmp_path / "out"), max_model_len=64)
    assert len(llm.generate(["the water of"], GREEDY)[0].outputs[0].token_ids) == 6
    assert llm.backend == ("native" if core.available() else "torch")


@pytest.mark.parametrize("method", [("gptq",), ("awq", "gptq"), ("awq",)])
def test_calibrated_codes_are_written_exactly(method: tuple[str, ...], model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """To the bit: matrices as the walk coded them, norms with what was folded into them; less is lost than to nearest."""
    out = tmp_path / "out.v1"
    wanted = pipeline(book, method=method, format="int4-g32", layout="gptq", keep_work=True, judge="self")
    report = compress(model, out, wanted)
    work, read = WorkFolder(work_path(out)), load_model(open_folder(out))
    kinds = work.about(1)["kinds"]
    for part, rows in zip(("q", "k", "v"), read.layers[1].qkv.weight.split(read.layers[1].qkv.sizes), strict=True):
        name = f"layers.1.qkv.{part}.weight"
        coded = dequantize_numpy(work.tensor(1, name).reshape(-1), kinds[name]).reshape(rows.shape)
        assert np.array_equal(rows.numpy(), coded), name
    if "awq" in method:
        assert np.array_equal(read.layers[1].mlp_norm.weight.numpy(), work.tensor(1, "layers.1.mlp_norm.weight"))
    errors = [sum(getattr(told, name) for told in report.outputs.values()) for name in ("error", "nearest")]
    assert errors[0] < (0.9 if "gptq" in method else 1.01) * errors[1]
    assert {told.kind for told in report.outputs.values()} == {"int4-g32"}
    assert report.judged is not None
    said = json.loads((tmp_path / "out.v1.report.json").read_text())
    assert said["judged"]["kl"] == report.judged.kl
    assert describe(out)["compress"] == f"{','.join(method)} int4-g32"


def test_a_stopped_compression_resumes(model: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """After a full disk: the layers are not made again, and the bytes are those of a run that was not stopped."""
    wanted = pipeline(book, format="int8", write_imatrix=tmp_path / "i.gguf")
    compress(model, tmp_path / "whole", wanted)
    assert "blk.1.ffn_down.weight" in read_imatrix(tmp_path / "i.gguf")

    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_safetensors", full)
        with pytest.raises(OSError, match="no space left"):
            compress(model, tmp_path / "out", wanted)
    assert not (tmp_path / "out").exists()
    assert WorkFolder(work_path(tmp_path / "out")).done == 2
    with pytest.raises(WeightError, match="was started with other settings"):
        compress(model, tmp_path / "out", pipeline(book, format="int4-g32"))
    with monkeypatch.context() as patch:
        patch.setattr(WorkFolder, "finish_layer", full)
        compress(model, tmp_path / "out", wanted)
    assert not work_path(tmp_path / "out").exists()
    one, other = (tmp_path / name / "model.safetensors" for name in ("whole", "out"))
    assert one.read_bytes() == other.read_bytes()


def test_two_of_four_that_texts_chose(model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """The folder 2:4 holds what the GGUF file of the same command holds."""
    chosen: dict[str, Any] = {"method": ("sparsegpt",), "sparsity": "2:4"}
    report = compress(model, tmp_path / "out", pipeline(book, format="int4-g32-sym", **chosen))
    assert report.zeros is not None
    assert report.zeros >= 0.5
    assert describe(tmp_path / "out")["quantised"] == "2:4, 4 bits, groups of 32"
    with pytest.raises(ValueError, match="the layout 2:4 holds two of each four weights"):
        compress(model, tmp_path / "two", pipeline(book, format="int4-g32-sym", layout="2:4"))
    compress(model, tmp_path / "dense", pipeline(book, format="int4-g32-sym", layout="compressed", **chosen))
    for name in opened(tmp_path / "dense").scheme.matrices:
        one, two = (read_tensor(open_folder(tmp_path / path), name) for path in ("out", "dense"))
        assert torch.equal(one, two), name


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"format": "Q4_K_M"}, "Q4_K_M is a format of GGUF: give a name that ends in .gguf"),
        ({"format": "nf4"}, "nf4 cannot be written to a folder"),
        ({"format": "int4-g96"}, "rows of 32, 64 numbers cannot be divided into groups of int4-g96"),
        ({"layout": "marlin"}, "unknown layout 'marlin'; known are compressed, gptq, awq, 2:4"),
        ({"layout": "awq", "format": "int8"}, "the layout awq holds 4 bits, and int8 has 8"),
        ({"layout": "gptq", "format": "int5-g32"}, "the layout gptq holds 2, 3, 4, 8 bits, and int5-g32 has 5"),
        ({"format": "w8a8-static"}, "w8a8-static measures inputs on texts: choose a --method that reads them"),
        ({"layout": "gptq", "format": "w8a8"}, "the layout gptq says nothing of activations"),
        ({"head": "Q8_0"}, "Q8_0 cannot be written to a folder; choose int4-g128"),
        ({"head": "int4-g96"}, "the head's rows of 32 numbers cannot be divided into groups of int4-g96"),
        ({"head": "int8", "layout": "gptq"}, "the layout gptq holds integers of one format: leave --head out"),
        (
            {"budget": 10**6, "method": ("gptq",), "layout": "awq"},
            "the layout awq holds integers of one format: leave --budget",
        ),
        ({"layout": "gptq", "format": "nvfp4"}, "the layout gptq has integers, and nvfp4 has none: leave --layout out"),
        ({"budget": 10**6, "format": "mxfp4"}, "--budget chooses between integers of 4 and 8 bits, and mxfp4 has none"),
        ({"budget": 10**6, "format": "int8"}, "--budget chooses between 4 and 8 bits, and int8 has 8"),
        ({"budget": 10}, "10 bytes are too few: with the fewest bits all tensors take"),
    ],
)
def test_invalid_options_are_a_one_line_error(changes: dict[str, Any], line: str, model: Path, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=line) as found:
        compress(model, tmp_path / "out", Pipeline(**{"format": "int4-g32", **changes}))
    assert "\n" not in str(found.value)
    with pytest.raises(ValueError, match="--layout applies to folders"):
        compress(model, tmp_path / "out.gguf", Pipeline(format="Q4_0", layout="gptq"))
    assert not list(tmp_path.iterdir())


@pytest.mark.peers
@pytest.mark.parametrize(
    ("number_format", "head"),
    [
        ("int4-g32", None),
        ("int4-g32-sym", None),
        ("int8", None),
        ("w8a8", None),
        ("int3-g32", None),
        ("int5-g32-sym", None),
        ("int4-g32", "int8"),
        ("w8a8", "int4-g32"),
        ("mxfp4", None),
        ("nvfp4", "int8"),
    ],
)
def test_compressed_tensors_decompresses_it_alike(
    number_format: str,
    head: str | None,
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Its own code, by its own reading of config.json, in float32."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra dev)")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    compress(model, tmp_path / "out", Pipeline(format=number_format, head=head, threads=1))
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(said)
    ours, tensors = opened(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    for name in ours.scheme.matrices:
        matrix = name.removesuffix("weight")
        fields = {key.removeprefix(matrix): value for key, value in tensors.items() if key.startswith(matrix)}
        if fields["weight_scale"].dtype != torch.uint8:  # powers of two stay what they are
            fields["weight_scale"] = fields["weight_scale"].float()
        groups = config.config_groups.values()
        scheme = next(group for group in groups if "Linear" in group.targets or matrix.removesuffix(".") in group.targets)
        compressor = BaseCompressor.get_value_from_registry(scheme.format)
        theirs = compressor.decompress(fields, scheme)["weight"].float()
        assert np.array_equal(theirs.numpy(), read_floats(ours, name)), name


@pytest.mark.parametrize(
    ("number_format", "method", "head"),
    [
        ("int3-g32-sym", "rtn", None),
        ("int4-g32-sym", "gptq", None),
        ("int4-g32-sym", "rtn", "int8"),
        ("int5-g32-sym", "rtn", None),
        ("int6-row-sym", "rtn", None),
        ("int8", "rtn", "int8"),
        ("w8a8", "awq", None),
        ("w8a8-static", "smoothquant,rtn", None),
        ("mxfp4", "rtn", None),
        ("nvfp4", "rtn", None),
        ("nvfp4", "rtn", "int8"),
    ],
)
def test_transformers_opens_the_folder_as_a_whole(
    number_format: str,
    method: str,
    head: str | None,
    model: Path,  # noqa: F811
    book: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """By `from_pretrained` alone: its config, names and integers give our reader's logits. The control: one other scale.

    compressed-tensors makes bfloat16 of E2M1 at each product, so these are opened in bfloat16."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra dev)")
    out, text = tmp_path / "out", list(range(5, 200, 7))
    compress(model, out, pipeline(book, method=method.split(","), format=number_format, head=head, tokens=256))
    if number_format.startswith("w8a8"):  # compare weights alone: inputs are rounded in other orders of sums
        config = json.loads((out / "config.json").read_text())
        config["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
        (out / "config.json").write_text(json.dumps(config))
    ours, narrow = load_model(open_folder(out)), "fp4" in number_format

    def gap() -> float:
        dtype = torch.bfloat16 if narrow else torch.float32
        theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=dtype).eval()
        with torch.inference_mode():
            expected, found = theirs(torch.tensor([text])).logits[0], ours.head(run_sequence(ours, text).rows)
        return float((found - expected).abs().mean() / expected.std())

    bound = 2e-2 if narrow else 1e-5
    assert gap() < bound
    change_scale(out, "model.layers.1.mlp.down_proj.weight_scale")
    assert gap() > 2 * bound


def test_transformers_rounds_inputs_by_the_folders_scales(model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """Its logits are nearer to those of our rounding than to those of inputs that are not rounded, the control."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra dev)")
    out, text = tmp_path / "out", list(range(5, 200, 7))
    compress(model, out, pipeline(book, method=("smoothquant", "rtn"), format="w8a8-static"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = theirs(torch.tensor([text])).logits[0]
        models = rounded_model(out, "tensor"), load_model(open_folder(out))
        rounded, plain = (read.head(run_sequence(read, text).rows) for read in models)
    assert float((rounded - expected).abs().mean()) < 0.4 * float((plain - expected).abs().mean())


def change_scale(folder: Path, name: str) -> None:
    """Make the scales of a matrix 1.5 times as large, or 2 times if they are powers of two."""
    tensors = load_file(folder / "model.safetensors")
    scale = tensors[name]
    tensors[name] = scale + 1 if scale.dtype == torch.uint8 else (scale.float() * 1.5).to(scale.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("number_format", ["mxfp4", "nvfp4"])
def test_transformers_makes_floats_of_e2m1_exactly(number_format: str, model: Path, tmp_path: Path) -> None:  # noqa: F811
    """With `dequantize`, in float32. Without it float32 is refused at the first product."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra dev)")
    out, text = tmp_path / "out", list(range(5, 200, 7))
    compress(model, out, Pipeline(format=number_format, threads=1))
    ours = load_model(open_folder(out))
    settings = transformers.CompressedTensorsConfig(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, quantization_config=settings)
    with torch.inference_mode():
        expected, found = theirs(torch.tensor([text])).logits[0], ours.head(run_sequence(ours, text).rows)
        assert float((found - expected).abs().mean() / expected.std()) < 1e-5
        packed = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        with pytest.raises(RuntimeError, match="same dtype"):
            packed(torch.tensor([text]))


@pytest.mark.parametrize(("number_format", "method"), [("int8", "rtn"), ("int4-g32-sym", "gptq")])
def test_transformers_opens_the_folder_of_an_encoder(number_format: str, method: str, tmp_path: Path) -> None:
    """Rows of the last layer are those of our reader. The control: one other scale."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra dev)")
    lines, out, text = write_lines(tmp_path / "lines.txt", 1), tmp_path / "out", [2, 4, 5, 9, 12, 3]
    calibrate = {"method": (method,), "calibrate": str(lines), "tokens": 512} if method == "gptq" else {}
    compress(write_tiny_bert(tmp_path / "bert"), out, Pipeline(format=number_format, threads=1, **calibrate))
    ours = load_model(open_folder(out))

    def gap() -> float:
        theirs = transformers.AutoModel.from_pretrained(out, dtype=torch.float32).eval()
        with torch.inference_mode():
            expected, found = theirs(torch.tensor([text])).last_hidden_state[0], run_sequence(ours, text).rows
        return float((found - expected).abs().mean() / expected.std())

    assert gap() < 1e-5
    change_scale(out, next(name for name in load_file(out / "model.safetensors") if name.endswith("weight_scale")))
    assert gap() > 1e-3


def test_transformers_does_not_read_zero_points_and_two_of_four(model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """As docs/en/reference/formats.md says: packed zero points are refused; the layout 2:4 is Headrace's own, and transformers
    warns and takes random weights."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra dev)")
    compress(model, tmp_path / "points", Pipeline(format="int4-g32", threads=1))
    compress(model, tmp_path / "three", Pipeline(format="int3-g32", threads=1))
    for name in ("points", "three"):
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
    sparse = pipeline(book, method=("sparsegpt",), format="int4-g32-sym", sparsity="2:4", tokens=256)
    compress(model, tmp_path / "sparse", sparse)
    found: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sparse", output_loading_info=True)
    assert "model.layers.0.mlp.up_proj.weight" in found[1]["missing_keys"]


@pytest.mark.parametrize(("number_format", "head"), [("int4-g32", "int8"), ("nvfp4", "mxfp4")])
def test_a_head_without_calibration_is_written(
    number_format: str,
    head: str,
    model: Path,  # noqa: F811
    book: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    report = compress(model, tmp_path / "out", pipeline(book, method=("gptq",), format=number_format, head=head))
    assert {each.kind for each in report.matrices.values()} >= {number_format, head}
    errors = [sum(getattr(told, name) for told in report.outputs.values()) for name in ("error", "nearest")]
    assert errors[0] < errors[1]
    assert f" {number_format}" in str(describe(tmp_path / "out")["compress"])


@pytest.mark.parametrize("chunk", [1 << 16, 1 << 23])
def test_a_large_head_takes_its_numbers_and_its_rows(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Besides the numbers, which are made outside, there are rows of int8 and what a chunk needs; of one chunk, the control,
    there are squares in double."""
    values = np.ones((4096, 1024), np.float32)
    monkeypatch.setattr(FolderPlan, "values", lambda plan, name: values)
    monkeypatch.setattr(plan, "CHUNK", chunk)
    blank: Any = SimpleNamespace()
    head = FolderPlan(
        original=blank,
        opened=blank,
        pipeline=Pipeline(format="int4-g32", threads=1),
        stored={"lm_head.weight": [cast(Any, SimpleNamespace(target="output.weight", stored=values.shape))]},
        read={},
        importance={},
        formats={"lm_head.weight": "int8"},
        report=blank,
        layouts={"lm_head.weight": grouped("int8")},
    )
    tracemalloc.start()
    try:
        rows, lost, energy, _ = head.all_rows("lm_head.weight")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(rows) == 4096
    assert lost < 1e-6 * energy
    assert (peak < rows.nbytes + 2 * values.size) == (chunk < values.size)


@pytest.mark.peers
@pytest.mark.parametrize(
    ("number_format", "layout"),
    [("int4-g32", "awq"), ("int4-g32-sym", "gptq"), ("int4-g32", "gptq"), ("int3-g32", "gptq"), ("int8", "gptq")],
)
def test_auto_round_reads_the_layouts_gptq_and_awq_alike(
    number_format: str,
    layout: str,
    model: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Its own linear layer (GPTQ) and dequantization (AWQ), in float32. The control: one changed word of packed integers."""
    pytest.importorskip("auto_round", reason="auto-round is not installed")
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch.qlinear_torch import QuantLinear

    def read(fields: dict[str, torch.Tensor]) -> np.ndarray:
        scales = fields["scales"].float()
        if layout == "awq":
            width = len(fields["qweight"])
            return dequantize_gemm(fields["qweight"], fields["qzeros"], scales, 4, width // len(scales)).numpy().T
        bits = 8 if number_format == "int8" else int(number_format[3])
        width = len(fields["qweight"]) * 32 // bits
        layer = QuantLinear(bits, width // len(scales), width, scales.shape[1], False)
        # Groups are static, so `g_idx` counts them in order, and the layer does without.
        assert fields["g_idx"].tolist() == [at * len(scales) // width for at in range(width)]
        layer.qweight, layer.qzeros, layer.scales = fields["qweight"], fields["qzeros"], scales
        return layer(torch.eye(width)).numpy().T

    compress(model, tmp_path / "out", Pipeline(format=number_format, layout=layout, threads=1))
    ours, tensors = opened(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    assert ours.scheme.matrices
    for name in ours.scheme.matrices:
        matrix = name.removesuffix("weight")
        fields = {key.removeprefix(matrix): value for key, value in tensors.items() if key.startswith(matrix)}
        assert np.array_equal(read(fields), read_floats(ours, name)), name
        fields["qweight"] = fields["qweight"] ^ 1
        assert not np.array_equal(read(fields), read_floats(ours, name)), name
