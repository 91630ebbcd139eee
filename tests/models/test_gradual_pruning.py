"""Pruning in rounds during a training: the shares of the paper, exact counts, zeros that stay, the same bytes after a kill."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.compress.grids.keep import keep_mask, magnitude, parse_sparsity
from headrace.compress.pipeline import Pipeline
from headrace.compress.pruning import PruningSchedule, is_pruned
from headrace.compress.report import Report
from headrace.compress.write import compress, predict
from headrace.models.base import Model
from headrace.training.distil import Healing
from headrace.training.gradual import GradualPruning
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import load_model, read_tensor
from tests.killed import each_step, killed_at
from tests.models.test_walk import book, model, pipeline  # noqa: F401

METHOD = ("heal", "magnitude")
ROUNDS: dict[str, Any] = {"heal_steps": 8, "heal_rate": 1e-2, "prune_rounds": 4, "method": METHOD, "format": "F32"}


def test_shares_follow_the_cubic_schedule() -> None:
    """By hand, s = 0.5 in four rounds: 0.5 · (1 − (3/4)³, 1 − (1/2)³, 1 − (1/4)³, 1)."""
    half, quads = (PruningSchedule(parse_sparsity(sparsity), 4) for sparsity in ("0.5", "2:4"))
    assert [half.sparsity_after(done).share for done in range(5)] == [0.0, 0.2890625, 0.4375, 0.4921875, 0.5]
    assert PruningSchedule(half.final, 1).sparsity_after(1) == half.final
    assert [quads.sparsity_after(done).kept for done in range(5)] == [4, 3, 2, 2, 2]
    assert half.first_steps(16) == [0, 2, 4, 6]
    assert half.first_steps(9) == [0, 1, 2, 3]
    assert PruningSchedule(half.final, 1).first_steps(10) == [0]


def matrices(path: Path) -> dict[str, np.ndarray]:
    source = GGUFFile(path)
    names = [name for name in source.names() if is_pruned(name, source.info(name).shape)]
    return {name: read_tensor(source, name).numpy() for name in names}


@pytest.mark.parametrize("sparsity", ["0.5", "2:4", "layer:0.5", "global:0.5"])
def test_rounds_end_with_exactly_the_share_of_zeros(sparsity: str, model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    report = compress(model, tmp_path / "out.gguf", pipeline(book, sparsity=sparsity, **ROUNDS), healer=Healing())
    zeros = {name: values == 0 for name, values in matrices(tmp_path / "out.gguf").items()}
    if sparsity == "0.5":
        assert all((zero.sum(1) == zero.shape[1] // 2).all() for zero in zeros.values())
    elif sparsity == "2:4":
        assert all((zero.reshape(-1, 4).sum(1) == 2).all() for zero in zeros.values())
    elif sparsity == "layer:0.5":
        assert all(2 * zero.sum() == zero.size for zero in zeros.values())
    else:
        share = sum(zero.sum() for zero in zeros.values()) / sum(zero.size for zero in zeros.values())
        assert share == pytest.approx(0.5, abs=1e-3)
    assert report.zeros == pytest.approx(0.5, abs=1e-3)
    assert report.healed is not None
    assert report.healed.after.kl < 0.9 * report.healed.before.kl


def zeros_by_round(monkeypatch: pytest.MonkeyPatch, train: Any) -> list[list[np.ndarray]]:
    """The zeros of all matrices just before each round, and of the file that `train` returns."""
    seen: list[list[np.ndarray]] = []
    right = GradualPruning.before_step

    def before_step(self: GradualPruning, step: int) -> None:
        if step in self.starts:
            seen.append([matrix == 0 for matrix in self.matrices])
        right(self, step)
        if step in self.starts:
            seen.append([matrix == 0 for matrix in self.matrices])

    with monkeypatch.context() as patch:
        patch.setattr(GradualPruning, "before_step", before_step)
        train()
    return seen


def kept(seen: list[list[np.ndarray]]) -> bool:
    """True if no zero of one moment is missing at the next one."""
    pairs = pairwise(seen)
    return all(not (before & ~after).any() for one, two in pairs for before, after in zip(one, two, strict=True))


def test_a_zero_stays_through_all_rounds(
    model: Path,  # noqa: F811
    book: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Control: without setting the zeros again after each update, the optimizer's moments bring pruned weights back."""
    made = 0

    def train() -> None:
        nonlocal made
        made += 1
        compress(model, tmp_path / f"{made}.gguf", pipeline(book, sparsity="0.5", **ROUNDS), healer=Healing())

    seen = zeros_by_round(monkeypatch, train)
    assert len(seen) == 2 * 4
    assert kept(seen)
    grown = [sum(int(zero.sum()) for zero in zeros) for zeros in seen[1::2]]
    assert grown[0] < grown[1] < grown[2] <= grown[3], "the last round adds less than a weight of a row of 32"
    with monkeypatch.context() as patch:
        patch.setattr(GradualPruning, "after_update", lambda self: None)
        assert not kept(zeros_by_round(monkeypatch, train))


