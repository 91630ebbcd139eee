"""Neurons, heads and K/V heads left out of a layer: what is cut is what was masked, turning heads changes nothing, and what is
the same becomes one without loss."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from headrace.compress import kv_heads
from headrace.compress.base import Compressor, Inputs, Matrix, Visit
from headrace.compress.cutting import Distances, Heads, Neurons, consumer, least_moving_layers, producers
from headrace.compress.kv_heads import KVHeads, align
from headrace.compress.structure import Cut, pruned_config
from headrace.data.config import ModelConfig, RopeConfig
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.models.layers import Linear
from headrace.ops.context import FeedRows, build
from tests.models.test_walk import Seen
from tests.models.zoo import pieces
from tests.tiny import tiny_config, tiny_model

CUTS = {
    "neurons": Cut("neurons", 0.7),
    "heads": Cut("heads", 0.5),
    "aligned": Cut("kv-heads", 1, "aligned"),
    "mean": Cut("kv-heads", 1, "mean"),
    "first": Cut("kv-heads", 1, "first"),
}


class Layer:
    """Layer 0 of a tiny model in float64, measured on three texts, of which the last is held out."""

    def __init__(self, config: ModelConfig, edit: Callable[[Model], object] = lambda model: None) -> None:
        self.model = tiny_model(config)
        rng = torch.Generator().manual_seed(5)
        for _, holder in self.model.holders():
            if getattr(holder, "bias", None) is not None:
                holder.bias.copy_(torch.randn(holder.bias.shape, generator=rng, dtype=torch.float64))  # type: ignore[attr-defined]
        edit(self.model)
        self.texts = [torch.randn(70, 32, generator=rng, dtype=torch.float64) for _ in range(3)]
        self.before = {name: value.clone() for name, value in pieces(self.model).items()}
        holders = dict(self.model.layers[0].holders())
        matrices = {}
        for name, holder in holders.items():
            if isinstance(holder, Linear):
                parts = dict(zip([part for part, _ in holder.parts], holder.weight.split(holder.sizes), strict=True))
                matrices[name] = Matrix(f"layers.0.{name}", holder, parts, {}, self.inputs(holder))
        self.visit = Visit(0, config.layers[0], holders, matrices, (), run=self.run)

    def inputs(self, linear: Linear) -> Inputs:
        rows: list[torch.Tensor] = []
        linear.method = Seen(rows)
        list(self.run())
        linear.method, made = None, Inputs.empty(linear.n_in)
        made = Inputs(*(one.double() for one in (made.hessian, made.held, made.mean, made.largest)))
        for at, some in enumerate(rows):
            made.add(some, at == 2)
        made.finish()
        return made

    def run(self, of: Model | None = None) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
        of = of or self.model
        for at, x in enumerate(self.texts):
            context = build(KVPool(of.config, 5, 16, torch.float64), [FeedRows([0] * 70, list(range(5)))])
            yield x, of.layer(0, x, context), at == 2

    def rows(self, of: Model | None = None) -> torch.Tensor:
        return torch.cat([y for _, y, _ in self.run(of)])

    def cut(self, target: ModelConfig) -> torch.Tensor:
        """What comes out of the layer that has the target's shapes, and what `visit.cut` says in place of what was there."""
        made = tiny_model(target, seed=9)
        assert self.visit.cut is not None
        for name, value in pieces(made).items():
            if name.startswith("layers.0."):
                value.copy_(self.visit.cut.get(name, self.before[name]))
        return self.rows(made)


def config_of(architecture: str, **changes: Any) -> ModelConfig:
    return tiny_config(architecture, **({"ffn": 96} | changes))


def step_of(cut: Cut, target: ModelConfig) -> Compressor:
    kinds: dict[str, Any] = {"neurons": Neurons, "heads": Heads}
    return KVHeads(target.layers, cut.pool or "") if cut.method == "kv-heads" else kinds[cut.method](target.layers)


def cut_layer(name: str, architecture: str = "llama", **changes: Any) -> tuple[Layer, ModelConfig]:
    config = config_of(architecture, **changes)
    layer, target = Layer(config), pruned_config(config, CUTS[name])
    step_of(CUTS[name], target).visit(layer.visit)
    return layer, target


CASES = [(name, architecture) for name in ("neurons", "heads") for architecture in ("llama", "qwen2", "qwen3", "gpt2")]
CASES += [("neurons", "gemma3_text"), *((name, "qwen2") for name in ("aligned", "mean", "first")), ("aligned", "llama")]
CASES += [("first", "qwen3"), ("mean", "qwen3")]


