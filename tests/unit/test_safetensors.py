"""Hugging Face folders: whole ones, sharded ones, lying ones, pickled ones."""

import json
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.startup.opening import open_model
from headrace.weights.loader import read_tensor
from headrace.weights.safetensors import SafetensorsFolder
from headrace.weights.source import TensorInfo, WeightError
from tests.tiny_bert import write_tiny_bert
from tests.unit.gguf_bytes import damaged

CONFIG = {"model_type": "llama", "rope_theta": 1e4, "limit": float("inf")}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 6, generator=generator)
    return {"a": values, "b": values.to(torch.bfloat16), "c": values.to(torch.float16), "d": torch.tensor(2.5)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def single(folder: Path) -> Path:
    save_file(tensors(), folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(folder: Path) -> Path:
    """a and b in the first shard, c and d in the second."""
    content = tensors()
    names = {"a": 1, "b": 1, "c": 2, "d": 2}
    files = {name: f"model-{part:05}-of-00002.safetensors" for name, part in names.items()}
    for file in set(files.values()):
        save_file({name: content[name] for name in files if files[name] == file}, folder / file)
    write_index(folder, files)
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_lie(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    content = struct.pack("<Q", len(raw) if length is None else length) + raw + data
    (folder / "model.safetensors").write_bytes(content)


@pytest.mark.parametrize("kind", ["single", "sharded"])
def test_every_tensor_round_trips(kind: str, request: pytest.FixtureRequest) -> None:
    source = SafetensorsFolder(request.getfixturevalue(kind))
    assert sorted(source.names()) == ["a", "b", "c", "d"]
    assert source.config == CONFIG
    assert len(source.files) == (1 if kind == "single" else 2)
    for name, tensor in tensors().items():
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            torch.testing.assert_close(read_tensor(source, name, dtype), tensor.to(dtype), rtol=0, atol=0)


def test_info_and_raw_are_by_rows(single: Path) -> None:
    source = SafetensorsFolder(single)
    assert source.info("b") == TensorInfo("b", (4, 6), "BF16", 48)
    assert source.info("d") == TensorInfo("d", (), "F32", 4)
    rows = source.raw("b")
    assert rows.shape == (4, 12)
    assert rows.dtype == np.uint8
    assert not rows.flags.writeable
    assert rows.tobytes() == tensors()["b"].view(torch.uint8).numpy().tobytes()
    assert source.raw("d").shape == (1, 4)


def test_read_rows_outlive_the_folder(single: Path) -> None:
    with SafetensorsFolder(single) as source:
        rows = source.raw("a")
    assert rows.tobytes() == tensors()["a"].numpy().tobytes()
    with pytest.raises(WeightError, match="there is no tensor 'a'"):
        source.raw("a")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn], ids=str)
def test_other_types_are_listed_and_refused_by_name(folder: Path, dtype: torch.dtype) -> None:
    save_file({"x": torch.ones(4, 2).to(dtype), "y": torch.ones(1)}, folder / "model.safetensors")
    source = SafetensorsFolder(folder)
    kind = {torch.int64: "I64", torch.bool: "BOOL", torch.float64: "F64"}.get(dtype, "F8_E4M3")
    assert source.info("x") == TensorInfo("x", (4, 2), kind, 8 * dtype.itemsize)
    assert read_tensor(source, "y", torch.float32).item() == 1.0
    for read in (lambda: source.raw("x"), lambda: read_tensor(source, "x", torch.float32)):
        with pytest.raises(WeightError, match=f"tensor 'x' has the type {kind}; only F32, F16, BF16 are read"):
            read()


LIES = {
    "data too short": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(15)),
    "data too long": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, bytes(17)),
    "shape against size": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]}}, bytes(16)),
    "offset past the end": ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [2**40, 2**40 + 16]}}, bytes(16)),
    "overlap": (
        {
            "a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
            "b": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]},
        },
        bytes(24),
    ),
    "shape that wraps": ({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 16]}}, bytes(16)),
    "zero dimension": ({"a": {"dtype": "F32", "shape": [4, 0], "data_offsets": [0, 0]}}, b""),
    "negative size": ({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}, bytes(16)),
    "unknown type": ({"a\nb": {"dtype": "Q4", "shape": [4], "data_offsets": [0, 16]}}, bytes(16)),
    "no JSON": (b"[[[[", b""),
    "deep JSON": (b'{"a":' * 100_000, b""),
    "no UTF-8": (b'{"\xff":1}', b""),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_that_lies_is_refused(folder: Path, name: str) -> None:
    write_lie(folder, *LIES[name])
    assert_refused(folder, "model.safetensors")


