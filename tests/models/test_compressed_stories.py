"""What compressing stories15M loses: methods beside one another on a real model whose weights were never rounded.

All figures (needs stories15M.bin in HEADRACE_TEST_MODELS):
    pytest tests/models/test_compressed_stories.py -m weights -s
"""

from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest
import torch
from torch import Tensor

from headrace.backends.eager import rounded as inputs
from headrace.bench.kv import FORMATS, measure_losses
from headrace.compress import cutting
from headrace.compress.base import Compressor, Matrix, Visit
from headrace.compress.calibration_pass import mean_keys
from headrace.compress.folding import AWQ, SmoothQuant
from headrace.compress.grids.keep import parse_sparsity
from headrace.compress.grids.targets import nearest, target
from headrace.compress.judge import compare_logits
from headrace.compress.kv_heads import KVHeads
from headrace.compress.least_squares import Residual
from headrace.compress.rounding import Rounding, importance_of
from headrace.compress.structure import Cut
from headrace.data.config import LayerConfig
from headrace.models.base import Model
from headrace.models.layers import Linear
from headrace.models.registry import read_config
from headrace.weights.loader import load_model
from tests.models.lossy import After, likelihood, predictions, rounded, walked
from tests.models.stories import JUDGED, MEASURED, SCORED, Judge, cut, read_source, texts
from tests.models.zoo import MemorySource

pytestmark = [pytest.mark.weights, pytest.mark.slow]

Lost = Callable[..., float]


def steps(method: str, sparsity: str) -> list[Compressor]:
    """What a walk carries out."""
    if sparsity:
        return [Rounding(False, prune=(method, parse_sparsity(sparsity)))]
    rounding = Rounding(method in ("gptq", "act-order"), ordered=method == "act-order")
    return [AWQ(), rounding] if method == "awq" else [rounding]


@pytest.fixture(scope="module")
def source() -> MemorySource:
    return read_source()


@pytest.fixture(scope="module")
def original(source: MemorySource) -> Model:
    return load_model(source)


@pytest.fixture(scope="module")
def judge(original: Model) -> Judge:
    return Judge(original, texts(MEASURED, JUDGED))


@pytest.fixture(scope="module")
def lost(source: MemorySource, judge: Judge) -> Lost:
    """KL of the model that a method leaves in a format; each is made once."""

    @cache
    def measure_loss(method: str, format: str, sparsity: str = "") -> float:
        if method in ("rtn", "magnitude"):
            model = rounded(source, format, sparsity or None)
        else:
            model = walked(source, texts(0, MEASURED), steps(method, sparsity), format).model
        kl = judge.lost(model).kl
        print(f"{method} {format} {sparsity}: {kl:.4f}")
        return kl

    return measure_loss


def test_texts_are_sampled_from_the_model(source: MemorySource, judge: Judge) -> None:
    """Tokens are as likely as it expects them to be, those of another text are not; losses are those of compress.judge."""

    def surprise(came: Sequence[list[int]]) -> Tensor:
        pairs = zip(came, judge.truth, strict=True)
        return torch.cat([(p.exp() * p).sum(-1) - likelihood(p, text) for text, p in pairs])

    gaps = surprise(judge.texts)
    assert abs(gaps.mean()) < 4 * gaps.std() / len(gaps) ** 0.5
    assert surprise(judge.texts[::-1]).mean() > 1
    model, text = rounded(source, "int3-g96"), judge.texts[0]
    one = Judge(load_model(source), [text])
    both = [(one.truth[0].numpy(), predictions(model, text, SCORED).numpy())]
    theirs = compare_logits([text[-SCORED:]], both, "")
    ours = one.lost(model)
    assert ours.kl == pytest.approx(theirs.kl, rel=1e-4)
    assert ours.nll == pytest.approx(torch.tensor(theirs.perplexity / theirs.perplexity_before).log().item(), rel=1e-3)


@pytest.mark.parametrize(
    ("format", "awq_share"), [("int4-g32", 0.9), ("int4-g96", 0.95), ("int3-g32", 0.93), ("int3-g96", 0.99)]
)
def test_methods_that_read_texts_lose_less_than_rounding_to_nearest(format: str, awq_share: float, lost: Lost) -> None:
    """The control `weighted` searches scales with the same importance; gptq and awq switched off equal it, a share of 1."""
    rtn, weighted, gptq, ordered, awq = (lost(method, format) for method in ("rtn", "weighted", "gptq", "act-order", "awq"))
    assert weighted <= 0.9 * rtn
    assert gptq <= 0.8 * weighted
    assert ordered <= 0.85 * weighted
    assert ordered <= 1.07 * gptq  # a gain in groups of 96 with 3 bits, and none in small ones, whose scales change little
    assert awq <= awq_share * weighted