def loaded(path: Path) -> Model:
    return load_model(GGUFFile(path))


@pytest.mark.parametrize("sparsity", ["0.5", "layer:0.3", "1:4"])
def test_rounds_without_training_remove_the_weights_of_one_round(sparsity: str, model: Path) -> None:  # noqa: F811
    """So that they are refused: the smallest weights of a matrix that has lost its smallest are those of one round."""
    final = parse_sparsity(sparsity)
    whole, rounds, once = (loaded(model) for _ in range(3))
    gradual = GradualPruning(rounds, PruningSchedule(final, 4), 8)
    for step in range(8):
        gradual.before_step(step)
    others = GradualPruning(once, PruningSchedule(final, 1), 8)
    others.before_step(0)
    before = GradualPruning(whole, PruningSchedule(final, 1), 8).matrices
    for values, one, other in zip(before, gradual.matrices, others.matrices, strict=True):
        assert np.array_equal(one, other)
        assert np.array_equal(one != 0, keep_mask(magnitude(values), final) & (values != 0))


def test_training_between_rounds_changes_which_weights_go(model: Path, book: Path, tmp_path: Path) -> None:  # noqa: F811
    """Four rounds and one, as many steps, the same texts: other zeros, and both end at the share."""
    zeros = []
    for rounds in (4, 1):
        wanted = pipeline(book, sparsity="0.5", **{**ROUNDS, "prune_rounds": rounds})
        compress(model, tmp_path / f"{rounds}.gguf", wanted, healer=Healing())
        zeros.append([values == 0 for values in matrices(tmp_path / f"{rounds}.gguf").values()])
    assert any(not np.array_equal(one, other) for one, other in zip(*zeros, strict=True))
    at_once = [keep_mask(magnitude(values), parse_sparsity("0.5")) for values in matrices(model).values()]
    assert all(np.array_equal(zero, ~mask) for zero, mask in zip(zeros[1], at_once, strict=True))


def test_a_killed_training_resumes_to_the_same_bytes(
    model: Path,  # noqa: F811
    book: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed in the second round, after the last, before the file and in the last pass, which rounds by GPTQ around the zeros.
    Control: a training that forgets its zeros at each update comes to other bytes."""
    each_step(monkeypatch)
    wanted = pipeline(book, sparsity="0.5", **{**ROUNDS, "method": (*METHOD, "gptq"), "format": "Q4_0"})

    def compress_to(name: str) -> Report:
        return compress(model, tmp_path / name, wanted, healer=Healing())

    report = compress_to("whole.gguf")
    assert report.zeros is not None
    assert report.zeros >= 0.5
    for file, count in (("checkpoint.safetensors", 2), ("checkpoint.safetensors", 4), ("healed.gguf", 1), ("state.json", 1)):
        killed_at(file, count, lambda: compress_to("out.gguf"))
    compress_to("out.gguf")
    whole = (tmp_path / "whole.gguf").read_bytes()
    assert (tmp_path / "out.gguf").read_bytes() == whole
    monkeypatch.setattr(GradualPruning, "after_update", lambda self: None)
    compress_to("forgetful.gguf")
    assert (tmp_path / "forgetful.gguf").read_bytes() != whole


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"method": ("magnitude",), "heal_steps": None}, "--prune-rounds 4: without training between them rounds remove the"),
        ({"method": ("heal", "wanda")}, "--prune-rounds 4 needs the method magnitude, as in --method heal,magnitude"),
        ({"prune_rounds": 0}, "--prune-rounds 0: give 1 to 4, half of the steps of --heal-steps"),
        ({"prune_rounds": 9}, "--prune-rounds 9: give 1 to 4"),
        ({"prune_rounds": None}, "heal,magnitude cannot be: heal trains what a cut has left, or prunes in rounds"),
        ({"sparsity": None}, "magnitude needs a sparsity"),
    ],
)
def test_invalid_rounds_are_a_one_line_error(changes: dict[str, Any], line: str, model: Path) -> None:  # noqa: F811
    settings = {**ROUNDS, "heal_rate": None, "sparsity": "0.5", **changes}
    with pytest.raises(ValueError, match=line) as found:
        predict(model, Pipeline(**settings))
    assert "\n" not in str(found.value)
