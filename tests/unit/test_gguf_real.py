"""Real GGUF files against the gguf package. They are not in the repository: HEADRACE_TEST_MODELS says where they are."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from headrace.weights.decode import dequantize, dequantize_numpy
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import read_tensor

MODELS = Path(os.environ.get("HEADRACE_TEST_MODELS", Path.home() / ".cache/headrace-test-models"))
SMOL = "SmolLM2-135M-Instruct.Q4_1.gguf"
QWEN = ("Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf")

pytestmark = pytest.mark.weights


def model(name: str) -> Path:
    path = MODELS / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {MODELS} (HEADRACE_TEST_MODELS)")
    return path


def test_header_equals_the_oracle() -> None:
    path = model(SMOL)
    file, oracle = GGUFFile(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in oracle.fields.items() if not name.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for name, value in fields.items():
        own = file.metadata[name]
        assert (own.tolist() if hasattr(own, "tolist") else own) == value, name
    assert file.names() == [tensor.name for tensor in oracle.tensors]
    for tensor in oracle.tensors:
        info = file.info(tensor.name)
        assert (info.shape, info.kind) == (tuple(reversed(tensor.shape.tolist())), tensor.tensor_type.name)
        np.testing.assert_array_equal(file.raw(tensor.name).reshape(-1), tensor.data.view(np.uint8).reshape(-1))


@pytest.mark.parametrize("name", [SMOL, *QWEN])
def test_one_tensor_of_each_type_is_dequantised_as_by_the_oracle(name: str) -> None:
    with GGUFFile(model(name)) as file:
        smallest = {}
        for tensor in file.names():
            info = file.info(tensor)
            if info.kind not in smallest or info.nbytes < smallest[info.kind].nbytes:
                smallest[info.kind] = info
        assert len(smallest) >= 3
        for info in smallest.values():
            data = file.raw(info.name)[:512]
            expected = gguf.dequantize(data, gguf.GGMLQuantizationType[info.kind]).reshape(-1)
            flat = data.reshape(-1)
            np.testing.assert_array_equal(dequantize(flat, info.kind).view(np.uint32), expected.view(np.uint32))
            np.testing.assert_array_equal(dequantize_numpy(flat, info.kind).view(np.uint32), expected.view(np.uint32))
            values = torch.from_numpy(expected.copy())
            read = read_tensor(file, info.name, torch.bfloat16).reshape(-1)[: values.numel()]
            torch.testing.assert_close(read, values.to(torch.bfloat16), rtol=0, atol=0)
