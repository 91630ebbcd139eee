"""Weights of all ranks put together are the weights of the whole model, for every stored kind."""

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from headrace import core
from headrace.backends.native.program import thread_pool
from headrace.backends.native.weights import PackedWeights, packed_bytes
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.parallel.ranks.share import UNIT, Share
from headrace.weights.kinds import KINDS
from headrace.weights.parts import Unpaired, WeightPart, cut, layout
from tests.e2e.test_native_weights import Stored
from tests.models.zoo import MemorySource
from tests.native_blocks import INTEGER_KINDS
from tests.tiny import tiny_config
from tests.tiny_native import native_model

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

module = core.module()
MATRICES = (
    "q_proj.weight",
    "k_proj.weight",
    "v_proj.weight",
    "o_proj.weight",
    "gate_proj.weight",
    "up_proj.weight",
    "down_proj.weight",
)


@lru_cache
def model(block: int, architecture: str = "llama", **changes: Any) -> Model:
    """9 heads on 3 K/V heads, or 8 on 2 for larger blocks; twelve units of MLP columns, whose borders cut blocks of 256."""
    heads, kv_heads, hidden = (9, 3, 64) if block <= 32 else (8, 2, 256)
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": 64, "ffn": 768, "hidden_size": hidden, "num_layers": 1}
    return native_model(architecture, **{**sizes, "vocab_size": 600, **changes})


def kind_source(kind: str, whole: Model) -> MemorySource:
    source = Stored(whole)
    for name in MATRICES if kind != "F32" else ():
        source.store(name, kind)
    return source


def product(linear: Any) -> np.ndarray:
    """The matrix of a packed layer, [stored columns, outputs], by unit vectors."""
    result: np.ndarray = module.linear(linear, np.eye(linear.k, dtype=np.float32), thread_pool(1))
    return result


def packed(source: MemorySource, whole: Model, share: Share, quantize: str) -> tuple[Model, PackedWeights]:
    narrow = describe(share.narrowed())
    weights = PackedWeights(narrow, source, thread_pool(1), quantize, share)
    return narrow, weights


def matrices(narrow: Model, weights: PackedWeights) -> dict[str, np.ndarray]:
    """The matrices of a rank, [inputs, outputs], by name: of stored blocks that ranks share, the rank's own columns."""
    layer = narrow.layers[0]
    starts: dict[str, int] = {}

    def unshared(tensors: list[Any], part: WeightPart, unit: int) -> Any:
        if part.columns is not None:
            block = max(KINDS[weights.source.info(part.source).kind].block, UNIT)
            starts[part.target.split(".")[-2]] = part.columns[0] % block
        return module.PackedLinear(tensors)

    weights._packed_linear = unshared  # type: ignore[method-assign]
    made = {name: weights.linear(getattr(layer, name))[0] for name in ("qkv", "gate_up", "out", "down")}
    made["head"] = weights.head(narrow.output)  # type: ignore[attr-defined]
    weights.pack()
    widths = {"out": layer.out.n_in, "down": layer.down.n_in}
    found = {name: product(part.linear) for name, part in made.items()}
    return {name: rows[(at := starts.get(name, 0)) : at + widths.get(name, len(rows))] for name, rows in found.items()}


