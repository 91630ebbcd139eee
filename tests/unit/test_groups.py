"""Integers of folders: their grids, and the layouts that hold them, read again bit for bit."""

from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.compress.grids.encode import encode
from headrace.compress.grids.groups import fit, stored
from headrace.compress.grids.loop import GroupGrids, reconstruct
from headrace.compress.grids.spec import integers_named
from headrace.compress.grids.targets import target
from headrace.weights.bits import pack_fields, unpack_fields
from headrace.weights.decode import dequantize_numpy, read_floats
from headrace.weights.schemes.awq import AWQWriter
from headrace.weights.schemes.base import IntegerFormat, SchemeWriter
from headrace.weights.schemes.compressed_tensors import CompressedTensorsWriter
from headrace.weights.schemes.folder import QuantizedFolder, open_folder
from headrace.weights.schemes.gptq import BITS, GPTQWriter
from headrace.weights.schemes.rows import integer_rows, row_integers
from tests.quantized import LLAMA, MATRICES, Made, awq, gptq, load_fixture, matrices, others

GRIDS = [
    *(
        IntegerFormat(4, 128),
        IntegerFormat(4, 64),
        IntegerFormat(4, 32, symmetric=False),
        IntegerFormat(4, symmetric=False),
        IntegerFormat(8),
    ),
    *(
        IntegerFormat(4, 128, symmetric=False),
        IntegerFormat(3, 64, symmetric=False),
        IntegerFormat(5, 32),
        IntegerFormat(7, symmetric=False),
    ),
]
LAYOUTS: list[SchemeWriter] = [
    *(CompressedTensorsWriter(each) for each in GRIDS),
    CompressedTensorsWriter(IntegerFormat(8, activations=True)),
    *(GPTQWriter(each) for each in GRIDS if each.bits in BITS),
    *(AWQWriter(each) for each in GRIDS if each.bits == 4),
]


def matrix(n: int = 24, k: int = 256) -> np.ndarray:
    """Normal numbers, shifted row by row; a group of zeros, and one of a single sign."""
    rng = np.random.default_rng((n, k))
    w = (rng.standard_normal((n, k)) * rng.uniform(0.1, 2, (n, 1)) + rng.uniform(-0.5, 0.5, (n, 1))).astype(np.float32)
    w[0, :128], w[1, :128] = 0, np.abs(w[1, :128]) + 1
    return w


def values(of: IntegerFormat, rows: np.ndarray) -> np.ndarray:
    return dequantize_numpy(rows.reshape(-1), of.kind).reshape(len(rows), -1)


def plain(w: np.ndarray, of: IntegerFormat) -> np.ndarray:
    """To nearest in the whole range of each group, with scales in 16 bits."""
    x = w.reshape(-1, of.group or w.shape[1])
    least, most = of.range
    low, high = np.minimum(x.min(1, keepdims=True), 0), np.maximum(x.max(1, keepdims=True), 0)
    span = (high - low) / most if not of.symmetric else np.abs(x).max(1, keepdims=True) / most
    scale = span.astype(np.float16).astype(np.float32)
    unit = np.divide(1, scale, where=scale > 0, out=np.zeros_like(scale))
    zero = np.zeros_like(scale) if of.symmetric else np.rint(-low * unit)
    ends = (least - 0 * zero, most - 0 * zero) if of.symmetric else (-zero, most - zero)
    return (scale * np.clip(np.rint(x * unit), *ends)).reshape(w.shape)