@pytest.mark.parametrize(("name", "architecture"), CASES)
def test_a_cut_layer_is_the_masked_layer(name: str, architecture: str) -> None:
    """In float64; it is another layer than before."""
    layer, target = cut_layer(name, architecture)
    before = Layer(config_of(architecture)).rows()
    masked = layer.rows()
    torch.testing.assert_close(layer.cut(target), masked, rtol=1e-10, atol=1e-10)
    assert (masked - before).abs().max() > 1e-3
    told = layer.visit.extra
    assert 0 < told["repaired"] <= told["error"]


def test_mismatched_cuts_change_the_layer() -> None:
    """The controls: rows of `gate` that are not those of `up`; columns of another layer's `down`; K/V heads of h mod n."""

    def gap(name: str, part: str, wrong: Callable[[Layer, torch.Tensor], torch.Tensor], **changes: Any) -> float:
        layer, target = cut_layer(name, **changes)
        assert layer.visit.cut is not None
        key = f"layers.0.{part}.weight"
        layer.visit.cut[key] = wrong(layer, layer.visit.cut[key])
        return float((layer.cut(target) - layer.rows()).abs().max())

    def other(layer: Layer, right: torch.Tensor) -> torch.Tensor:
        return layer.before["layers.1.down.weight"][:, : right.shape[1]]

    def first(layer: Layer, right: torch.Tensor) -> torch.Tensor:
        return layer.before["layers.0.gate_up.gate.weight"][: len(right)]

    assert gap("neurons", "gate_up.gate", first) > 0.01
    assert gap("neurons", "down", other) > 0.01
    for part in ("k", "v"):
        assert gap_of_heads(part) > 0.01


def gap_of_heads(part: str) -> float:
    """Of four K/V heads two: those of queries 0 and 1 belong to the first, which `h mod 2` would deny."""
    config = config_of("llama", kv_heads=4)
    target = pruned_config(config, replace(CUTS["mean"], number=2))
    layer = Layer(config)
    KVHeads(target.layers, "mean").visit(layer.visit)
    assert layer.visit.cut is not None
    torch.testing.assert_close(layer.cut(target), layer.rows(), rtol=1e-10, atol=1e-10)
    heads = layer.before[f"layers.0.qkv.{part}.weight"].view(2, 2, 8, 32)
    layer.visit.cut[f"layers.0.qkv.{part}.weight"] = heads.mean(0).flatten(0, 1)
    return float((layer.cut(target) - layer.rows()).abs().max())


ROPES = [RopeConfig(), RopeConfig(interleaved=True), RopeConfig(dim=4)]