def joined(ranks: list[tuple[Share, dict[str, np.ndarray]]]) -> dict[str, list[np.ndarray]]:
    """The matrices of all ranks put together; K and V of a head on two ranks are taken from both, which must agree."""
    whole: dict[str, list[np.ndarray]] = {"q": [], "gate": [], "up": [], "out": [], "down": [], "head": []}
    kv: dict[tuple[str, int], np.ndarray] = {}
    for share, made in ranks:
        held = share.layers[0]
        q, k, v = np.split(made["qkv"], np.cumsum([len(held.heads) * 64, len(held.kv_heads) * 64]), axis=1)
        for name, rows in (("k", k), ("v", v)):
            for at, head in enumerate(held.kv_heads):
                stored = rows[:, at * 64 : (at + 1) * 64]
                assert np.array_equal(kv.setdefault((name, head), stored), stored)
        gate, up = np.split(made["gate_up"], 2, axis=1)
        for name, part in (("q", q), ("gate", gate), ("up", up), ("head", made["head"])):
            whole[name].append(part.T)
        whole["out"].append(made["out"])
        whole["down"].append(made["down"])
    return {name: [np.concatenate(parts)] for name, parts in whole.items()} | {
        name: [kv[name, head] for head in range(len(kv) // 2)] for name in "kv"
    }


CASES = [(kind, "") for kind in (*INTEGER_KINDS, "F32", "F16")] + [("F32", "int8"), ("F16", "int4")]


@pytest.mark.parametrize(("kind", "quantize"), CASES)
def test_shares_put_together_are_the_whole(kind: str, quantize: str) -> None:
    whole = model(KINDS[kind].block)
    source = kind_source(kind, whole)

    def of_world(world: int) -> dict[str, list[np.ndarray]]:
        shares = [Share(rank, world, whole.config) for rank in range(world)]
        return joined([(share, matrices(*packed(source, whole, share, quantize))) for share in shares])

    expected = of_world(1)
    for world in (2, 4, 8):
        found = of_world(world)
        assert found.keys() == expected.keys()
        for name, parts in expected.items():
            assert all(np.array_equal(a, b) for a, b in zip(parts, found[name], strict=True)), (world, name)


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q6_K"])
def test_a_world_of_one_packs_the_same_matrices_as_no_share(kind: str) -> None:
    whole = model(KINDS[kind].block)
    source = kind_source(kind, whole)
    plain = PackedWeights(whole, source, thread_pool(1))
    share = Share(0, 1, whole.config)
    narrow, one = packed(source, whole, share, "")
    of_share = matrices(narrow, one)
    for name, values in matrices(whole, plain).items():
        assert np.array_equal(values, of_share[name]), name
    assert plain.bytes == one.bytes


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_estimate_of_a_share_equals_its_packed_bytes(kind: str, world: int) -> None:
    whole = model(KINDS[kind].block)
    source = kind_source(kind, whole)
    norms = 3 * -(-whole.config.hidden_size // 16) * 64
    for rank in range(world):
        share = Share(rank, world, whole.config)
        narrow, weights = packed(source, whole, share, "")
        matrices(narrow, weights)
        assert packed_bytes(whole, source, "", share) - norms == weights.bytes


# -- the plan ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("container", ["safetensors", "gguf"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gpt2", "gemma3_text"])
@pytest.mark.parametrize("world", [2, 4])
def test_the_parts_of_all_ranks_are_the_parameters(container: str, architecture: str, world: int) -> None:
    """Fused, transposed and permuted tensors too: values taken by the cut parts are slices of the values of the whole part."""
    whole = describe(tiny_config(architecture, heads=8, kv_heads=8 if architecture == "gpt2" else 4, head_dim=64, ffn=512))
    rng = np.random.default_rng(0)
    plans, stored = layout(whole, container), {}
    specs = {f"{path}.{field}": spec for path, holder in whole.holders() for field, spec in holder.params().items()}
    for key, parts in plans.items():
        for part in parts:
            values = stored.setdefault(part.source, rng.standard_normal(part.stored))
            expected = part.take(values)
            spec, taken = (
                specs[key],
                [cut(part, specs[key], Share(rank, world, whole.config)).take(values) for rank in range(world)],
            )
            if spec.rows is None and spec.columns is None:
                assert all(np.array_equal(each, expected) for each in taken)
            else:
                assert np.array_equal(np.concatenate(taken, axis=0 if spec.columns is None else 1), expected), key


def test_a_permutation_is_cut_by_heads_and_stays_unexpanded() -> None:
    whole = tiny_config(heads=9, kv_heads=3, head_dim=64)
    part = WeightPart("layers.0.qkv.q.weight", "q", (576, 32), (576, 32), row_order=Unpaired(9, 64, 64))
    spec = describe(whole).layers[0].qkv.params()["weight"]
    made = cut(part, spec, Share(1, 2, whole))
    assert (made.rows, made.row_order) == ((256, 576), Unpaired(5, 64, 64))
    values = torch.randn(576, 32)
    assert torch.equal(made.take(values), part.take(values)[256:])
    listed = cut(
        WeightPart("layers.0.qkv.q.weight", "q", (576, 32), (576, 32), row_order=tuple(Unpaired(9, 64, 64))),
        spec,
        Share(1, 2, whole),
    )
    assert torch.equal(listed.take(values), made.take(values))
