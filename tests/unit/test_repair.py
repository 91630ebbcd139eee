"""Least squares for what is left after a cut: of dampings, what texts held out gain most by."""

import torch

from headrace.compress.least_squares import Residual

INPUTS, KEPT, OUTPUTS = 24, 16, 8


def residual(w: torch.Tensor, rows: torch.Tensor) -> Residual:
    return Residual.of_kept(w, rows.t() @ rows / len(rows), torch.arange(KEPT))


def test_a_repair_never_costs_texts_held_out() -> None:
    """From 12 rows for 16 inputs; the first damping alone is the control."""
    torch.manual_seed(0)
    w = torch.randn(OUTPUTS, INPUTS, dtype=torch.float64)
    measured, held = residual(w, torch.randn(12, INPUTS).double()), residual(w, torch.randn(400, INPUTS).double())
    change, rash = measured.repair(held), measured.repair()
    assert change is not None
    assert rash is not None
    assert held.error(change) <= held.error() < held.error(rash)


def test_a_repair_lowers_the_error_on_held_out_rows() -> None:
    """Inputs that say what those left out would: nearly all of the error goes, on texts held out, too."""
    torch.manual_seed(1)
    w, mix = torch.randn(OUTPUTS, INPUTS, dtype=torch.float64), torch.randn(KEPT, INPUTS - KEPT, dtype=torch.float64)

    def rows(count: int) -> torch.Tensor:
        left = torch.randn(count, KEPT, dtype=torch.float64)
        return torch.cat([left, left @ mix], 1)

    measured, held = residual(w, rows(200)), residual(w, rows(200))
    change = measured.repair(held)
    assert change is not None
    assert held.error(change) < 0.01 * held.error()
