"""The GGUF reader on whole files, written by the `gguf` package and byte by byte."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace.weights.gguf import GGUFFile
from headrace.weights.gguf_metadata import StringArray
from headrace.weights.kinds import KINDS, NOT_GGUF
from headrace.weights.loader import read_tensor
from headrace.weights.source import TensorInfo, WeightError
from tests.unit import gguf_bytes as raw


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A file of the gguf package with every value type and a few tensors."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("x.u8", 200)
    writer.add_int8("x.i8", -5)
    writer.add_uint16("x.u16", 60000)
    writer.add_int16("x.i16", -30000)
    writer.add_uint32("x.u32", 4_000_000_000)
    writer.add_int32("x.i32", -2_000_000_000)
    writer.add_uint64("x.u64", 2**63 + 1)
    writer.add_int64("x.i64", -(2**62))
    writer.add_float32("x.f32", 0.1)
    writer.add_float64("x.f64", 0.1)
    writer.add_bool("x.bool", True)
    writer.add_string("x.text", "Größe 你好")
    writer.add_array("x.words", ["", "a", "你好", "Ġthe"])
    writer.add_array("x.ints", [1, -2, 3])
    writer.add_array("x.floats", [0.5, -1.5])
    writer.add_array("x.flags", [True, False])
    rng = np.random.default_rng(0)
    writer.add_tensor("plain", rng.standard_normal((3, 5)).astype(np.float32))
    writer.add_tensor("half", rng.standard_normal((2, 4, 6)).astype(np.float16))
    rows = rng.standard_normal((4, 64)).astype(np.float32)
    writer.add_tensor("q8", gguf.quantize(rows, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "raw.gguf"
    path.write_bytes(content)
    return path


def test_scalars_come_back_with_their_types(written: Path) -> None:
    metadata = GGUFFile(written).metadata
    expected = {
        "general.architecture": "llama",
        "x.u8": 200,
        "x.i8": -5,
        "x.u16": 60000,
        "x.i16": -30000,
        "x.u32": 4_000_000_000,
        "x.i32": -2_000_000_000,
        "x.u64": 2**63 + 1,
        "x.i64": -(2**62),
        "x.f32": float(np.float32(0.1)),
        "x.f64": 0.1,
        "x.bool": True,
        "x.text": "Größe 你好",
    }
    for name, value in expected.items():
        assert metadata[name] == value, name
        assert type(metadata[name]) is type(value), name


def test_arrays_of_numbers_are_numpy(written: Path) -> None:
    metadata = GGUFFile(written).metadata
    assert metadata["x.ints"].dtype == np.int32
    assert metadata["x.ints"].tolist() == [1, -2, 3]
    assert metadata["x.floats"].tolist() == [0.5, -1.5]
    assert metadata["x.flags"].tolist() == [True, False]
    assert not metadata["x.ints"].flags.writeable


def test_strings_are_a_lazy_sequence(written: Path) -> None:
    words = GGUFFile(written).metadata["x.words"]
    expected = ["", "a", "你好", "Ġthe"]
    assert isinstance(words, StringArray)
    assert len(words) == 4
    assert words.tolist() == list(words) == words[:] == expected
    assert [words[i] for i in range(4)] == expected
    assert words[-1] == "Ġthe"
    assert words[2:0:-1] == ["你好", "a"]
    assert "a" in words
    with pytest.raises(IndexError):
        words[4]


def test_a_string_is_not_decoded_before_it_is_read(tmp_path: Path) -> None:
    content = raw.gguf([raw.array("words", raw.STRING, 2, raw.text("fine") + raw.text(b"\xff\xfe"))])
    words = GGUFFile(save(tmp_path, content)).metadata["words"]
    assert words[0] == "fine"
    for read in (words.tolist, lambda: words[1]):
        with pytest.raises(WeightError, match="not UTF-8"):
            read()


def test_strings_with_zero_bytes_are_decoded_separately(tmp_path: Path) -> None:
    """All are decoded in one go, with zeros between them: neither may show."""
    words = ["", "a\0", "\0", "", "\0\0b", "你" * 300, ""]
    halves = raw.text("你好".encode()[:4]) + raw.text("你好".encode()[4:])
    arrays = [raw.array("words", raw.STRING, 7, b"".join(map(raw.text, words))), raw.array("halves", raw.STRING, 2, halves)]
    metadata = GGUFFile(save(tmp_path, raw.gguf(arrays))).metadata
    assert metadata["words"].tolist() == words
    with pytest.raises(WeightError, match="not UTF-8"):
        metadata["halves"].tolist()


def test_tensors_equal_the_oracle(written: Path) -> None:
    file = GGUFFile(written)
    oracle = {tensor.name: tensor for tensor in gguf.GGUFReader(written).tensors}
    assert file.names() == list(oracle) == ["plain", "half", "q8"]
    assert file.info("half") == TensorInfo("half", (2, 4, 6), "F16", 96)
    assert file.info("q8") == TensorInfo("q8", (4, 64), "Q8_0", 4 * 2 * 34)
    for name, tensor in oracle.items():
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(file.info(name).shape)
        read = read_tensor(file, name, torch.float32)
        assert read.dtype is torch.float32
        np.testing.assert_array_equal(read.numpy(), expected)


def test_raw_is_a_read_only_view_by_rows(written: Path) -> None:
    file = GGUFFile(written)
    rows = file.raw("q8")
    assert rows.shape == (4, 68)
    assert rows.dtype == np.uint8
    assert not rows.flags.writeable
    assert np.shares_memory(rows, file.raw("q8"))
    assert file.raw("half").shape == (8, 12)
    assert bytes(rows.reshape(-1)) == bytes(gguf.GGUFReader(written).tensors[2].data.reshape(-1))


def test_read_rows_outlive_the_file(written: Path) -> None:
    with GGUFFile(written) as file:
        rows, tensor = file.raw("q8"), read_tensor(file, "plain", torch.float64)
        first = rows.copy()
    np.testing.assert_array_equal(rows, first)
    assert tensor.shape == (3, 5)
    with pytest.raises(WeightError, match="no tensor"):
        file.info("plain")


def test_an_unknown_name_is_one_line(written: Path) -> None:
    with pytest.raises(WeightError, match=r"there is no tensor 'blk\\n9'"):
        GGUFFile(written).info("blk\n9")


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_the_same(tmp_path: Path, version: int) -> None:
    content = bytearray(raw.sample())
    content[4:8] = struct.pack("<I", version)
    file = GGUFFile(save(tmp_path, bytes(content)))
    assert file.version == version
    assert file.metadata["words"].tolist() == ["a", "", "Größe", "你好"]
    assert read_tensor(file, "c", torch.float32).shape == (8,)


def test_the_alignment_of_the_file_holds(tmp_path: Path) -> None:
    keys = [raw.key("general.alignment", raw.UINT32, struct.pack("<I", 256))]
    tensors = [raw.tensor("a", [1], offset=256), raw.tensor("b", [1], offset=0)]
    data = struct.pack("<f", 1.0) + bytes(252) + struct.pack("<f", 2.0)
    file = GGUFFile(save(tmp_path, raw.gguf(keys, tensors, data, alignment=256)))
    assert read_tensor(file, "a", torch.float32).item() == 2.0
    assert read_tensor(file, "b", torch.float32).item() == 1.0


def test_every_type_of_the_list_is_read_and_no_other(tmp_path: Path) -> None:
    """Types as the gguf package numbers them, 256 elements each."""
    for type_ in gguf.GGMLQuantizationType:
        block, nbytes = gguf.GGML_QUANT_SIZES[type_]
        path = save(tmp_path, raw.gguf([], [raw.tensor("t", [256], type_.value)], bytes(256 // block * nbytes)))
        if type_.name in KINDS:
            assert GGUFFile(path).info("t") == TensorInfo("t", (256,), type_.name, 256 // block * nbytes)
        else:
            with pytest.raises(WeightError, match=rf"tensor 't' has the type {type_.name}, which is not read"):
                GGUFFile(path)
    assert set(KINDS) - {type_.name for type_ in gguf.GGMLQuantizationType} == set(NOT_GGUF)
    assert len(KINDS) == 25
