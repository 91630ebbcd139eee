"""Weights left out on the walk: by what the inputs are (Wanda), before GPTQ, and within its loop (SparseGPT)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.compress.pipeline import Pipeline
from headrace.compress.report import Report
from headrace.compress.rounding import KeptBlocks
from headrace.compress.write import compress
from headrace.startup.opening import open_files
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model, read_tensor
from tests.models.test_walk import book, model, pipeline

__all__ = ["book", "model"]  # fixtures


def prune_to(model: Path, book: Path, out: Path, *method: str, sparsity: str | None = "2:4", **more: Any) -> Report:
    return compress(model, out, pipeline(book, method=method, sparsity=sparsity, format="Q8_0", **more), None, True)


def error(report: Report) -> float:
    """Of the outputs of all matrices."""
    return sum(told.error * told.weights for told in report.outputs.values()) / sum(
        told.weights for told in report.outputs.values()
    )


def matrices(path: Path) -> list[np.ndarray]:
    source = GGUFFile(path)
    names = [name for name in source.names() if name.startswith("blk.") and len(source.info(name).shape) == 2]
    return [read_tensor(source, name).numpy() for name in names]


@pytest.mark.parametrize("method", [("wanda",), ("wanda", "gptq"), ("magnitude", "gptq"), ("sparsegpt",)])
def test_two_of_four_weights_are_pruned(method: tuple[str, ...], model: Path, book: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    report = prune_to(model, book, out, *method)
    for matrix in matrices(out):
        assert ((matrix.reshape(-1, 4) != 0).sum(1) <= 2).all()
    assert report.zeros is not None
    assert 0.5 <= report.zeros < 0.52
    assert GGUFFile(out).metadata["headrace.compress"] == f"{','.join(method)} 2:4 Q8_0"


def test_half_of_each_row_is_pruned(model: Path, book: Path, tmp_path: Path) -> None:
    prune_to(model, book, tmp_path / "out.gguf", "sparsegpt", sparsity="0.5")
    for matrix in matrices(tmp_path / "out.gguf"):
        assert ((matrix == 0).sum(1) >= matrix.shape[1] // 2).all()


def test_remaining_weights_compensate_for_pruned_weights(
    model: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls: the mask's complement, which loses far more; and Wanda, which repairs nothing."""
    found = {
        name: error(prune_to(model, book, tmp_path / "out.gguf", *name.split(",")))
        for name in ("wanda", "wanda,gptq", "magnitude,gptq", "sparsegpt")
    }
    assert found["sparsegpt"] < found["wanda,gptq"] < found["wanda"]
    assert found["sparsegpt"] < 0.75 * found["wanda"]
    right = KeptBlocks.at
    monkeypatch.setattr(KeptBlocks, "at", lambda self, j, w, upper: ~right(self, j, w, upper))
    assert error(prune_to(model, book, tmp_path / "out.gguf", "sparsegpt")) > 1.5 * found["sparsegpt"]


def test_sparsegpt_without_sparsity_equals_gptq(model: Path, book: Path, tmp_path: Path) -> None:
    """Byte for byte, in the order that the columns have."""
    prune_to(model, book, tmp_path / "a.gguf", "sparsegpt", sparsity="0")
    prune_to(model, book, tmp_path / "b.gguf", "gptq", sparsity=None, act_order=False)
    for one, other in zip(matrices(tmp_path / "a.gguf"), matrices(tmp_path / "b.gguf"), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"method": ("sparsegpt", "gptq")}, "sparsegpt,gptq cannot be: weights are left out before others are rounded"),
        ({"method": ("sparsegpt",), "format": "BF16"}, "sparsegpt prunes what it rounds: choose a format of integers"),
        ({"method": ("sparsegpt",), "sparsity": None}, "sparsegpt needs a sparsity: 2:4, or a share"),
        ({"method": ("wanda",), "budget": 10**6}, "--budget may choose kinds in which 0 does not stay 0"),
        ({"method": ("gptq",)}, "sparsity needs a method that prunes: magnitude or wanda or sparsegpt"),
    ],
)
def test_invalid_options_are_a_one_line_error(
    changes: dict[str, Any], line: str, model: Path, book: Path, tmp_path: Path
) -> None:
    wanted = {"sparsity": "2:4", **changes}
    with pytest.raises(ValueError, match=line):
        compress(model, tmp_path / "out.gguf", pipeline(book, **wanted))
    assert not list(tmp_path.iterdir())


def test_a_calibrated_mask_survives_a_folder(model: Path, book: Path, tmp_path: Path) -> None:
    """To the bit, of Q4_0: two of four are there already, and its numbers are those of int4 in groups of 32."""
    compress(model, tmp_path / "a.gguf", pipeline(book, method=("sparsegpt",), sparsity="2:4", format="Q4_0"))
    rounded = Pipeline(method=("magnitude",), sparsity="2:4", format="int4-g32-sym", threads=1)
    compress(tmp_path / "a.gguf", tmp_path / "folder", rounded)
    one, other = (load_model(open_files(tmp_path / name).source) for name in ("a.gguf", "folder"))
    for (name, value), (_, same) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert not name.startswith("layers.") or bool((value.float() == same.float()).all()), name