@pytest.mark.parametrize("of", GRIDS, ids=str)
def test_the_grid_of_a_group(of: IntegerFormat) -> None:
    """Less error than the whole range leaves; integers fit; 0 stays 0; a row depends on itself alone."""
    w = matrix()
    found = fit(w, of)
    made = values(of, stored(of, found.scale, found.integers))
    assert np.square(made - w).sum() <= np.square(plain(w, of) - w).sum() * (1 + 1e-6)
    groups = found.integers.reshape(*found.zero.shape, -1).astype(int)
    least, most = of.range
    low, high = (least, most) if of.symmetric else (-found.zero[..., None], most - found.zero[..., None])
    assert (groups >= low).all()
    assert (groups <= high).all()
    assert not made[0, : of.group or 0].any()
    for threads in (1, 2):
        alone = fit(w[5:6], of, threads=threads)
        assert all(np.array_equal(one[5:6], other) for one, other in zip(found, alone, strict=True))
    important = np.where(np.arange(w.shape[1]) % 7 == 0, 100, 1).astype(np.float32)
    weighted = fit(w, of, important)
    after = values(of, stored(of, weighted.scale, weighted.integers))
    assert (important * np.square(after - w)).sum() <= (important * np.square(made - w)).sum()


@pytest.mark.parametrize(("bits", "kind"), [(4, "Q4_0"), (8, "Q8_0")])
def test_groups_of_32_are_blocks(bits: int, kind: str) -> None:
    w = matrix()
    assert np.array_equal(target(f"int{bits}-g32-sym").encode(w), encode(w, kind))


@pytest.mark.parametrize("of", GRIDS, ids=str)
def test_the_loop_leaves_integers_of_the_grid(of: IntegerFormat) -> None:
    """Without correlations it rounds to nearest; with them errors are made good; what is stored says what was made."""
    w = torch.from_numpy(matrix())
    k = w.shape[1]
    rng = np.random.default_rng(0)
    x = torch.from_numpy((rng.standard_normal((512, 40)) @ rng.standard_normal((40, k))).astype(np.float32))
    moment = (x.t() @ x / len(x) + 0.1 * torch.eye(k)).double()
    upper = torch.linalg.cholesky(torch.linalg.inv(moment), upper=True).float()
    order = torch.argsort(moment.diagonal(), descending=True, stable=True)
    permuted = torch.linalg.cholesky(torch.linalg.inv(moment[order][:, order]), upper=True).float()
    found = fit(w.numpy(), of)
    nearest = torch.from_numpy(values(of, stored(of, found.scale, found.integers)))

    def grids(**more: object) -> GroupGrids:
        return GroupGrids((w.shape[0], k), of, **more)  # type: ignore[arg-type]

    alone = reconstruct(w, torch.eye(k), grids=grids(fitted=found), keep=None)
    assert torch.equal(alone, nearest)
    for one, factor, turn in ((grids(), upper, None), (grids(fitted=found, order=order), permuted, order)):
        made = reconstruct(w, factor, grids=one, keep=None, order=turn)
        rows, said = one.rows(made)
        assert torch.equal(said, made)
        assert np.array_equal(integer_rows(of.kind, *row_integers(of.kind, rows)), rows)
        error, plain_error = (float(((v - w).double() @ moment * (v - w).double()).sum()) for v in (made, nearest))
        assert error < 0.8 * plain_error
    with pytest.raises(ValueError, match="act-order needs scales"):
        grids(order=order)


