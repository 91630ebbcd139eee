"""Each compression method next to its control, and next to itself switched off, on a tiny model with two large channels."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import compression_controls
from benchmarks.compression_controls import Setting, compressed
from headrace.compress.base import Matrix, Visit
from headrace.compress.cutting import Neurons
from headrace.compress.folding import ALPHAS, AWQ, LayerOutputs, RoundedInput, SmoothQuant, rounded_scaled
from headrace.compress.grids.keep import parse_sparsity
from headrace.compress.kv_heads import KVHeads
from headrace.compress.layer_pass import LayerPass
from headrace.compress.least_squares import Residual
from headrace.compress.pipeline import Pipeline
from headrace.compress.report import Report
from headrace.compress.rounding import Rounding
from headrace.compress.structure import Cut, pruned_config
from headrace.compress.texts import draw_texts
from headrace.compress.work_folder import WorkFolder
from headrace.compress.write import compress
from headrace.data.progress import Progress
from headrace.models.layers import Linear
from headrace.startup.opening import open_files
from headrace.weights.gguf import GGUFFile
from headrace.weights.loader import read_tensor
from tests.models.lossy import kinds
from tests.tiny_files import Sizes, write_tiny_gguf

LARGE = [3, 17]  # channels whose inputs are 40 times as large


def planted(tensors: dict[str, np.ndarray]) -> None:
    """The same model with large channels after the second norm: the weights that read them are smaller in proportion."""
    for layer in range(2):
        tensors[f"blk.{layer}.ffn_norm.weight"][LARGE] *= 40
        for name in ("gate", "up"):
            tensors[f"blk.{layer}.ffn_{name}.weight"][:, LARGE] /= 40


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", sizes=Sizes(ffn=64), edit=planted)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("etaoinshrdlu"), rng.integers(1, 9))) for _ in range(900)]
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(" ".join(words))
    return path


class Made:
    """OUT of each pipeline, made once: report and weights of the widest matrix."""

    def __init__(self, model: Path, book: Path, folder: Path) -> None:
        self._model, self._book, self._folder = model, book, folder
        self.of = cache(self._of)

    def _of(self, method: str, texts: bool = True, **options: Any) -> tuple[Report, Tensor]:
        out = self._folder / f"{method}-{texts}-{len(list(self._folder.iterdir()))}.gguf"
        more = {"calibrate": str(self._book), "tokens": 1024} if texts else {}
        report = compress(
            self._model, out, Pipeline(method=tuple(method.split(",")), format="Q4_0", threads=1, **more, **options)
        )
        return report, read_tensor(GGUFFile(out), "blk.0.ffn_down.weight")


@pytest.fixture(scope="module")
def made(model: Path, book: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(model, book, tmp_path_factory.mktemp("out"))


def lost(report: Report, part: str = "") -> float:
    return sum(one.error for name, one in report.outputs.items() if part in name)


def test_rtn_with_texts_weighs_inputs_by_their_importance(made: Made) -> None:
    """`rtn --calibrate TEXTS` is `weighted`; rtn without texts has other scales, and a larger error on the outputs."""
    report, weighted = made.of("rtn")
    assert torch.equal(weighted, made.of("weighted")[1])
    assert not torch.equal(weighted, made.of("rtn", texts=False)[1])
    assert not made.of("rtn", texts=False)[0].outputs
    assert all(one.error == one.nearest for one in report.outputs.values())


def test_to_nearest_in_a_report_is_rtn_with_the_same_texts(made: Made) -> None:
    """In the first layer, whose inputs no rounding has changed yet."""
    control = made.of("rtn")[0].outputs
    for name, one in made.of("gptq")[0].outputs.items():
        if name.startswith("layers.0"):
            assert one.nearest == pytest.approx(control[name].error, rel=1e-6)
            assert one.error < one.nearest


def test_awq_gains_over_rounding_with_importance(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """And switched off it is that control, to the bit."""
    control, rows = made.of("weighted")
    assert lost(made.of("awq")[0], "gate_up") < 0.8 * lost(control, "gate_up")
    monkeypatch.setattr(AWQ, "visit", lambda self, visit: None)
    assert torch.equal(made.of("awq", seed=0)[1], rows)


def first_visit(model: Path, book: Path, folder: Path, format: str = "Q4_0") -> Visit:
    opened = open_files(model)
    texts = draw_texts(opened, str(book), 1024, 0, Progress())
    return next(iter(LayerPass(opened.source, texts, WorkFolder(folder), kinds(format, 2))))


def test_scales_that_lose_on_the_output_of_the_layer_are_left_out(model: Path, book: Path, tmp_path: Path) -> None:
    """Scales drawn at random lower no error; the control accepts them all, and they are folded."""
    rng = torch.Generator().manual_seed(0)

    class Drawn(AWQ):
        def _best(self, visit: Visit, edge: Any) -> Any:
            found = super()._best(visit, edge)
            if found is None:
                return None
            s = torch.exp(2 * torch.randn(len(found[0]), generator=rng))
            scaled = {name: weights + 0.1 * torch.randn(weights.shape, generator=rng) for name, weights in found[1].items()}
            return s, scaled, found[2]

    visit = first_visit(model, book, tmp_path / "one")
    before = {name: matrix.linear.weight.clone() for name, matrix in visit.matrices.items()}
    Drawn().visit(visit)
    assert visit.extra["awq"] == []
    assert all(torch.equal(before[name], matrix.linear.weight) for name, matrix in visit.matrices.items())
    right = LayerOutputs.error
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerOutputs, "error", lambda self, *weights: -right(self, *weights))
        Drawn().visit(visit)
    assert visit.extra["awq"]


def test_awq_leaves_the_layer_as_it_was_but_for_scales(model: Path, book: Path, tmp_path: Path) -> None:
    """Trial weights are taken back: the layer gives the same outputs."""
    visit = first_visit(model, book, tmp_path)
    before = [after for _, after, _ in visit.run()]
    AWQ().visit(visit)
    assert visit.extra["awq"]
    for rows, (_, after, _) in zip(before, visit.run(), strict=True):
        torch.testing.assert_close(after, rows, rtol=1e-4, atol=1e-4)


def test_alpha_is_chosen_by_the_output_of_each_layer(model: Path, book: Path, tmp_path: Path) -> None:
    """The chosen alpha loses no more than any other with inputs in 8 bits; given numbers are used unchanged."""
    visit = first_visit(model, book, tmp_path / "one", "w8a8")
    method = SmoothQuant(None)
    outputs = LayerOutputs(visit)
    errors = {alpha: method._error(visit, outputs, alpha) for alpha in ALPHAS}
    assert len(set(errors.values())) > 1
    method.visit(visit)
    assert visit.extra["alpha"] == min(errors, key=lambda alpha: errors[alpha])
    unscaled = first_visit(model, book, tmp_path / "two", "w8a8")
    off = LayerOutputs(unscaled).error(*_eight_bits(unscaled))
    assert min(errors.values()) < 0.5 * off


def _eight_bits(visit: Visit) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The layer in 8 bits with SmoothQuant switched off."""
    ones = {name: torch.ones(matrix.linear.n_in) for name, matrix in visit.matrices.items()}
    weights = {name: rounded_scaled(visit.matrices[name], s, 1) for name, s in ones.items()}
    return weights, {name: RoundedInput(s, 0.0) for name, s in ones.items()}


