"""Pruned models: written and read back, they hold what masks keep, and their zeros are still zeros."""

from pathlib import Path

import numpy as np
import pytest

from headrace.compress.grids.keep import keep_mask, magnitude, parse_sparsity, wanda
from headrace.compress.pipeline import METHODS, Pipeline
from headrace.compress.write import compress, predict
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import read_tensor
from headrace.weights.source import WeightError
from tests.models.test_compress import write_dat
from tests.tiny_files import write_tiny_gguf


@pytest.mark.parametrize("sparsity", ["2:4", "0.5", "0.3"])
def test_magnitude_prunes_the_smallest_weights_of_each_row(sparsity: str, tmp_path: Path) -> None:
    """In F32, so that what stays stays as it was; tables, head and norms are whole."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "out.gguf"
    report = compress(model, out, Pipeline(format="F32", method=("magnitude",), sparsity=sparsity))
    before, after = GGUFFile(model), GGUFFile(out)
    matrices = [name for name in before.names() if name.startswith("blk.") and len(before.info(name).shape) == 2]
    assert len(matrices) == 14
    for name in before.names():
        old, new = (read_tensor(source, name).numpy() for source in (before, after))
        mask = keep_mask(magnitude(old), parse_sparsity(sparsity)) if name in matrices else np.ones_like(old, bool)
        np.testing.assert_array_equal(new, np.where(mask, old, 0))
        assert report.matrices[name].zeros == (pytest.approx(1 - mask.mean()) if name in matrices else None)
    assert report.zeros == pytest.approx(float(sparsity) if sparsity != "2:4" else 0.5, abs=0.02)
    assert after.metadata["headrace.compress"] == f"magnitude {sparsity} F32"


def test_a_global_share_takes_the_smallest_weights_of_the_model(tmp_path: Path) -> None:
    """One size for all matrices, so a matrix of small weights loses most of its own; by matrix each loses half."""

    def small(tensors: dict[str, np.ndarray]) -> None:
        tensors["blk.0.ffn_up.weight"] /= 8

    model = write_tiny_gguf(tmp_path / "tiny.gguf", edit=small)
    shares = {}
    for sparsity in ("global:0.5", "layer:0.5"):
        out = tmp_path / f"{sparsity[:5]}.gguf"
        report = compress(model, out, Pipeline(format="F32", method=("magnitude",), sparsity=sparsity))
        assert report.zeros == pytest.approx(0.5, abs=0.001)
        shares[sparsity] = {name: one.zeros for name, one in report.matrices.items() if one.zeros is not None}
        if sparsity == "global:0.5":
            before, after = (
                np.concatenate([read_tensor(GGUFFile(path), name).numpy().ravel() for name in shares[sparsity]])
                for path in (model, out)
            )
            assert np.abs(before[after == 0]).max() < np.abs(after[after != 0]).min()
            np.testing.assert_array_equal(after[after != 0], before[after != 0])
    assert shares["global:0.5"]["blk.0.ffn_up.weight"] > 0.9
    assert all(share == pytest.approx(0.5) for share in shares["layer:0.5"].values())
    with pytest.raises(ValueError, match=r"global:0.5 needs the method magnitude, without texts; use layer:0.5"):
        predict(model, Pipeline(format="Q8_0", method=("sparsegpt",), sparsity="global:0.5"))


def test_zeros_stay_zeros_when_the_others_are_rounded(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    name = "blk.1.ffn_up.weight"
    for number_format in ("Q8_0", "Q4_0", "Q5_1", "MXFP4", "BF16"):
        compress(
            model,
            tmp_path / "out.gguf",
            Pipeline(format=number_format, method=("magnitude", "rtn"), sparsity="2:4"),
            None,
            True,
        )
        made = read_tensor(GGUFFile(tmp_path / "out.gguf"), name).numpy().reshape(-1, 4)
        assert ((made != 0).sum(1) <= 2).all()
    with pytest.raises(ValueError, match="0 does not stay 0 in IQ4_NL: pruned models are written as Q4_0"):
        predict(model, Pipeline(format="IQ4_NL", method=("magnitude",), sparsity="2:4"))


def test_matrices_already_in_the_format_are_pruned(tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    compress(model, tmp_path / "one.gguf", Pipeline(format="Q8_0"))
    report = compress(
        tmp_path / "one.gguf", tmp_path / "two.gguf", Pipeline(format="Q8_0", method=("magnitude",), sparsity="0.5")
    )
    assert report.zeros is not None
    assert report.zeros >= 0.5


def test_wanda_by_an_imatrix(tmp_path: Path) -> None:
    """Mean squares of inputs are all that it needs; equal ones are magnitude, and a matrix without any is refused."""
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    whole = GGUFFile(model)
    matrices = [name for name in whole.names() if name.startswith("blk.") and len(whole.info(name).shape) == 2]
    rng, name = np.random.default_rng(0), matrices[3]
    measured = {one: rng.gamma(0.5, size=whole.info(one).shape[1]).astype(np.float32) for one in matrices}
    pipeline = Pipeline(format="F32", method=("wanda",), sparsity="2:4", imatrix=write_dat(tmp_path / "i.dat", measured))
    compress(model, tmp_path / "wanda.gguf", pipeline)
    old, new = (read_tensor(source, name).numpy() for source in (whole, GGUFFile(tmp_path / "wanda.gguf")))
    mask = keep_mask(wanda(old, np.sqrt(measured[name])), parse_sparsity("2:4"))
    np.testing.assert_array_equal(new, np.where(mask, old, 0))
    assert not np.array_equal(mask, keep_mask(magnitude(old), parse_sparsity("2:4")))
    del measured[name]
    lacking = Pipeline(format="F32", method=("wanda",), sparsity="2:4", imatrix=write_dat(tmp_path / "j.dat", measured))
    with pytest.raises(WeightError, match=f"{name} is missing from the imatrix, which wanda needs"):
        compress(model, tmp_path / "out.gguf", lacking)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (Pipeline(sparsity="2:4"), "sparsity needs a method that prunes: magnitude or wanda"),
        (Pipeline(method=("magnitude",)), "magnitude needs a sparsity: 2:4, or a share"),
        (Pipeline(method=("magnitude",), sparsity="4:2"), "sparsity '4:2' keeps 4 of 2"),
        (
            Pipeline(method=("rtn", "magnitude"), sparsity="2:4"),
            "rtn,magnitude cannot be: weights are left out before others are rounded",
        ),
        (Pipeline(method=("taylor",), sparsity="2:4"), f"unknown method 'taylor'; known are {', '.join(METHODS)}"),
        (
            Pipeline(format="F32", method=("magnitude",), sparsity="3:7"),
            "blk.0.attn_q.weight rows of 32 weights cannot be divided into groups of 7",
        ),
    ],
)
def test_invalid_sparsity_is_a_one_line_error(pipeline: Pipeline, message: str, tmp_path: Path) -> None:
    model = write_tiny_gguf(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=message) as found:
        compress(model, tmp_path / "out.gguf", pipeline)
    assert "\n" not in str(found.value)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
