"""The column loop: against optimal brain surgery said plainly, and for what must be so whatever the numbers."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.compress.grids.codes import CODES
from headrace.compress.grids.encode import encode
from headrace.compress.grids.loop import Grids, Keep, Round, StoredGrids, reconstruct
from headrace.compress.least_squares import DAMPING, inverse_factor, output_error
from headrace.weights.decode import dequantize_numpy
from headrace.weights.kinds import KINDS


class Halves:
    """Every column in steps of a half."""

    def at(self, j: int, w: Tensor) -> Round:
        return lambda column: (2 * column).round() / 2


class Largest:
    """Of each four columns in a row the two with the largest w² / U², chosen when the loop comes to them."""

    def at(self, j: int, w: Tensor, upper: Tensor) -> Tensor:
        if j % 4 == 0:
            scores = (w[:, j : j + 4] / upper.diagonal()[j : j + 4]).square()
            self.kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(2, dim=1).indices, True)
        return self.kept[:, j % 4]


def moments(k: int, rows: int = 200, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Σ x xᵀ / n of correlated inputs."""
    rng = torch.Generator().manual_seed(seed)
    mixed = torch.randn(rows, k, generator=rng, dtype=torch.float64) @ torch.randn(k, k, generator=rng, dtype=torch.float64)
    return (mixed.t() @ mixed / rows).to(dtype)


