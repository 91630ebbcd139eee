"""f, g and ḡ in torch: conjugate pairs, gradients, and models on two processes that compute what one process computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd import gradcheck
from torch.nn import functional

from headrace.data.config import ModelConfig
from headrace.kv.pool import KVPool
from headrace.models.base import Model
from headrace.models.registry import describe
from headrace.ops.context import FeedRows, build
from headrace.parallel.ranks import conjugates
from headrace.parallel.ranks.share import Share
from headrace.weights.loader import Allocator
from headrace.weights.parts import WeightPart, cut
from tests.parallel.gloo import in_group
from tests.tiny import tiny_config, tiny_model

NEAR = 1e-10
ROWS, WIDTH, INNER = 4, 6, 8


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same numbers on every rank."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def mine(x: torch.Tensor, axis: int = 0) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), axis)[dist.get_rank()].clone()


# -- conjugacy ---------------------------------------------------------------------------------------------------------
# Operator, whether its input and its output are the same on all ranks (then they count once), and the output's rows.
PAIRS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool, bool]] = {
    "f": (conjugates.enter, True, False),
    "g": (conjugates.total, False, True),
    "gather_rows": (conjugates.gather_rows, False, False),
    "scatter_rows": (conjugates.scatter_rows, False, False),
    "own_rows": (conjugates.own_rows, True, False),
    "whole_rows": (conjugates.whole_rows, False, True),
    "whole_columns": (conjugates.whole_columns, False, True),
}


def products(name: str) -> tuple[float, float]:
    """<F x, y> and <x, F* y> over all ranks, where F* is the operator's gradient."""
    operator, one_input, one_output = PAIRS[name]
    rank = dist.get_rank()
    x = drawn(ROWS, WIDTH, seed=0 if one_input else rank).requires_grad_()
    result = operator(x)
    y = drawn(*result.shape, seed=7 if one_output else 7 + rank)
    (gradient,) = torch.autograd.grad(result, x, y)
    return _once((result * y).sum(), one_output), _once((x * gradient).sum(), one_input)


def _once(value: torch.Tensor, same: bool) -> float:
    """The sum of the ranks' values, or the value if it is the same on all."""
    value = value.detach().clone()
    if not same:
        dist.all_reduce(value)
    return float(value)


def all_products() -> dict[str, tuple[float, float]]:
    return {name: products(name) for name in PAIRS}


@pytest.fixture(scope="module")
def group() -> dict[str, list[Any]]:
    """What every check returned on each of two ranks, by the check's name."""
    ranks = in_group(2, all_checks)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


def all_checks() -> dict[str, Any]:
    return {check.__name__: check() for check in (all_products, cut_gaps, norm_gaps, checks, vocabulary, both)}


def test_the_backward_operator_is_the_adjoint(group: dict[str, list[Any]]) -> None:
    for found in [*group["all_products"], *in_group(4, all_products)]:
        for name, (ahead, back) in found.items():
            assert ahead == pytest.approx(back, abs=NEAR), name
            assert abs(ahead) > 1e-3, name


# -- layers ------------------------------------------------------------------------------------------------------------
def mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.linear(functional.gelu(functional.linear(x, a)), b, bias)