class Moments(Rounding):
    """Keeps the moments that each matrix is rounded by."""

    def __init__(self, sequential: bool) -> None:
        super().__init__(True, sequential=sequential)
        self.seen: dict[str, Tensor] = {}

    def _matrix(self, visit: Visit, matrix: Matrix, wanted: dict[str, str]) -> None:
        self.seen[matrix.path] = matrix.inputs.hessian.clone()
        super()._matrix(visit, matrix, wanted)


def test_true_sequential_measures_behind_what_is_already_rounded(model: Path, book: Path, tmp_path: Path) -> None:
    """The first matrix sees the same inputs either way, the last one those of rounded matrices."""
    moments = {}
    for sequential in (False, True):
        visit = first_visit(model, book, tmp_path / str(sequential))
        assert visit.order == ("qkv", "out", "gate_up", "down")
        method = Moments(sequential)
        method.visit(visit)
        moments[sequential] = method.seen
        if not sequential:
            visit.measure(["down"])
            expected = visit.matrices["down"].inputs.hessian
            assert visit.holders["down"].method is None
    assert torch.equal(moments[True]["layers.0.qkv"], moments[False]["layers.0.qkv"])
    assert not torch.allclose(moments[True]["layers.0.down"], moments[False]["layers.0.down"], rtol=1e-3)
    assert expected.shape == moments[True]["layers.0.down"].shape