def test_words_are_packed_and_unpacked() -> None:
    rng = np.random.default_rng(0)
    for bits in range(2, 9):
        fields = rng.integers(0, 1 << bits, (3, 40)).astype(np.uint8)
        words = pack_fields(fields, bits)
        assert words.dtype == np.dtype("<i4")
        assert words.shape == (3, -(-40 * bits // 32))
        assert np.array_equal(unpack_fields(words, bits)[:, :40], fields)


def written(layout: SchemeWriter, folder: Path) -> tuple[QuantizedFolder, dict[str, np.ndarray]]:
    """A tiny model in a layout, and its matrices as they were rounded."""
    made = Made(layout.settings(["model.layers.7.mlp.up_proj"]), others(np.random.default_rng(0)))
    made.config = {**LLAMA, "intermediate_size": 256}  # groups of 128
    wanted = {}
    of = layout.integers  # type: ignore[attr-defined]
    for name, (n, k) in matrices(256).items():
        assert layout.fits(n, k) == (k % (of.group or k) == 0)
        one = of if layout.fits(n, k) else IntegerFormat(of.bits, 32, of.symmetric)
        chosen = type(layout)(one)  # type: ignore[call-arg]
        rows = target(f"int{one.bits}{f'-g{one.group}' if one.group else '-row'}{'-sym' if one.symmetric else ''}").encode(
            matrix(n, k)
        )
        tensors = chosen.tensors(rows)
        for field, (key, value) in zip(chosen.fields(n, k), tensors.items(), strict=True):
            assert (field.name, field.shape, field.nbytes) == (key, value.shape, value.nbytes)
            made.tensors[f"{name}.{key}"] = torch.from_numpy(np.array(value))
        wanted[name] = values(one, rows)
    source = open_folder(made.write(folder))
    assert isinstance(source, QuantizedFolder)
    return source, wanted


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_written_matrices_are_read_unchanged(layout: SchemeWriter, tmp_path: Path) -> None:
    """By readers that are held to other projects' files: to the bit (but for the sign of 0)."""
    source, wanted = written(layout, tmp_path)
    for name, expected in wanted.items():
        assert np.array_equal(read_floats(source, f"{name}.weight"), expected), name
    assert source.scheme.summary.split(",")[0] in ("compressed-tensors", "GPTQ", "AWQ")
    if isinstance(layout, GPTQWriter) and not layout.integers.symmetric:
        shifted = Made({**layout.settings([]), "checkpoint_format": "gptq"})
        shifted.tensors = {info: torch.from_numpy(np.array(source._folder.array(info))) for info in source._folder.names()}
        wrong = open_folder(shifted.write(tmp_path / "v1"))
        name = next(iter(wanted))
        assert not np.array_equal(read_floats(wrong, f"{name}.weight"), wanted[name]), "the control: zero points of version 1"


@pytest.mark.parametrize(
    ("made", "layout"),
    [
        (load_fixture("int8"), CompressedTensorsWriter(IntegerFormat(8, activations=True))),
        (gptq(version=2), GPTQWriter(IntegerFormat(4, 32))),
        (gptq(8, version=2), GPTQWriter(IntegerFormat(8, 32))),
        (awq(zeros=False), AWQWriter(IntegerFormat(4, 32))),
    ],
    ids=["int8", "gptq", "gptq of 8 bits", "awq"],
)
def test_rewriting_gives_the_tensors_of_other_projects(made: Made, layout: SchemeWriter, tmp_path: Path) -> None:
    """What was read of theirs is written as theirs was, tensor for tensor."""
    source = open_folder(made.write(tmp_path))
    assert isinstance(source, QuantizedFolder)
    for name in MATRICES:
        for key, value in layout.tensors(source.raw(f"{name}.weight")).items():
            theirs = made.tensors[f"{name}.{key}"]
            assert torch.equal(torch.from_numpy(np.array(value)).to(theirs.dtype), theirs), (name, key)


def test_format_names_and_refusals() -> None:
    assert integers_named("INT8") == integers_named("int8-row-sym") == IntegerFormat(8)
    assert integers_named("w8a8") == IntegerFormat(8, activations=True)
    assert integers_named("int4-g128") == IntegerFormat(4, 128, symmetric=False)
    for name, line in (
        ("int8-g32", "8-bit integers have no zero points in folders, because they gain almost nothing; write int8-g32-sym"),
        ("int4-g48", "a group whose size is a multiple of 32"),
        ("int4-tensor", "a group whose size is a multiple of 32"),
        ("int2-g32", "integers of 3 to 8 bits"),
        ("nf4-g64", "nf4-g64 cannot be written to a folder"),
        ("int9", "unknown format 'int9'"),
    ):
        with pytest.raises(ValueError, match=line):
            integers_named(name)
    with pytest.raises(ValueError, match="rows of 96 numbers cannot be divided into groups of 64"):
        fit(np.zeros((2, 96), np.float32), IntegerFormat(4, 64))
    with pytest.raises(ValueError, match="NaN or infinite"):
        fit(np.full((2, 64), np.nan, np.float32), IntegerFormat(4, 64))
    rows = target("int4-g32-sym").encode(matrix())
    with pytest.raises(ValueError, match="scales differ within a group of 64"):
        CompressedTensorsWriter(IntegerFormat(4, 64)).tensors(rows)
