"""Masks keep what scores say, in exact numbers; each score is what its paper says."""

import numpy as np
import pytest
import torch

from headrace.compress.grids.keep import LAYER, ROW, Sparsity, keep_mask, magnitude, obs, parse_sparsity, wanda
from headrace.compress.rounding import KeptBlocks

SHARES = [Sparsity(share, per=per) for share in (0.0, 0.3, 0.5, 0.99) for per in (ROW, LAYER)]
NEIGHBOURS = [parse_sparsity(text) for text in ("2:4", "1:4", "4:8", "1:2")]


def matrix(n: int = 12, k: int = 48, seed: int = 0) -> np.ndarray:
    """Few different sizes, so that there are ties."""
    return np.random.default_rng(seed).integers(-6, 7, (n, k)).astype(np.float32) / 4


def slowly(scores: np.ndarray, sparsity: Sparsity) -> np.ndarray:
    """The same in float64 by sorting: largest first, then farthest left."""
    n, k = scores.shape
    groups = scores.astype(np.float64).reshape(
        {ROW: n, LAYER: 1}[sparsity.per] if not sparsity.of else n * k // sparsity.of, -1
    )
    room = sparsity.kept or groups.shape[1] - round(sparsity.share * groups.shape[1])
    mask = np.zeros(groups.shape, bool)
    for row, values in zip(mask, groups, strict=True):
        row[sorted(range(len(values)), key=lambda j: (-values[j], j))[:room]] = True
    return mask.reshape(n, k)


@pytest.mark.parametrize("sparsity", [*SHARES, *NEIGHBOURS], ids=str)
def test_masks_keep_the_largest_in_exact_numbers(sparsity: Sparsity) -> None:
    scores = magnitude(matrix())
    mask = keep_mask(scores, sparsity)
    assert np.array_equal(mask, slowly(scores, sparsity))
    assert np.array_equal(mask, keep_mask(scores.copy(), sparsity))
    if sparsity.of:
        assert (mask.reshape(-1, sparsity.of).sum(1) == sparsity.kept).all()
    elif sparsity.per == ROW:
        assert (~mask).sum(1).tolist() == [round(sparsity.share * 48)] * 12
    else:
        assert (~mask).sum() == round(sparsity.share * 12 * 48)
    lost, others = (np.abs(matrix())[chosen].astype(np.float64).sum() for chosen in (~mask, mask))
    assert lost < others or sparsity.share > 0.5, "the control: the complement loses more"


def test_weights_compete_within_a_row() -> None:
    """The control: compared over the whole layer, rows with small weights lose all of theirs."""
    w = np.where(matrix() == 0, np.float32(0.25), matrix())
    w[:6] /= 100
    by_row, by_layer = (keep_mask(magnitude(w), Sparsity(0.5, per=per)) for per in (ROW, LAYER))
    assert by_row.sum(1).tolist() == [24] * 12
    assert by_layer[:6].sum() == 0
    assert by_layer.sum() == by_row.sum()


def test_sparsegpt_removes_a_share_of_a_block_over_all_rows() -> None:
    """With layer:0.5, as its authors do; control: with 0.5 each row loses as many."""
    w, upper = torch.from_numpy(matrix()) + 0.1, torch.eye(48)
    w[:6] /= 100
    for text, per_row in (("layer:0.5", {0, 24}), ("0.5", {12})):
        blocks = KeptBlocks(parse_sparsity(text), block=24)
        mask = torch.stack([blocks.at(j, w, upper) for j in range(24)], 1)
        assert int(mask.sum()) == 12 * 12
        assert set(mask.sum(1).tolist()) == per_row, text
    assert str(parse_sparsity("layer:0.5")) == "layer:0.5"
    for wrong in ("layer:2:4", "layer:1", "row:0.5", "layer:"):
        with pytest.raises(ValueError, match="is not a sparsity"):
            parse_sparsity(wrong)