def test_bits_zero_points_and_groups_count(lost: Lost) -> None:
    fine = lost("rtn", "int4-g32")
    assert lost("rtn", "int3-g32") >= 3 * fine
    assert lost("rtn", "int4-g32-sym") >= 1.08 * fine  # scales of either sign are searched: all 16 codes are used
    assert lost("rtn", "int4-g96") >= 1.25 * fine
    assert lost("rtn", "int8") <= 0.005
    assert lost("act-order", "int4-g32") <= 0.055


def test_input_statistics_improve_the_pruning_mask(lost: Lost) -> None:
    magnitude, wanda, sparsegpt = (lost(method, "Q8_0", "0.5") for method in ("magnitude", "wanda", "sparsegpt"))
    assert wanda <= 0.70 * magnitude
    assert sparsegpt <= 0.95 * wanda


def test_two_of_four(lost: Lost) -> None:
    magnitude, wanda, sparsegpt = (lost(method, "Q8_0", "2:4") for method in ("magnitude", "wanda", "sparsegpt"))
    assert wanda <= 0.75 * magnitude
    assert sparsegpt <= 0.75 * wanda
    assert lost("sparsegpt", "Q4_0", "2:4") <= 1.25 * sparsegpt


class NearestComparison(Rounding):
    """GPTQ, and how many rows it leaves worse than rounding to nearest."""

    rows = worse = 0

    def visit(self, visit: Visit) -> None:
        before = {(name, part): w.clone() for name, one in visit.matrices.items() for part, w in one.parts.items()}
        super().visit(visit)
        for (name, part), w in before.items():
            self._compare(visit.matrices[name], part, w)

    def _compare(self, matrix: Matrix, part: str, w: Tensor) -> None:
        plain = nearest(w, target(matrix.kinds[part]), importance_of(matrix.inputs), 1)[1]
        ours, theirs = (((made - w) @ matrix.inputs.hessian * (made - w)).sum(1) for made in (matrix.parts[part], plain))
        self.rows += len(w)
        self.worse += int((ours > theirs).sum())


def test_every_matrix_gains_by_gptq_though_not_every_row(source: MemorySource) -> None:
    beside = NearestComparison(True, ordered=False)
    outputs = walked(source, texts(0, MEASURED), [beside], "int4-g32").outputs
    ratios = [one.error / one.nearest for one in outputs.values()]
    print(f"{len(ratios)} matrices, {min(ratios):.2f} to {max(ratios):.2f}; {beside.worse} of {beside.rows} rows are worse")
    assert len(ratios) == 42
    assert max(ratios) < 0.8
    assert beside.worse <= 0.01 * beside.rows


CHANNELS = [31, 97, 168, 240]  # where outliers are planted


def planted(source: MemorySource) -> MemorySource:
    """The same model: four channels of what norms give are forty times as large, their columns so much smaller."""
    tensors = {name: tensor.clone() for name, tensor in source.tensors.items()}
    for layer in range(6):
        for norm, readers in (("attn_norm", ("attn_q", "attn_k", "attn_v")), ("ffn_norm", ("ffn_gate", "ffn_up"))):
            tensors[f"blk.{layer}.{norm}.weight"][CHANNELS] *= 40
            for name in readers:
                tensors[f"blk.{layer}.{name}.weight"][:, CHANNELS] /= 40
    return MemorySource("gguf", tensors, source.metadata)


def inputs_rounded(after: After, activations: str) -> Model:
    """The same model with inputs in 8 bits; `tensor`: with the largest of the texts measured as the end of the range."""
    scales = {".".join(name.split(".")[:3]): one.largest / 127 for name, one in after.outputs.items()}
    integers = {path: (True,) * len(one.parts) for path, one in after.model.holders() if isinstance(one, Linear)}
    inputs.round_inputs(after.model, integers, activations, scales)
    return after.model