def cut_mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The first layer cut by outputs, the second by inputs; nothing crosses between them."""
    return conjugates.row_linear(functional.gelu(conjugates.column_linear(conjugates.enter(x), a)), b, bias)


def unsummed_mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return functional.linear(functional.gelu(functional.linear(x, a)), b, bias)


def twice_biased_mlp(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return conjugates.total(functional.linear(functional.gelu(functional.linear(x, a)), b, bias))


def weights() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return drawn(INNER, WIDTH, seed=1), drawn(WIDTH, INNER, seed=2), drawn(WIDTH, seed=3)


def gaps(layer: Callable[..., torch.Tensor]) -> dict[str, float]:
    """Largest differences from one rank: of the outputs, and of the gradients of x and of the rank's weights."""
    x, (a, b, bias) = drawn(ROWS, WIDTH).requires_grad_(), (w.requires_grad_() for w in weights())
    expected = mlp(x, a, b, bias)
    y = drawn(*expected.shape, seed=9)
    wanted = torch.autograd.grad(expected, (x, a, b), y)
    own = (mine(a.detach()).requires_grad_(), mine(b.detach(), 1).requires_grad_())
    result = layer(x, *own, bias)
    found = torch.autograd.grad(result, (x, *own), y)
    pairs = zip(("x", "a", "b"), found, (wanted[0], mine(wanted[1]), mine(wanted[2], 1)), strict=True)
    return {"out": float((result - expected).abs().max())} | {name: float((p - q).abs().max()) for name, p, q in pairs}


def cut_gaps() -> dict[str, dict[str, float]]:
    return {layer.__name__: gaps(layer) for layer in (cut_mlp, unsummed_mlp, twice_biased_mlp)}


def test_a_cut_mlp_has_the_outputs_and_gradients_of_a_whole_one(group: dict[str, list[Any]]) -> None:
    for found in group["cut_gaps"]:
        assert max(found["cut_mlp"].values()) <= NEAR
        # Controls: a cut by columns without a sum, and a bias that every rank adds.
        assert found["unsummed_mlp"]["out"] > 0.01
        assert found["twice_biased_mlp"]["out"] > 0.01


def token_norm(x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], drawn(WIDTH, seed=4), drawn(WIDTH, seed=5))


def sequence_norm(x: torch.Tensor) -> torch.Tensor:
    """A control: statistics over the tokens, as statement W32 has them."""
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt() * drawn(WIDTH, seed=4) + drawn(WIDTH, seed=5)


def norm_gaps() -> dict[str, float]:
    """Largest difference between a norm of whole rows and the same norm of each rank's rows, put together again."""
    x = drawn(ROWS, WIDTH)
    return {
        norm.__name__: float((conjugates.whole_rows(norm(conjugates.own_rows(x))) - norm(x)).abs().max())
        for norm in (token_norm, sequence_norm)
    }


def test_w32_layer_norm_needs_one_token_alone(group: dict[str, list[Any]]) -> None:
    """Tokens split over ranks have the norms of whole sequences; a norm over the sequence has not."""
    for found in group["norm_gaps"]:
        assert found["token_norm"] == 0
        assert found["sequence_norm"] > 0.01


def block(x: torch.Tensor) -> torch.Tensor:
    """A block with sequence parallelism: norm of own rows, g, MLP, ḡ, residual of own rows."""
    a, b, bias = weights()
    rows = conjugates.own_rows(x)
    inner = functional.gelu(conjugates.column_linear(conjugates.gather_rows(token_norm(rows)), mine(a)))
    return conjugates.whole_rows(rows + conjugates.scatter_rows(functional.linear(inner, mine(b, 1))) + bias)


def tensor_block(x: torch.Tensor) -> torch.Tensor:
    a, b, bias = weights()
    return x + cut_mlp(token_norm(x), mine(a), mine(b, 1), bias)


def whole_block(x: torch.Tensor) -> torch.Tensor:
    return x + mlp(token_norm(x), *weights())


def forgetful_block(x: torch.Tensor) -> torch.Tensor:
    """A control: without f the gradient of x is that of the rank's own columns."""
    a, b, bias = weights()
    return x + conjugates.row_linear(functional.gelu(functional.linear(token_norm(x), mine(a))), mine(b, 1), bias)


def checks() -> dict[str, Any]:
    x = drawn(ROWS, WIDTH).requires_grad_()
    made = {each.__name__: gradcheck(each, (x,), raise_exception=False) for each in (block, tensor_block, forgetful_block)}
    gap = max(float((each(x) - whole_block(x)).abs().max()) for each in (block, tensor_block))
    return made | {"gap": gap}


