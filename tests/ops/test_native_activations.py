"""Norms, quantised rows and activation functions of the native core."""

import numpy as np
import pytest
import torch

from headrace import core

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
ISAS = module.cpu_info()["isas"]


def rows(m: int, k: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng((seed, m, k))
    return (rng.standard_normal((m, k)) * np.exp(rng.standard_normal((m, k)))).astype(np.float32)


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The definition: a scale of largest / 127 per 32 columns, integers to nearest even, columns padded to 64."""
    m, k = x.shape
    padded = np.zeros((m, -(-k // 64) * 64), np.float32)
    padded[:, :k] = x
    groups = padded.reshape(m, -1, 32)
    largest = np.abs(groups).max(-1, keepdims=True)
    inverse = np.where(largest > 1e-35, np.float32(127) / np.where(largest > 1e-35, largest, 1), 0).astype(np.float32)
    q = np.rint(groups * inverse).astype(np.int8)
    return q.reshape(m, -1), np.where(largest > 1e-35, largest / np.float32(127), 0)[..., 0].astype(np.float32)


@pytest.mark.parametrize("k", [1, 31, 32, 33, 64, 172, 576])
def test_quantised_rows(k: int, isa: str) -> None:
    x = rows(5, k)
    x[1] = 0
    x[2] *= 1e-37
    x[3, k // 2] = 1e30
    q, scale, scaled_sum, neg32, neg16 = module.quantize_a8(x, isa=isa)
    expected_q, expected_scale = quantized(x)
    assert np.array_equal(q, expected_q)
    assert np.array_equal(scale, expected_scale)
    sums = q.reshape(5, -1, 16).astype(np.int32).sum(-1)
    assert np.array_equal(neg16, -sums)
    assert np.array_equal(neg32, -sums.reshape(5, -1, 2).sum(-1))
    assert np.array_equal(scaled_sum, scale * -neg32.astype(np.float32))
    assert np.abs(q).max() <= 127


def test_a_value_that_is_not_finite_shows_in_its_group(isa: str) -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = rows(1, 96)
        x[0, 40] = bad
        q, scale, *_ = module.quantize_a8(x, isa=isa)
        assert np.isnan(scale[0, 1])
        assert np.isfinite(scale[0, [0, 2, 3]]).all()
        assert not q[0, 32:64].any()


@pytest.mark.parametrize("k", [5, 64, 172, 577])
def test_norms(k: int, isa: str) -> None:
    x, weight, bias = rows(7, k), rows(1, k, 1)[0], rows(1, k, 2)[0]
    exact = torch.from_numpy(x).double()
    root = exact * torch.rsqrt((exact**2).mean(-1, keepdim=True) + 1e-6) * torch.from_numpy(weight)
    ours = module.norm(x, "rms", weight, eps=1e-6, isa=isa)
    assert torch.allclose(torch.from_numpy(ours).double(), root, rtol=3e-6, atol=1e-9)
    layer = torch.nn.functional.layer_norm(
        exact, (k,), torch.from_numpy(weight).double(), torch.from_numpy(bias).double(), 1e-5
    )
    ours = module.norm(x, "layer", weight, bias, eps=1e-5, isa=isa)
    assert torch.allclose(torch.from_numpy(ours).double(), layer, rtol=3e-6, atol=1e-5)


@pytest.mark.parametrize("k", [5, 172, 576])
def test_a_norm_does_not_depend_on_other_rows_nor_on_the_instruction_set(k: int, isa: str) -> None:
    x, weight = rows(9, k), rows(1, k, 1)[0]
    for kind, bias in (("rms", None), ("layer", rows(1, k, 2)[0])):
        whole = module.norm(x, kind, weight, bias, eps=1e-5, isa=ISAS[0])
        assert np.array_equal(module.norm(x, kind, weight, bias, eps=1e-5, isa=isa), whole)
        assert np.array_equal(module.norm(x[4:5], kind, weight, bias, eps=1e-5, isa=isa), whole[4:5])
        fused = module.quantize_a8(x, norm=kind, weight=weight, bias=bias, eps=1e-5, isa=isa)
        apart = module.quantize_a8(whole, isa=isa)
        assert all(np.array_equal(a, b) for a, b in zip(fused, apart, strict=True))


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "gelu"])
def test_activation_functions(name: str, isa: str) -> None:
    x = np.concatenate([np.linspace(-100, 100, 4003), [0.0, -0.0, 1e-30, -1e-30, 3e38, -3e38]]).astype(np.float32)[None]
    exact = torch.from_numpy(x).double()
    near = {"rtol": 2e-6, "atol": 1e-8}
    if name == "silu":
        wanted = torch.nn.functional.silu(exact)
    elif name == "gelu_tanh":
        wanted = torch.nn.functional.gelu(exact, approximate="tanh")
    else:
        wanted, near = torch.nn.functional.gelu(exact), {"rtol": 5e-7, "atol": 1e-6}  # the error of erfc, times |x| / 2
    ours = module.activate(name, x, isa=isa)
    assert np.allclose(ours, wanted.numpy(), **near)
    assert np.array_equal(ours, module.activate(name, x, isa=ISAS[0]))
    up = np.clip(rows(1, x.size), -1, 1)
    assert np.array_equal(module.activate(name, x, up, isa=isa), ours * up)


def test_invalid_arguments_are_refused() -> None:
    x = rows(2, 8)
    with pytest.raises(ValueError, match="silu, gelu_tanh or gelu, not relu"):
        module.activate("relu", x)
    with pytest.raises(ValueError, match="rms or layer, not batch"):
        module.norm(x, "batch", x[0])
    with pytest.raises(ValueError, match="one entry per column"):
        module.norm(x, "rms", x[0, :4].copy())
