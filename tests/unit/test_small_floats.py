"""Numbers of 4 bits with exponents: their grids, and the folders that hold them, read again bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.compress.grids.grid import fit as plain_grid
from headrace.compress.grids.grid import grouped
from headrace.compress.grids.loop import reconstruct
from headrace.compress.grids.nvfp4 import Nvfp4
from headrace.compress.grids.spec import parse
from headrace.compress.grids.targets import nearest, target
from headrace.compress.least_squares import inverse_factor, output_error
from headrace.weights.decode import read_floats
from headrace.weights.schemes.compressed_tensors import SmallFloatsWriter
from headrace.weights.schemes.folder import QuantizedFolder, open_folder
from headrace.weights.schemes.small_floats import GROUPS, MXFP4, NVFP4, nvfp4_parts
from tests.quantized import MATRICES, Made, load_fixture, nvfp4, others


def matrix(n: int = 24, k: int = 256, seed: int = 0) -> np.ndarray:
    """Normal numbers in rows of very different sizes; a group of zeros, and one of a single size."""
    rng = np.random.default_rng((n, k, seed))
    w = (rng.standard_normal((n, k)) * 10.0 ** rng.uniform(-3, 1, (n, 1))).astype(np.float32)
    w[0, :32], w[1, :32] = 0, -0.3
    return w


@pytest.mark.parametrize("name", GROUPS)
def test_written_matrices_are_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    """By a reader that is held to files of compressed-tensors; bfloat16, as which the core holds NVFP4, says the same."""
    layout, wanted = SmallFloatsWriter(name), {}
    made = Made(layout.settings([]), others(np.random.default_rng(0)))
    for number, (matrix_name, (n, k)) in enumerate(MATRICES.items()):
        w = matrix(n, k, number) * np.float32(10.0**-number)
        rows, values = nearest(torch.from_numpy(w), target(name), None, 1)
        wanted[matrix_name] = values.numpy()
        for field, (key, value) in zip(layout.fields(n, k), layout.tensors(rows).items(), strict=True):
            assert (field.name, field.shape, field.nbytes) == (key, value.shape, value.nbytes)
            stored = torch.from_numpy(np.array(value))
            made.tensors[f"{matrix_name}.{key}"] = stored.view(torch.float8_e4m3fn) if field.type == "F8_E4M3" else stored
    source = open_folder(made.write(tmp_path))
    assert isinstance(source, QuantizedFolder)
    for matrix_name, values in wanted.items():
        read = read_floats(source, f"{matrix_name}.weight")
        assert np.array_equal(read.view(np.uint32), values.view(np.uint32)), matrix_name
        assert not (read.view(np.uint32) & 0xFFFF).any()
    assert source.scheme.summary == f"compressed-tensors, {'MXFP4' if name == MXFP4 else 'NVFP4 as bfloat16'}"


def test_mxfp4_is_written_as_compressed_tensors_writes_it(tmp_path: Path) -> None:
    """Tensor for tensor what was read of its own file."""
    made = load_fixture(MXFP4)
    source = open_folder(made.write(tmp_path))
    for name in MATRICES:
        for key, value in SmallFloatsWriter(MXFP4).tensors(source.raw(f"{name}.weight")).items():
            assert torch.equal(torch.from_numpy(np.array(value)), made.tensors[f"{name}.{key}"]), (name, key)


def test_numbers_of_another_grid_are_refused() -> None:
    """Also those whose float32 of the matrix is no power of two, which bfloat16 lacks. The control: theirs times it."""
    with pytest.raises(ValueError, match="not 4-bit numbers times an E4M3 scale"):
        nvfp4_parts(matrix())
    theirs = nvfp4()
    name, values = next(iter(theirs.values.items()))
    whole = theirs.tensors[f"{name}.weight_global_scale"].numpy()
    with pytest.raises(ValueError, match="not 4-bit numbers"):
        nvfp4_parts(values)
    codes, scales, unit = nvfp4_parts(np.round(values * whole * 8) / np.float32(8))
    assert codes.shape == values.shape
    assert (scales.shape, unit) == ((len(values), values.shape[1] // 16), 1)


@pytest.mark.parametrize("name", GROUPS)
def test_the_scale_is_searched(name: str) -> None:
    """No more error than with the scale of the largest number, much less over all; zeros stay zeros; importance counts."""
    w, k = matrix(), 256

    def round_matrix(importance: np.ndarray | None = None) -> np.ndarray:
        return nearest(torch.from_numpy(w), target(name), importance, 2)[1].numpy()

    spec = parse(name)
    groups = grouped(w, spec.group)
    plain = plain_grid(groups, spec).snap(groups).reshape(w.shape)
    scale = np.square(w).mean(1, keepdims=True)  # rows count alike
    ours, theirs = (float((np.square(x - w) / scale).sum()) for x in (round_matrix(), plain))
    print(f"{name}: {ours / theirs:.3f} of the error with the scale of the largest number")
    assert ours < 0.97 * theirs
    assert not round_matrix()[0, :32].any()
    importance = np.where(np.arange(k) % 7 == 0, 100, 1).astype(np.float32)
    assert (importance * np.square(round_matrix(importance) - w) / scale).sum() < (
        importance * np.square(round_matrix() - w) / scale
    ).sum()
    with pytest.raises(ValueError, match="NaN or infinite"):
        target(name).encode(np.full((2, 64), np.nan, np.float32))
    with pytest.raises(ValueError, match="cannot be divided"):
        target(name).encode(np.zeros((2, 40), np.float32))


@pytest.mark.parametrize("ordered", [True, False])
def test_the_column_loop_stays_on_the_grid(ordered: bool) -> None:
    """Without correlations it rounds to nearest; with them less is lost, and what it leaves can be written."""
    w, k, to = torch.from_numpy(matrix(32)), 256, Nvfp4()
    rng = np.random.default_rng(0)
    x = torch.from_numpy((rng.standard_normal((1024, 60)) @ rng.standard_normal((60, k))).astype(np.float32))
    hessian = x.T @ x / len(x) + 0.1 * torch.eye(k)
    rows, plain = nearest(w, to, None, 1)

    def round_matrix(moment: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(moment.diagonal(), descending=True, stable=True) if ordered else None
        found = inverse_factor(moment, order)
        assert found is not None
        grids = to.grids(w.numpy(), None, rows=rows if ordered else None, order=order, threads=1)
        result = reconstruct(w, found.factor, grids=grids, keep=None, order=order)
        stored, said = grids.rows(result)
        assert torch.equal(said, result)
        assert SmallFloatsWriter(NVFP4).tensors(stored)["weight_packed"].shape == (32, k // 2)
        low, high = to.ends(stored)
        assert ((said.numpy() >= low) & (said.numpy() <= high)).all()
        return result

    assert torch.equal(round_matrix(torch.eye(k)), plain)
    assert output_error(round_matrix(hessian) - w, hessian) < 0.9 * output_error(plain - w, hessian)
    with pytest.raises(ValueError, match="act-order needs scales"):
        to.grids(w.numpy(), None, rows=None, order=torch.arange(k), threads=1)
