"""Every scheme reads what it, or another project, has written: read(write(x)) == x; writing what was read gives the same bytes.

A further name in SCHEMES is covered by its writers: the control registers a second name for GPTQ.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from headrace.compress.grids.targets import target
from headrace.compress.layouts import grouped
from headrace.weights.decode import dequantize, read_floats
from headrace.weights.schemes import folder as folders
from headrace.weights.schemes.awq import AWQWriter
from headrace.weights.schemes.base import IntegerFormat, SchemeWriter
from headrace.weights.schemes.compressed_tensors import CompressedTensorsWriter
from headrace.weights.schemes.folder import SCHEMES, QuantizedFolder, open_folder
from headrace.weights.schemes.gptq import GPTQWriter
from headrace.weights.schemes.small_floats import GROUPS, SmallFloats
from headrace.weights.schemes.two_four import METHOD, TwoFourWriter
from headrace.weights.sparse import DENSE
from tests import quantized

N, K = 64, 128  # whole words and groups of every format
MATRIX = "model.layers.0.mlp.up_proj"


def integer_writers(writer: Callable[[IntegerFormat], Any], bits: tuple[int, ...]) -> Iterator[SchemeWriter]:
    for width in bits:
        yield from (writer(IntegerFormat(width, group, sym)) for group in (32, 128, 0) for sym in {True, width == 8})


def bitsandbytes() -> quantized.Made:
    """A folder that bitsandbytes has written: w = SCB / 127 * q, with the scales as float16."""
    made = quantized.load_fixture("bnb-int8")
    for name in [name.removesuffix(".SCB") for name in made.tensors if name.endswith(".SCB")]:
        scale, q = made.tensors[f"{name}.SCB"].numpy(), made.tensors[f"{name}.weight"].numpy()
        made.values[name] = (scale / np.float32(127)).astype(np.float16).astype(np.float32)[:, None] * q
    return made


# Writers by quant_method; fixtures of tests.quantized, which follow the formats' documents, for schemes that are only read.
WRITERS: dict[str, list[SchemeWriter]] = {
    "gptq": list(integer_writers(GPTQWriter, (3, 4, 8))),
    "awq": list(integer_writers(AWQWriter, (4,))),
    "compressed-tensors": [
        *integer_writers(CompressedTensorsWriter, (3, 4, 5, 6, 7, 8)),
        *map(grouped, ("w8a8", "w8a8-static", *GROUPS)),
    ],
    METHOD: [TwoFourWriter("S4"), TwoFourWriter("S8")],
}
READ_ONLY: dict[str, Callable[[int], quantized.Made]] = {
    "fp8": quantized.fp8_blocks,
    "fbgemm_fp8": quantized.fp8_whole,
    "mxfp4": quantized.mxfp4,
    "bitsandbytes": lambda seed: bitsandbytes(),
}
CASES = [(method, writer) for method, writers in WRITERS.items() for writer in writers]


def numbers(writer: SchemeWriter, rng: np.random.Generator) -> np.ndarray:
    """Rows that a writer holds exactly: weights rounded to its format, uint8 [N, row bytes]."""
    w = (rng.standard_normal((N, K)) * rng.uniform(0.01, 10)).astype(np.float32)
    if isinstance(writer, TwoFourWriter):
        places = np.argsort(rng.random((N, K // 4, 4)), axis=2)[:, :, :2]
        np.put_along_axis(w.reshape(N, K // 4, 4), places, 0, axis=2)
        return target(DENSE[writer.sparse]).encode(w)
    of = getattr(writer, "integers", None)
    if of is None:
        assert isinstance(writer, SmallFloats)
        return target(writer.name).encode(w)
    name = f"int{of.bits}" + (f"-g{of.group}" if of.group else "") + ("-sym" if of.symmetric else "")
    return target(name).encode(w)


def write(folder: Path, writer: SchemeWriter, rows: np.ndarray, method: str) -> QuantizedFolder:
    folder.mkdir(exist_ok=True)
    config = {**quantized.LLAMA, "quantization_config": {**writer.settings([]), "quant_method": method}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = writer.tensors(rows, largest=3.0)
    stored = {f"{MATRIX}.{name}": np.ascontiguousarray(data) for name, data in tensors.items()}
    for field in writer.fields(N, K):
        data = stored[f"{MATRIX}.{field.name}"]
        assert (data.shape, data.nbytes) == (field.shape, field.nbytes), field
        if field.type.startswith("F8"):
            save_torch(folder, stored, f"{MATRIX}.{field.name}")
            break
    else:
        save_file(stored, folder / "model.safetensors")
    read = open_folder(folder)
    assert isinstance(read, QuantizedFolder)
    return read


def save_torch(folder: Path, stored: dict[str, np.ndarray], float8: str) -> None:
    """With one tensor as float8, which numpy lacks."""
    from safetensors.torch import save_file as save

    tensors = {name: torch.from_numpy(data) for name, data in stored.items()}
    save(tensors | {float8: tensors[float8].view(torch.float8_e4m3fn)}, folder / "model.safetensors")


@pytest.mark.parametrize(("method", "writer"), CASES, ids=lambda one: one if isinstance(one, str) else repr(one))
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_written_matrix_is_read_unchanged(
    method: str, writer: SchemeWriter, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rows = numbers(writer, np.random.default_rng(seed))
    assert writer.fits(N, K)
    read = write(tmp_path_factory.mktemp("folder"), writer, rows, method)
    expected = dequantize(rows.reshape(-1), writer.kind).reshape(N, K)
    found = read_floats(read, f"{MATRIX}.weight")
    assert read.names() == [f"{MATRIX}.weight"]
    assert found.tobytes() == expected.tobytes()
    if read.info(f"{MATRIX}.weight").kind == writer.kind:
        again = writer.tensors(read.raw(f"{MATRIX}.weight"), largest=3.0)
        assert {name: data.tobytes() for name, data in again.items()} == {
            name: data.tobytes() for name, data in writer.tensors(rows, largest=3.0).items()
        }


@pytest.mark.parametrize("method", READ_ONLY)
def test_schemes_that_are_only_read(method: str, tmp_path: Path) -> None:
    made = READ_ONLY[method](0)
    read = open_folder(made.write(tmp_path / "folder"))
    assert isinstance(read, QuantizedFolder)
    assert type(read.scheme) is SCHEMES[method]
    assert len(made.values) == len(read.scheme.matrices)
    for name, values in made.values.items():
        np.testing.assert_array_equal(read_floats(read, f"{name}.weight"), values)


def covered() -> set[str]:
    return {*WRITERS, *READ_ONLY}


def test_every_scheme_is_covered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control: a second name for GPTQ is missing here until its writers are listed, and is then read by the same reader."""
    assert set(SCHEMES) == covered()
    monkeypatch.setitem(folders.SCHEMES, "gptq-again", SCHEMES["gptq"])
    assert set(SCHEMES) != covered()
    monkeypatch.setitem(WRITERS, "gptq-again", WRITERS["gptq"])
    assert set(SCHEMES) == covered()
    writer = WRITERS["gptq-again"][0]
    rows = numbers(writer, np.random.default_rng(0))
    read = write(tmp_path / "again", writer, rows, "gptq-again")
    assert read_floats(read, f"{MATRIX}.weight").tobytes() == dequantize(rows.reshape(-1), writer.kind).tobytes()


def test_a_wrong_bit_order_changes_the_matrix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The control: words filled from the highest field."""
    from headrace.weights.schemes import gptq

    right = gptq.pack_fields
    monkeypatch.setattr(
        gptq,
        "pack_fields",
        lambda fields, bits: right(fields.reshape(len(fields), -1, 8)[:, :, ::-1].reshape(fields.shape), bits),
    )
    writer = GPTQWriter(IntegerFormat(4, 32))
    rows = numbers(writer, np.random.default_rng(0))
    read = write(tmp_path / "wrong", writer, rows, "gptq")
    assert read_floats(read, f"{MATRIX}.weight").tobytes() != dequantize(rows.reshape(-1), writer.kind).tobytes()