def test_damping_is_that_of_the_option(made: Made) -> None:
    assert {one.damping for one in made.of("gptq", damp=0.5)[0].outputs.values()} == {0.5}
    assert {one.damping for one in made.of("gptq")[0].outputs.values()} == {0.01}
    assert lost(made.of("gptq")[0]) < lost(made.of("gptq", damp=0.5)[0])


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"damp": 0.1}, "--damp needs the method gptq or sparsegpt"),
        ({"true_sequential": True}, "--true-sequential needs the method gptq or sparsegpt"),
        ({"method": ("gptq",), "damp": 1.5}, "--damp 1.5: give a share between 0 and 1"),
        ({"alpha": "0.5"}, "--alpha needs the method smoothquant"),
        ({"method": ("smoothquant",), "alpha": "2"}, "--alpha 2: give a number from 0 to 1, or auto"),
        ({"method": ("smoothquant",), "alpha": "much"}, "--alpha much: give a number from 0 to 1, or auto"),
        ({"imatrix": Path("i.gguf"), "calibrate": "texts.txt"}, "both give the importance of inputs; leave one out"),
    ],
)
def test_options_without_their_method_are_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        Pipeline(**options).check()


def test_a_repair_is_chosen_on_texts_that_report_nothing(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 16 texts two are held out: one chooses the damping, the other reports. Without cuts both report."""
    opened = open_files(model)
    rng = np.random.default_rng(1)
    read = [rng.integers(0, 256, 20).tolist() for _ in range(16)]
    both = next(iter(LayerPass(opened.source, read, WorkFolder(tmp_path / "both"), {}))).matrices["down"].inputs
    visit = next(iter(LayerPass(opened.source, read, WorkFolder(tmp_path / "cut"), {}, choice=True)))
    inputs = visit.matrices["down"].inputs
    assert (both.held_count, both.choice, inputs.held_count, inputs.choice_count) == (40, None, 20, 20)
    assert inputs.choice is not None
    torch.testing.assert_close((inputs.held + inputs.choice) / 2, both.held)
    assert not torch.allclose(inputs.held, inputs.choice, rtol=0.1)
    chosen: list[Tensor] = []
    right = Residual.repair

    def repair(self: Residual, held: Residual | None = None) -> Tensor | None:
        assert held is not None
        chosen.append(held.moment)
        return right(self, held)

    monkeypatch.setattr(Residual, "repair", repair)
    kept = pruned_config(opened.config, Cut("neurons", 0.5)).layers
    Neurons(kept).visit(visit)
    assert len(chosen) == 1
    assert {float(value) for value in chosen[0].diagonal()} < {float(value) for value in inputs.choice.diagonal()}
    other = next(iter(LayerPass(opened.source, read, WorkFolder(tmp_path / "kv"), {}, choice=True)))
    expected = other.matrices["out"].inputs.choice
    KVHeads(opened.config.layers, "first").visit(other)
    torch.testing.assert_close(chosen[1], expected)


@pytest.mark.parametrize(
    ("options", "methods", "gains"),
    [
        (["-f", "Q4_0"], ["weighted", "awq", "gptq"], ["awq", "gptq"]),
        (
            ["-f", "Q4_0"],
            ["weighted", "gptq", "gptq,true-sequential", "gptq,damp"],
            ["gptq", "gptq,true-sequential", "gptq,damp"],
        ),
        (
            ["-f", "w8a8", "--activations", "token"],
            ["weighted", "smoothquant", "smoothquant,auto"],
            ["smoothquant", "smoothquant,auto"],
        ),
        (["-f", "Q8_0", "--sparsity", "0.5"], ["magnitude", "wanda", "sparsegpt"], ["wanda", "sparsegpt"]),
    ],
)
def test_the_benchmark_compares_methods_with_their_controls(
    options: list[str],
    methods: list[str],
    gains: list[str],
    model: Path,
    book: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line a method, with its difference from its control; a control has none."""
    monkeypatch.setattr(compression_controls, "WINDOW", 128)
    monkeypatch.setattr(compression_controls, "SCORED", 96)
    judged, rng = tmp_path / "judged.txt", np.random.default_rng(7)
    judged.write_text(" ".join("".join(rng.choice(list("etaoinshrdlu"), rng.integers(1, 9))) for _ in range(500)))
    texts = ["--calibrate", str(book), "--judge", str(judged), "--tokens", "1024", "--windows", "4"]
    compression_controls.main([str(model), *options, *texts, "--methods", *methods])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[0] for line in lines] == [f"{options[1]} {method}" for method in methods]
    lost = {method: float(line.split("lost ")[1].split()[0]) for method, line in zip(methods, lines, strict=True)}
    assert len(set(lost.values())) == len(methods)
    for method, line in zip(methods, lines, strict=True):
        control = compression_controls.CONTROLS.get(method, "") if method in gains else ""
        assert ("less " in line) == bool(control)
        if control:
            less = float(line.split(f"less {control} ")[1].split()[0])
            assert less == pytest.approx(lost[method] - lost[control], abs=2e-4)