def weights(n: int, k: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def surgery(w: Tensor, hessian: Tensor, value: Callable[[int, Tensor, Tensor], Tensor]) -> Tensor:
    """Column after column is set to `value`; the rest answers by H⁻¹ of what is left, which is inverted anew each time."""
    w, k = w.clone(), w.shape[1]
    for j in range(k):
        inverse = torch.linalg.inv(hessian[j:, j:])
        new = value(j, w, inverse)
        w[:, j:] -= torch.outer((w[:, j] - new) / inverse[0, 0], inverse[0])
        w[:, j] = new
    return w


@pytest.mark.parametrize("block", [1, 5, 128])
@pytest.mark.parametrize("what", ["round", "prune", "both"])
def test_the_loop_is_optimal_brain_surgery(block: int, what: str) -> None:
    hessian, w = moments(24), weights(7, 24)
    made = inverse_factor(hessian)
    assert made is not None
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(24, dtype=torch.float64)
    torch.testing.assert_close(made.factor.t() @ made.factor, torch.linalg.inv(damped), rtol=1e-9, atol=1e-12)
    keep, rounded = Largest(), Halves().at(0, w)
    block = block if what == "round" or block == 128 else 4  # whole groups of four

    def value(j: int, w: Tensor, inverse: Tensor) -> Tensor:
        new = w[:, j] if what == "prune" else rounded(w[:, j])
        if what == "round":
            return new
        return torch.where(keep.at(j, w, made.factor), new, 0.0)

    expected = surgery(w, damped, value)
    found = reconstruct(
        w,
        made.factor,
        grids=None if what == "prune" else Halves(),
        keep=None if what == "round" else Largest(),
        block=block,
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert output_error(found - w, hessian) < output_error(rounded(w) - w, hessian) or what != "round"


def test_a_wrong_sign_raises_the_error() -> None:
    """The control: an update that adds to the error instead of making it good."""
    hessian, w = moments(24), weights(7, 24)
    made = inverse_factor(hessian)
    assert made is not None
    right, nearest = reconstruct(w, made.factor, grids=Halves(), keep=None), Halves().at(0, w)(w)
    flipped = 2 * made.factor.diag().diag() - made.factor  # the diagonal stays
    wrong = reconstruct(w, flipped, grids=Halves(), keep=None)
    errors = [output_error(one - w, hessian) for one in (right, nearest, wrong)]
    assert errors == sorted(errors)
    assert errors[2] > 4 * errors[0]


def test_joint_rounding_and_pruning_lose_about_the_sum() -> None:
    """The control: steps that are the mask's scores, which one name for both would make."""
    hessian, w = moments(64, rows=500), weights(16, 64)
    made = inverse_factor(hessian)
    assert made is not None
    factor = made.factor

    class Scores:
        def at(self, j: int, w: Tensor) -> Round:
            step = (w[:, j] / factor[j, j]).square()
            return lambda column: (column / step).round() * step

    def lost(grids: Grids | None, keep: Keep | None) -> float:
        return output_error(reconstruct(w, factor, grids=grids, keep=keep) - w, hessian)

    most = 1.2 * (lost(None, Largest()) + lost(Halves(), None))
    assert lost(Halves(), Largest()) <= most < lost(Scores(), Largest())


def test_as_many_rows_as_inputs_overfit() -> None:
    """The error falls on them and not on others, where four times as many serve both."""
    k, rng = 64, torch.Generator().manual_seed(3)
    mix, w = torch.randn(k, k, generator=rng, dtype=torch.float64), weights(16, k)

    def moment(rows: int) -> Tensor:
        x = torch.randn(rows, k, generator=rng, dtype=torch.float64) @ mix
        return x.t() @ x / rows

    others = moment(20 * k)

    def errors(rows: int) -> tuple[float, float]:
        own = moment(rows)
        made = inverse_factor(own)
        assert made is not None
        change = reconstruct(w, made.factor, grids=Halves(), keep=None) - w
        return output_error(change, own), output_error(change, others)

    (own, held), (many, many_held) = errors(k), errors(4 * k)
    assert own < many
    assert held > 1.3 * many_held
    assert held / own > 1.5 * many_held / many


def test_an_order_is_that_of_the_sorted_matrix() -> None:
    hessian, w = moments(24), weights(7, 24)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    made, sorted_ = inverse_factor(hessian, order), inverse_factor(hessian[order][:, order])
    assert made is not None
    assert sorted_ is not None
    found = reconstruct(w, made.factor, grids=Halves(), keep=None, order=order)
    torch.testing.assert_close(found[:, order], reconstruct(w[:, order], sorted_.factor, grids=Halves(), keep=None))
    plain = inverse_factor(hessian)
    assert plain is not None
    assert not torch.equal(found, reconstruct(w, plain.factor, grids=Halves(), keep=None))


def test_exact_weights_stay_unchanged() -> None:
    made = inverse_factor(moments(24))
    assert made is not None
    w = weights(7, 24)
    assert torch.equal(reconstruct(w, made.factor, grids=None, keep=None), w)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", CODES)
def test_with_independent_inputs_it_is_rounding_to_nearest(kind: str, ordered: bool) -> None:
    """H diagonal: no column can make good another's error. And what comes out is what the file's rows say."""
    k = KINDS[kind].block * 2
    w = weights(6, k, dtype=torch.float32)
    diagonal = torch.rand(k, generator=torch.Generator().manual_seed(3)) + 0.1
    order = diagonal.argsort(descending=True) if ordered else None
    made = inverse_factor(diagonal.diag(), order)
    assert made is not None
    grids = stored_grids(w, kind, diagonal.numpy(), order)
    rows, values = grids.rows(reconstruct(w, made.factor, grids=grids, keep=None, order=order))
    np.testing.assert_array_equal(rows, rows_by_groups(w, kind, diagonal.numpy(), ordered))
    np.testing.assert_array_equal(values.numpy().reshape(-1), dequantize_numpy(rows.reshape(-1), kind))


def stored_grids(w: Tensor, kind: str, importance: np.ndarray, order: Tensor | None) -> StoredGrids:
    """With an order the scales of the whole matrix, else those that are found on the way."""
    rows = None if order is None else encode(w.numpy(), kind, importance)
    return StoredGrids((w.shape[0], w.shape[1]), kind, importance, rows=rows, order=order)


def rows_by_groups(w: Tensor, kind: str, importance: np.ndarray, whole: bool) -> np.ndarray:
    """Rounded to nearest, all columns together or block by block, with the importance of the block alone."""
    if whole:
        return encode(w.numpy(), kind, importance)
    size = KINDS[kind].block
    blocks = [
        encode(np.ascontiguousarray(w.numpy()[:, at : at + size]), kind, importance[at : at + size])
        for at in range(0, w.shape[1], size)
    ]
    return np.concatenate(blocks, axis=1)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q3_K", "IQ4_NL", "Q5_1"])
def test_correlated_inputs_lose_less_than_by_rounding_to_nearest(kind: str, ordered: bool) -> None:
    """Over all outputs: single rows may lose more. Every number is one of its group's values."""
    k = 256
    hessian, w = moments(k, rows=1000, dtype=torch.float32), weights(64, k, dtype=torch.float32)
    importance = hessian.diagonal().numpy()
    order = hessian.diagonal().argsort(descending=True, stable=True) if ordered else None
    made = inverse_factor(hessian, order)
    assert made is not None
    grids = stored_grids(w, kind, importance, order)
    result = reconstruct(w, made.factor, grids=grids, keep=None, order=order)
    _, values = grids.rows(result)
    torch.testing.assert_close(values, result, rtol=1e-5, atol=1e-6)  # the loop's values are the file's
    nearest = torch.from_numpy(dequantize_numpy(encode(w.numpy(), kind, importance).reshape(-1), kind).reshape(w.shape))
    assert output_error(values - w, hessian) < 0.8 * output_error(nearest - w, hessian)


def test_moments_that_cannot_be_inverted_are_damped_or_refused() -> None:
    hessian = moments(16)
    hessian[3] = hessian[:, 3] = 0
    made = inverse_factor(hessian)
    assert made is not None
    assert (made.damping, made.dead.nonzero().tolist()) == (DAMPING, [[3]])
    indefinite = torch.eye(16, dtype=torch.float64)
    indefinite[0, 0] = -0.05
    again = inverse_factor(indefinite)
    assert again is not None
    assert again.damping == pytest.approx(10 * DAMPING)
    assert inverse_factor(-torch.eye(4)) is None
    assert inverse_factor(torch.full((4, 4), torch.nan)) is None


def test_another_order_needs_scales() -> None:
    with pytest.raises(ValueError, match="needs scales that are computed before the loop"):
        StoredGrids((2, 32), "Q4_0", order=torch.arange(32))


def test_output_error_equals_the_error_on_the_rows() -> None:
    rng = torch.Generator().manual_seed(0)
    x, change = torch.randn(50, 9, generator=rng, dtype=torch.float64), weights(4, 9)
    assert output_error(change, x.t() @ x / 50) == pytest.approx(float((x @ change.t()).square().mean(0).sum()))