def test_wanda() -> None:
    """Equal norms are magnitude; a diagonal Hessian makes OBS the same order; columns in another order, the same choice."""
    rng = np.random.default_rng(1)
    w, norms = rng.standard_normal((16, 32)).astype(np.float32), rng.uniform(0.1, 3, 32).astype(np.float32)
    half = Sparsity(0.5)
    assert np.array_equal(keep_mask(wanda(w, np.full(32, 0.7, np.float32)), half), keep_mask(magnitude(w), half))
    assert not np.array_equal(keep_mask(wanda(w, norms), half), keep_mask(magnitude(w), half))
    hessian = np.diag(np.square(norms.astype(np.float64)))
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T
    assert np.array_equal(keep_mask(obs(w.astype(np.float64), np.diagonal(upper)), half), keep_mask(wanda(w, norms), half))
    order = rng.permutation(32)
    assert np.array_equal(keep_mask(wanda(w[:, order], norms[order]), half), keep_mask(wanda(w, norms), half)[:, order])
    np.testing.assert_allclose(wanda(w, norms), np.abs(w.astype(np.float64)) * norms.astype(np.float64), rtol=1e-6)


def test_obs_is_the_error_of_losing_a_weight() -> None:
    """The square error that remains when the best others make up for it, by least squares over them in float64."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((40, 6)) @ rng.standard_normal((6, 6))
    hessian, w = x.T @ x, rng.standard_normal((1, 6))
    inverse = np.linalg.inv(hessian)
    for j in range(6):
        others = [i for i in range(6) if i != j]
        shift = -np.linalg.lstsq(x[:, others], -w[0, j] * x[:, j], rcond=None)[0]
        left = np.square(x[:, others] @ shift - w[0, j] * x[:, j]).sum()
        assert obs(w[:, j : j + 1], np.sqrt(inverse[j, j]))[0, 0] == pytest.approx(left)


@pytest.mark.parametrize("sparsity", [*SHARES, *NEIGHBOURS], ids=str)
def test_the_loop_gets_exact_numbers(sparsity: Sparsity) -> None:
    """Column by column, of weights that do not change: for neighbours the mask of the whole; for shares the same count."""
    w = matrix(k=208)
    upper = np.diag(np.random.default_rng(3).uniform(0.5, 2, 208)).astype(np.float32)
    keep = KeptBlocks(sparsity, block=64)
    made = torch.stack([keep.at(j, torch.from_numpy(w), torch.from_numpy(upper)) for j in range(208)], dim=1).numpy()
    whole = keep_mask(obs(w, np.diagonal(upper)), sparsity)
    assert made.sum() == whole.sum()
    if sparsity.of:
        assert np.array_equal(made, whole)
    elif sparsity.per == ROW:
        assert made.sum(1).tolist() == whole.sum(1).tolist()


def test_the_mask_uses_updated_weights() -> None:
    w, upper = torch.ones(3, 8), torch.eye(8)
    keep = KeptBlocks(parse_sparsity("2:4"))
    first = [keep.at(j, w, upper) for j in range(4)]
    w[:, 6:] = 5
    second = [keep.at(j, w, upper) for j in range(4, 8)]
    assert torch.stack(first + second, dim=1).tolist() == [[True, True, False, False, False, False, True, True]] * 3
    with pytest.raises(ValueError, match="column 2 comes before the first of its 4"):
        KeptBlocks(parse_sparsity("2:4")).at(2, w, upper)


@pytest.mark.parametrize("text", ["4:2", "0:4", "2:2", "1", "1.5", "-0.1", "nan", "half", ""])
def test_an_invalid_sparsity_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="write 2:4, or a share"):
        parse_sparsity(text)
    assert [str(parse_sparsity(said)) for said in ("2:4", "0.5", "0.25")] == ["2:4", "0.5", "0.25"]


def test_nan_scores_and_indivisible_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="scores are NaN"):
        keep_mask(np.full((1, 4), np.nan), Sparsity(0.5))
    with pytest.raises(ValueError, match="rows of 6 weights cannot be divided into groups of 4"):
        keep_mask(np.ones((1, 6)), parse_sparsity("2:4"))