@pytest.mark.parametrize("rope", ROPES, ids=("halves", "neighbours", "part"))
def test_rotating_heads_leaves_the_layer_unchanged(rope: RopeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases. Controls: values turned and `out` not; keys by one matrix for the whole head."""

    def turned() -> Layer:
        layer = Layer(config_of("qwen2", rope=rope))
        (qkv,) = producers(layer.visit, "heads")
        align(layer.visit.layer, qkv, consumer(layer.visit, "heads"), 1)
        return layer

    layer, before = turned(), Layer(config_of("qwen2", rope=rope)).rows()
    torch.testing.assert_close(layer.rows(), before, rtol=1e-10, atol=1e-10)
    for name in (f"layers.0.qkv.{part}.weight" for part in ("q", "k", "v")):
        assert (pieces(layer.model)[name] - layer.before[name]).abs().max() > 0.1
    consumer(layer.visit, "heads").linear.weight.copy_(layer.before["layers.0.out.weight"])
    assert (layer.rows() - before).abs().max() > 0.01
    monkeypatch.setattr(kv_heads, "pair_turns", lambda rope, head_dim: kv_heads.procrustes)
    assert (turned().rows() - before).abs().max() > 0.01


@pytest.mark.parametrize("pool", ["first", "mean", "aligned"])
def test_an_unchanged_kv_head_count_leaves_the_layer(pool: str) -> None:
    config = config_of("qwen2", kv_heads=4)
    layer = Layer(config)
    before = layer.rows()
    KVHeads(config.layers, pool).visit(layer.visit)
    assert layer.visit.cut is not None
    if pool == "aligned":
        torch.testing.assert_close(layer.cut(config), before, rtol=1e-5, atol=1e-5)
    else:
        assert all(torch.equal(value, layer.before[name]) for name, value in layer.visit.cut.items())


def alike(model: Model, turns: bool = False) -> None:
    """Neighbouring K/V heads are equal, or one is the other turned: values by a matrix, keys by an angle a pair."""
    qkv, out = model.layers[0].qkv, model.layers[0].out
    q, k, v = (part.view(4, 8, 32) for part in qkv.weight.split(32))
    k[1::2], v[1::2] = k[::2], v[::2]
    if turns:
        rng = torch.Generator().manual_seed(3)
        each = torch.linalg.qr(torch.randn(8, 8, generator=rng, dtype=torch.float64)).Q
        angle = torch.rand(4, generator=rng, dtype=torch.float64) * 6
        cos, sin = angle.cos().diag(), angle.sin().diag()
        pairs = torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])
        v[1::2], k[1::2], q[1::2] = each @ v[1::2], pairs @ k[1::2], pairs @ q[1::2]
        out.weight.view(32, 4, 8)[:, 1::2] = out.weight.view(32, 4, 8)[:, 1::2] @ each.t()


@pytest.mark.parametrize("pool", ["first", "mean", "aligned"])
def test_merging_equal_heads_loses_nothing(pool: str) -> None:
    """Heads that are equal but for a turn: only when they are turned back."""
    config = config_of("llama", kv_heads=4)
    target = pruned_config(config, Cut("kv-heads", 2, pool))
    for turns in (False, True):
        layer = Layer(config, partial(alike, turns=turns))
        before = layer.rows()
        KVHeads(target.layers, pool).visit(layer.visit)
        gap = float((layer.cut(target) - before).abs().max())
        assert (gap < 1e-6) == (pool == "aligned" or not turns), gap


def test_kv_bytes_follow_the_heads() -> None:
    config = config_of("llama", kv_heads=4)
    fewer = [config, *(pruned_config(config, Cut("kv-heads", count)) for count in (2, 1))]
    sizes = [KVPool(one, 8, 16).data.nbytes for one in fewer]
    assert sizes == [sizes[0], sizes[0] // 2, sizes[0] // 4]


def test_the_most_important_neurons_and_heads_stay() -> None:
    """Control: the other neurons, of which more is lost. A head that gives nothing goes."""
    layer, target = cut_layer("neurons")
    assert layer.visit.cut is not None
    down = consumer(Layer(config_of("llama")).visit, "ffn")
    kept = (layer.visit.holders["down"].weight != 0).any(0)
    scores = down.inputs.mean * down.linear.weight.norm(dim=0)
    assert scores[kept].min() >= scores[~kept].max()
    assert int(kept.sum()) == target.layers[0].ffn == 64

    def silent(model: Model) -> None:
        model.layers[0].out.weight[:, 16:] = 0  # the queries of K/V head 1

    layer = Layer(config_of("llama"), silent)
    before = layer.rows()
    Heads(pruned_config(config_of("llama"), CUTS["heads"]).layers).visit(layer.visit)
    torch.testing.assert_close(layer.rows(), before, rtol=1e-10, atol=1e-10)
    assert least_moving_layers([0.4, 0.1, 0.3, 0.1, 0.2], 3) == [1, 3, 4]
    assert least_moving_layers([0.1, 0.1, 0.3], 1) == [1]


def test_distances_are_cosine_distances_of_the_rows() -> None:
    layer = Layer(config_of("llama"))
    Distances().visit(layer.visit)
    x, y = torch.cat(layer.texts[:2]), layer.rows()[:140]
    cos = (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))
    assert layer.visit.extra["distance"] == pytest.approx(float((1 - cos).mean()), rel=1e-9)
    assert layer.visit.cut == {}


def test_models_that_cannot_be_cut_so_are_named() -> None:
    with pytest.raises(ValueError, match="the layers of this gemma3_text model differ by their place"):
        pruned_config(config_of("gemma3_text"), Cut("layers", 1))
    with pytest.raises(ValueError, match="gpt2 stores q, k and v as equal thirds"):
        pruned_config(config_of("gpt2"), Cut("kv-heads", 2))
    with pytest.raises(ValueError, match="q and k of this model are normed by head"):
        pruned_config(config_of("qwen3"), Cut("kv-heads", 1, "aligned"))
    with pytest.raises(ValueError, match="1 K/V heads, and 1 is not a proper divisor of that: no smaller number is possible"):
        pruned_config(config_of("llama", kv_heads=1), Cut("kv-heads", 1))