def test_the_benchmark_compares_shares_of_zeros_with_those_of_rows(
    model: Path, book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zeros by row, by matrix and of the whole model are as many, and not the same; the control is the first sparsity."""
    monkeypatch.setattr(compression_controls, "WINDOW", 128)
    monkeypatch.setattr(compression_controls, "SCORED", 96)
    opened, texts = open_files(model), draw_texts(open_files(model), str(book), 1024, 0, Progress())
    zeros = {}
    for sparsity in ("0.5", "layer:0.5", "global:0.5"):
        setting = Setting("Q8_0", parse_sparsity(sparsity), "")
        made = compressed(opened.source, "magnitude", setting, texts)
        linears = [one for name, one in made.holders() if isinstance(one, Linear) and name.startswith("layers.")]
        zeros[sparsity] = torch.cat([one.weight.flatten() == 0 for one in linears])
        assert float(zeros[sparsity].float().mean()) == pytest.approx(0.5, abs=0.02)
    assert not torch.equal(zeros["0.5"], zeros["layer:0.5"])
    assert not torch.equal(zeros["layer:0.5"], zeros["global:0.5"])
    arguments = [str(model), "-f", "Q8_0", "--calibrate", str(book), "--judge", str(book), "--tokens", "1024", "--windows", "4"]
    monkeypatch.setattr(compression_controls, "check_apart", lambda *_: None)
    compression_controls.main([*arguments, "--methods", "magnitude", "--sparsity", "0.5", "layer:0.5", "global:0.5"])
    lines = capsys.readouterr().out.splitlines()
    names = ["magnitude", "magnitude layer:0.5", "magnitude global:0.5"]
    assert [line.split(", ")[0] for line in lines] == [f"Q8_0 {name}" for name in names]
    assert ["less magnitude" in line for line in lines] == [False, True, True]
    with pytest.raises(SystemExit):
        compression_controls.main([*arguments, "--methods", "wanda", "--sparsity", "global:0.5"])
    assert "--sparsity global: is of magnitude alone" in capsys.readouterr().err
