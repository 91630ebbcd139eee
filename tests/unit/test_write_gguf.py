"""The container: what is written is read back, by us and by the `gguf` package; what does not fit its header is found."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from headrace.weights import gguf as writer
from headrace.weights.gguf import GGUFFile
from headrace.weights.source import TensorInfo, WeightError
from tests.unit.gguf_bytes import sample

KEYS = {
    "general.architecture": "llama",
    "text": "Größe 水",
    "number": 7,
    "minus": -3,
    "half": 0.5,
    "yes": True,
    "texts": ["a", "", "水"],
    "ints": np.array([1, -2, 3], np.int32),
    "floats": np.array([0.5, 2.0], np.float32),
}
TENSORS = [TensorInfo("a", (3, 5), "F32", 60), TensorInfo("b", (2, 32), "Q8_0", 68), TensorInfo("c", (7,), "F16", 14)]
DATA = {info.name: np.random.default_rng(len(info.name)).integers(0, 60, info.nbytes).astype(np.uint8) for info in TENSORS}


def write(path: Path, alignment: int = 32, said: int | None = None) -> Path:
    keys = {**KEYS, **({} if said is None else {"general.alignment": said})}
    chunks = [(name, part) for name, data in DATA.items() for part in np.array_split(data, 3)]
    writer.write_gguf(path, [writer.entry(*pair) for pair in keys.items()], TENSORS, chunks, alignment)
    return path


@pytest.mark.parametrize("alignment", [32, 64, 8])
def test_both_readers_return_the_written_tensors(alignment: int, tmp_path: Path) -> None:
    path = write(tmp_path / "out.gguf", alignment, alignment)
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert [ours.info(name) for name in ours.names()] == TENSORS
    for tensor in theirs.tensors:
        np.testing.assert_array_equal(ours.raw(tensor.name).reshape(-1), DATA[tensor.name])
        np.testing.assert_array_equal(np.ascontiguousarray(tensor.data).view(np.uint8).reshape(-1), DATA[tensor.name])
    for key, value in KEYS.items():
        found = ours.metadata[key]
        assert (found.tolist() if hasattr(found, "tolist") else found) == (
            value.tolist() if hasattr(value, "tolist") else value
        )
        field = theirs.get_field(key)
        assert field is not None
        assert field.contents() == (value.tolist() if hasattr(value, "tolist") else value)
    size = writer.file_size([ours.entry(key) for key in ours.metadata], TENSORS, alignment)
    assert path.stat().st_size == size
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


def test_a_wrong_alignment_is_refused(tmp_path: Path) -> None:
    """The control: tensors 8 bytes apart in a file that says 32."""
    with pytest.raises(WeightError, match="is not aligned to 32 bytes"):
        GGUFFile(write(tmp_path / "out.gguf", 8))


def test_metadata_is_copied_byte_for_byte(tmp_path: Path) -> None:
    """Every type of value that there is, from a file made by hand."""
    (tmp_path / "in.gguf").write_bytes(sample())
    source = GGUFFile(tmp_path / "in.gguf")
    entries = [source.entry(key) for key in source.metadata]
    assert b"".join(entries) in sample()
    assert len(entries) > 12
    writer.write_gguf(tmp_path / "out.gguf", entries, [], [])
    again = GGUFFile(tmp_path / "out.gguf")
    assert [again.entry(key) for key in again.metadata] == entries
    with pytest.raises(KeyError):
        source.entry("none")


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([("a", DATA["a"])], "'b' are missing"),
        ([("b", DATA["b"])], "'b' do not fit"),
        ([("a", DATA["a"]), ("a", DATA["a"][:1])], "'a' do not fit"),
        ([("a", np.zeros(61, np.uint8))], "'a' do not fit"),
    ],
)
def test_bytes_that_do_not_fit_leave_no_file(chunks: list[tuple[str, np.ndarray]], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        writer.write_gguf(tmp_path / "out.gguf", [], TENSORS, chunks)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_leaves_no_file(tmp_path: Path) -> None:
    def full() -> object:
        yield "a", DATA["a"]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        writer.write_gguf(tmp_path / "out.gguf", [], TENSORS, full())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_none_value_is_refused() -> None:
    with pytest.raises(TypeError, match="key: a NoneType is not a value"):
        writer.entry("key", None)
    assert writer.entry("k", 1) == struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 1)