def test_gradcheck_in_float64(group: dict[str, list[Any]]) -> None:
    """Every rank perturbs the same x, so the numerical gradient is that of the whole block."""
    for found in group["checks"]:
        assert found["block"]
        assert found["tensor_block"]
        assert not found["forgetful_block"]
        assert found["gap"] <= NEAR


def vocabulary(size: int = 256) -> tuple[float, float]:
    """Largest differences of a vocabulary-parallel embedding and head from whole ones."""
    share = Share(dist.get_rank(), dist.get_world_size(), tiny_config(vocab_size=size))
    table, ids = drawn(size, WIDTH), torch.tensor([0, 5, 63, 64, 100, size - 1])
    own = table[share.vocab.start : share.vocab.stop]
    rows = conjugates.embedding(ids, own, share.vocab)
    logits = conjugates.whole_columns(conjugates.column_linear(rows, own))
    return float((rows - table[ids]).abs().max()), float((logits - table[ids] @ table.T).abs().max())


def test_vocabulary_parallel_embedding_and_head(group: dict[str, list[Any]]) -> None:
    for embedded, logits in group["vocabulary"]:
        assert embedded == 0
        assert logits <= NEAR


# -- whole models ------------------------------------------------------------------------------------------------------
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38]
ARCHITECTURES = ("llama", "qwen2", "gpt2", "gemma3_text")


def sizes(architecture: str) -> ModelConfig:
    kv_heads = 8 if architecture == "gpt2" else 4
    return tiny_config(architecture, heads=8, kv_heads=kv_heads, head_dim=16, ffn=128)


@torch.inference_mode()
def logits_of(model: Model) -> torch.Tensor:
    pool = KVPool(model.config, 2, 16, torch.float64)
    rows: torch.Tensor = model(build(pool, [FeedRows(TOKENS, [0, 1])]))
    return rows


def ranked(architecture: str, summed: bool) -> torch.Tensor:
    """Logits of a model whose layers this rank has a share of; the embedding and the head are whole."""
    whole = tiny_model(sizes(architecture))
    share = Share(dist.get_rank(), dist.get_world_size(), whole.config)
    model = describe(share.narrowed())
    for (path, ours), (_, theirs) in zip(model.holders(), whole.holders(), strict=True):
        if getattr(ours, "columns", None) is not None and summed:
            ours.method = conjugates.RowParallel()  # type: ignore[attr-defined]
        ours.create(Allocator(torch.float64))
        for field, spec in theirs.params().items():
            values, pieces = getattr(theirs, field), []
            for (name, _), value in zip(spec.parts, values.split([rows for _, rows in spec.parts]), strict=True):
                target = ".".join(filter(None, (path, name, field)))
                pieces.append(value if "layers" not in path else _cut(value, target, spec, share))
            getattr(ours, field).copy_(torch.cat(pieces))
        ours.finish()
    return logits_of(model)


def _cut(value: torch.Tensor, target: str, spec: Any, share: Share) -> torch.Tensor:
    shape = tuple(value.shape)
    taken: torch.Tensor = cut(WeightPart(target, target, shape, shape), spec, share).take(value)
    return taken


def both() -> dict[str, tuple[float, float]]:
    """Largest difference from the logits of one process, with and without the sums over ranks."""
    made = {}
    for architecture in ARCHITECTURES:
        expected = logits_of(tiny_model(sizes(architecture)))
        cases = (ranked(architecture, summed) for summed in (True, False))
        summed, unsummed = (float((found - expected).abs().max()) for found in cases)
        made[architecture] = summed, unsummed
    return made


def test_two_processes_have_the_logits_of_one(group: dict[str, list[Any]]) -> None:
    for found in group["both"]:
        for architecture, (summed, unsummed) in found.items():
            assert summed <= NEAR, architecture
            assert unsummed > 0.01, f"{architecture}: the control, no sum over ranks"
