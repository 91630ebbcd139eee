"""A container of one file: compress writes it by its suffix. The control: without its row OUT is a folder."""

from pathlib import Path

import numpy as np
import pytest

from headrace.compress import write
from headrace.compress.pipeline import Pipeline
from headrace.compress.write import compress
from headrace.weights.decode import dequantize
from headrace.weights.gguf import GGUFFile
from tests.house.npz_container import NpzPlan
from tests.models.test_walk import book, model  # noqa: F401


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_container_is_one_file(
    method: str,
    model: Path,  # noqa: F811
    book: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its tensors are those of a GGUF file in the same kinds, byte for byte."""
    monkeypatch.setitem(write.CONTAINERS, ".npz", NpzPlan)
    pipeline = Pipeline(format="Q4_0", method=(method,), calibrate=str(book), tokens=1024, threads=1)
    report = compress(model, tmp_path / "out.npz", pipeline)
    compress(model, tmp_path / "out.gguf", pipeline)
    ours, theirs = np.load(tmp_path / "out.npz"), GGUFFile(tmp_path / "out.gguf")
    matrices = [name for name, one in report.matrices.items() if one.kind == "Q4_0"]
    assert len(matrices) == 14
    for name in matrices:
        assert ours[name].tobytes() == theirs.raw(name).tobytes()
    table = GGUFFile(model)
    expected = dequantize(table.raw("token_embd.weight").reshape(-1), table.info("token_embd.weight").kind)
    np.testing.assert_array_equal(ours["token_embd.weight"].reshape(-1).view(np.float32), expected)


def test_without_its_row_the_name_is_a_folder(model: Path, tmp_path: Path) -> None:  # noqa: F811
    compress(model, tmp_path / "out.npz", Pipeline(format="int4-g32"))
    assert (tmp_path / "out.npz" / "config.json").is_file()
