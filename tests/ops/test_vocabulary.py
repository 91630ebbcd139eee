"""Every op of the vocabulary: its cases in every dtype against float64, and where a call goes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.ops import vocabulary
from headrace.ops.attention import rotate
from headrace.ops.context import Context
from headrace.ops.dtypes import TOLERANCE
from headrace.ops.registry import OPS, Op, declare
from headrace.ops.vocabulary import embed, linear, norm, residual, tap
from tests.ops.naive import turned

CPU = torch.device("cpu")
NAMES = vocabulary.__all__


def run(name: str, dtype: torch.dtype) -> dict[str, Any]:
    return {case.name: OPS[name](*case.args, **case.kwargs) for case in OPS[name].inputs(dtype, CPU)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_is_near_float64(name: str, dtype: torch.dtype) -> None:
    """The same generated calls (their values are exact in bfloat16), compared relative to the largest value."""
    exact, rounded = run(name, torch.float64), run(name, dtype)
    assert exact.keys() == rounded.keys()
    assert exact
    for case, value in exact.items():
        for a, b in zip(parts(value), parts(rounded[case]), strict=True):
            assert a.shape == b.shape
            error = float((a - b.double()).abs().max() / a.abs().max())
            assert error <= OPS[name].tol[dtype], f"{name} {case}: {error}"


def parts(value: Any) -> tuple[torch.Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def test_every_named_op_is_registered() -> None:
    assert set(NAMES) <= set(OPS)
    assert all(OPS[name].__doc__ for name in NAMES)
    with pytest.raises(ValueError, match="op 'norm' is defined twice"):
        norm.body(norm.inputs, TOLERANCE)(norm.reference)
    with pytest.raises(ValueError, match="op 'norm' is declared twice"):
        declare("headrace.ops.elementwise")(norm.reference)
    with pytest.raises(ValueError, match="op 'norm' takes"):
        norm.body(norm.inputs, TOLERANCE)(residual.reference)


class Recorded:
    """A value that is not a tensor: it notes what is called on it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __headrace_op__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Recorded":
        self.calls.append((name, args, kwargs))
        return self


@pytest.mark.parametrize("name", NAMES)
def test_a_value_that_records_takes_the_call(name: str) -> None:
    value = Recorded()
    assert OPS[name](value, "rest", key=1) is value
    assert value.calls == [(name, (value, "rest"), {"key": 1})]


def test_a_first_value_that_is_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="norm: the first value must be a tensor or be recording, not str"):
        OPS["norm"]("x", None)


def test_an_implementation_serves_its_device_and_the_reference_stays() -> None:
    def more(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    made: Op[..., Any] = Op(more, __name__).body(OPS["norm"].inputs, TOLERANCE)(more)
    made.on("cpu")(lambda x: x + 2)
    made.on("cuda")(lambda x: x + 3)
    assert float(made(torch.zeros(1))) == 2.0
    assert float(made.reference(torch.zeros(1))) == 1.0
    assert float(made(torch.zeros(1, device="meta")).device.type == "meta")


def test_the_embedding_scale_is_rounded_as_the_model_is() -> None:
    """Gemma's sqrt(640) = 25.298 is 25.25 in bfloat16, and the product is another one than with the exact scale."""
    rows = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    for dtype, scale in ((torch.bfloat16, 25.25), (torch.float32, 640**0.5)):
        table = SimpleNamespace(weight=rows.to(dtype))
        got = embed(torch.arange(20), table, scale=640**0.5)
        assert got.dtype == dtype
        assert torch.equal(got, table.weight * torch.tensor(scale, dtype=dtype))
    exact = rows.bfloat16() * 640**0.5
    assert not torch.equal(exact, embed(torch.arange(20), SimpleNamespace(weight=rows.bfloat16()), scale=640**0.5))


def test_interleaved_rotary_is_the_other_one_with_its_pairs_side_by_side() -> None:
    """Values (2i, 2i + 1) turn as (i, i + dim / 2) do, and a position turns q and k by the same angle."""
    ctx = SimpleNamespace(positions=torch.tensor([0, 3, 1000]), memo={})
    inv_freq = 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    halves = SimpleNamespace(dim=8, interleaved=False, inv_freq=inv_freq, amplitude=1.0)
    pairs = SimpleNamespace(dim=8, interleaved=True, inv_freq=inv_freq, amplitude=1.0)
    x = torch.randn(3, 2, 10, dtype=torch.float64)
    order = [0, 2, 4, 6, 1, 3, 5, 7, 8, 9]
    torch.testing.assert_close(rotate(x, pairs, ctx)[..., order], rotate(x[..., order], halves, ctx), rtol=1e-14, atol=1e-14)
    expected = turned(x[1, :, order[:8]], 3)
    torch.testing.assert_close(rotate(x, pairs, ctx)[1, :, order[:8]], expected, rtol=1e-12, atol=1e-12)


def test_norms_of_large_half_precision_values_do_not_overflow() -> None:
    """60,000 squared is beyond float16; the sum is formed in float32."""
    weight = SimpleNamespace(kind="rms", eps=1e-6, weight=torch.ones(4), bias=None)
    got = norm(torch.full((1, 4), 60000.0, dtype=torch.float16), weight)
    torch.testing.assert_close(got, torch.ones(1, 4, dtype=torch.float16))
    summed = residual(torch.zeros(1, 4, dtype=torch.float16), torch.full((1, 4), 60000.0, dtype=torch.float16), weight)
    torch.testing.assert_close(summed, got)


def test_fused_parts_are_the_parts() -> None:
    case = next(case for case in OPS["linear"].inputs(torch.float64, CPU) if case.name == "parts")
    x, w, _ = case.args
    rows = w.weight.split(w.sizes), w.bias.split(w.sizes)
    for got, weight, bias in zip(linear(x, w, None), *rows, strict=True):
        torch.testing.assert_close(got, x @ weight.t() + bias, rtol=1e-12, atol=1e-12)


def test_a_tap_records_only_the_requested_rows() -> None:
    x = torch.ones(2, 3)
    ctx = SimpleNamespace(taps={"layer.3": None})
    assert tap(x, "layer.3", ctx) is x
    assert tap(x + 1, "layer.4", ctx) is not x
    assert list(ctx.taps) == ["layer.3"]
    assert ctx.taps["layer.3"] is x
    assert Context.__dataclass_fields__["taps"].default_factory is dict