def test_outliers_that_were_planted(source: MemorySource, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """W8A8: a scale a row. What scales inputs, and what leaves the largest out, lose little."""
    outliers = planted(source)
    assert judge.lost(load_model(outliers)).kl <= 1e-5
    read = texts(0, MEASURED)
    plain = walked(outliers, read, [Rounding(False)], "int8")
    smooth = {alpha: walked(outliers, read, [SmoothQuant(alpha), Rounding(False)], "int8") for alpha in (0.5, 0.8)}
    losses = {f"plain {how}": judge.lost(inputs_rounded(plain, how)).nll for how in ("token", "tensor", "group", "split")}
    losses |= {f"smooth {alpha}": judge.lost(inputs_rounded(after, "token")).nll for alpha, after in smooth.items()}
    losses["smooth tensor"] = judge.lost(inputs_rounded(smooth[0.5], "tensor")).nll
    monkeypatch.setattr(inputs, "rounded", partial(inputs.rounded, threshold=12.0))
    losses["plain split 12"] = judge.lost(inputs_rounded(plain, "split")).nll
    print({name: round(value, 4) for name, value in losses.items()})
    assert losses["plain token"] >= 0.05
    assert max(losses[name] for name in ("smooth 0.5", "smooth 0.8", "plain split", "plain split 12")) <= 0.02
    assert losses["smooth tensor"] <= 0.1 * losses["plain tensor"]
    assert losses["plain group"] <= 0.04


def test_keys_and_values_in_fewer_bits(source: MemorySource) -> None:
    names = ("int8", "int4, K not centred", "int4, one scale, K not centred")
    wanted = [one for one in FORMATS if one.name in names]
    _, results = measure_losses(source, texts(MEASURED, JUDGED), mean_keys(source, texts(0, MEASURED)), wanted)
    lost = {one.name: one.record()["nll"] for one in results}
    print({name: round(value, 4) for name, value in lost.items()})
    assert lost["int8"] <= 0.002
    assert lost["int4, K not centred"] <= 0.02
    assert lost["int4, K not centred"] <= 0.7 * lost["int4, one scale, K not centred"]


def unrepaired(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Residual, "repair", lambda self, held=None: None)


def test_neurons_that_count_least_go(source: MemorySource, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    quarter, rng = Cut("neurons", 0.75), torch.Generator().manual_seed(0)
    repaired = judge.lost(cut(source, quarter)).kl
    unrepaired(monkeypatch)
    scored = judge.lost(cut(source, quarter)).kl
    monkeypatch.setattr(cutting, "top_indices", lambda scores, n: torch.randperm(len(scores), generator=rng)[:n].sort().values)
    drawn = judge.lost(cut(source, quarter)).kl
    print(f"by score {scored:.4f}, repaired {repaired:.4f}, drawn {drawn:.4f}")
    assert scored <= 0.6 * drawn
    assert repaired <= 0.9 * scored


@pytest.mark.parametrize("count", [3, 1])
def test_fewer_heads_of_keys_and_values(
    count: int, source: MemorySource, judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How heads become one, without repair and with it; the control has heads drawn at random."""
    right, rng = KVHeads._merge, torch.Generator().manual_seed(0)

    def measure_loss(pool: str) -> float:
        return judge.lost(cut(source, Cut("kv-heads", count, pool))).kl

    def drawn(self: KVHeads, layer: LayerConfig, qkv: Matrix, count: int) -> dict[str, Tensor]:
        for part in ("k", "v"):
            qkv.parts[part].normal_(std=qkv.parts[part].std().item(), generator=rng)
        return right(self, layer, qkv, count)

    lost = {"repaired": measure_loss("aligned")}
    unrepaired(monkeypatch)
    lost |= {pool: measure_loss(pool) for pool in ("aligned", "mean", "first")}
    monkeypatch.setattr(KVHeads, "_merge", drawn)
    lost["drawn"] = measure_loss("first")
    print(count, {name: round(value, 4) for name, value in lost.items()})
    assert lost["aligned"] <= 0.85 * lost["mean"]
    assert lost["repaired"] <= 0.35 * lost["mean"]
    assert max(lost[pool] for pool in ("aligned", "mean", "first")) <= 0.95 * lost["drawn"]


def test_an_unchanged_head_count_leaves_the_model(source: MemorySource, judge: Judge) -> None:
    """Turned towards themselves, merged with nobody, repaired of nothing."""
    same = walked(source, texts(0, MEASURED), [KVHeads(read_config(source).layers, "aligned")]).model
    assert abs(judge.lost(same).kl) <= 1e-5