@pytest.mark.parametrize("length", [2**63, 2**33, 2**20])
def test_a_header_longer_than_the_file_is_refused(folder: Path, length: int) -> None:
    write_lie(folder, {}, length=length)
    assert_refused(folder, "model.safetensors")


def assert_refused(folder: Path, message: str) -> None:
    with pytest.raises(WeightError, match=message) as caught:
        SafetensorsFolder(folder)
    assert len(str(caught.value).splitlines()) == 1


def test_damaged_files_are_a_one_line_error(single: Path) -> None:
    """Seeded damage to the header: opened or refused, never another exception."""
    path = single / "model.safetensors"
    whole = path.read_bytes()
    messages = []
    for seed in range(300):
        path.unlink()
        path.write_bytes(damaged(whole, random.Random(seed)))
        try:
            with SafetensorsFolder(single) as source:
                for name in source.names():
                    read_tensor(source, name, torch.float32)
        except WeightError as error:
            messages.append(str(error))
    assert 200 < len(messages) < 300
    assert all(len(message.splitlines()) == 1 for message in messages)


def test_an_lfs_pointer_is_named(single: Path) -> None:
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(WeightError, match="is a Git LFS pointer and not the file itself; fetch it with `git lfs pull`"):
        SafetensorsFolder(single)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_an_lfs_pointer_next_to_the_weights_is_named(tmp_path: Path, name: str) -> None:
    write_tiny_bert(tmp_path)
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(WeightError, match=f"{name}: is a Git LFS pointer and not the file itself"):
        open_model(tmp_path)


def test_pickled_weights_are_refused(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02cos\nsystem\n")
    assert_refused(folder, r"only pickled weights \(pytorch_model.bin\).*take the safetensors version")


def test_safetensors_win_over_pickled_weights(single: Path) -> None:
    (single / "pytorch_model.bin").write_bytes(b"\x80")
    assert SafetensorsFolder(single).files == [single / "model.safetensors"]


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("model.onnx", r"holds ONNX weights \(model.onnx\), which are not read; .*safetensors or GGUF"),
        ("onnx/model_q4.onnx", r"holds ONNX weights \(onnx/model_q4.onnx\)"),
        ("openvino_model.xml", r"holds OpenVINO weights \(openvino_model.xml\)"),
        ("tf_model.h5", r"holds TensorFlow weights \(tf_model.h5\)"),
        ("flax_model.msgpack", r"holds Flax weights \(flax_model.msgpack\)"),
    ],
)
def test_a_folder_of_another_format_is_refused_by_its_name(folder: Path, file: str, says: str) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(b"")
    assert_refused(folder, says)


def test_an_empty_folder_is_refused(folder: Path) -> None:
    assert_refused(folder, "has neither model.safetensors nor")
    (folder / "config.json").unlink()
    assert_refused(folder, "config.json: cannot be opened")
    assert_refused(folder / "none", "is not a folder")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000], ids=["cut", "list", "no UTF-8", "deep"])
@pytest.mark.parametrize("file", ["config.json", "model.safetensors.index.json"])
def test_broken_json_is_refused(sharded: Path, file: str, content: bytes) -> None:
    (sharded / file).write_bytes(content)
    assert_refused(sharded, f"{file}: is not")


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        "x.bin",
        "a\\b.safetensors",
        ".safetensors",
    ],
)
def test_the_index_cannot_leave_the_folder(single: Path, file: str) -> None:
    (single / "model.safetensors").rename(single.parent / "model.safetensors")
    write_index(single, {"a": file})
    assert_refused(single, "only safetensors files in the folder itself")


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 1}, "x"])
def test_an_index_without_files_is_refused(folder: Path, weight_map: Any) -> None:
    write_index(folder, weight_map)
    assert_refused(folder, "has no weight_map")


def test_index_and_shards_must_agree(sharded: Path) -> None:
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    write_index(sharded, {**index, "e": index["a"]})
    assert_refused(sharded, "lacks tensor 'e'")
    write_index(sharded, {name: file for name, file in index.items() if name != "b"})
    assert_refused(sharded, "holds tensor 'b'")
    write_index(sharded, {**index, "c": index["a"]})
    assert_refused(sharded, "lacks tensor 'c'")


def test_a_missing_shard_is_refused(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    assert_refused(sharded, "model-00002-of-00002.safetensors: cannot be read")
