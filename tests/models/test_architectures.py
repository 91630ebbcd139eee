"""Every architecture gives the logits of `transformers`, however its tokens are fed."""

import pytest
import torch

from headrace.kv.pool import KVPool
from headrace.ops.context import FeedRows, build
from headrace.weights.loader import load_model
from tests.models.feeding import BLOCK, feed
from tests.models.zoo import CONFIGS, hf_source, largest_gap, loaded, oracle, oracle_logits, prompts

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str) -> None:
    """Whole, in uneven chunks (chunks and single tokens mixed in one step) and token by token, several sequences at once."""
    theirs = oracle(name)
    ours, batch = loaded(theirs), prompts()
    expected = oracle_logits(theirs, batch)
    spread = max(float(rows.std()) for rows in expected)
    assert spread > 0.3, "the logits must say something"
    for mode in ("whole", "chunks", "tokens"):
        gap = largest_gap(feed(ours, batch, mode), expected)
        assert gap <= TOLERANCE, f"{name} fed {mode}: {gap}"


@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-window", "qwen3", "gemma3-one-kv-head", "gpt2"])
def test_float64_is_exact(name: str) -> None:
    """Card A1 in float64: prefill and decode equal a full recompute, chunks equal one shot, to 1e-10."""
    model = loaded(oracle(name, torch.float64), torch.float64)
    batch = prompts(1)
    whole = feed(model, batch, "whole", torch.float64)
    assert whole[0].dtype == torch.float64
    for mode in ("chunks", "tokens"):
        assert largest_gap(feed(model, batch, mode, torch.float64), whole) <= 1e-10
    alone = [feed(model, [prompt], "whole", torch.float64)[0] for prompt in batch]
    assert largest_gap(alone, whole) <= 1e-10


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.08), (torch.float16, 0.01)])
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2-tied", "qwen3", "gemma3-one-kv-head", "gpt2"])
def test_half_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    """bfloat16 and float16 stay near float32 of the same rounded weights, and give float32 logits."""
    theirs = oracle(name).to(dtype).float()
    batch = prompts(2, (9, 30))
    expected = torch.cat(oracle_logits(theirs, batch))
    got = torch.cat(feed(loaded(theirs, dtype), batch, "chunks", dtype))
    assert got.dtype == torch.float32
    error = float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())
    assert error < tolerance


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-window", "qwen2-window", "qwen3", "gemma3-ropes", "gpt2"])
@torch.no_grad()
def test_tree_nodes_have_the_logits_of_their_path(name: str) -> None:
    """A draft tree below a prompt of which a part is already in the pool: each node as if its path were the text."""
    model = loaded(oracle(name, torch.float64), torch.float64)
    prompt, nodes, parents = prompts(5, (21,))[0], [3, 50, 7, 50, 11, 90, 4], [-1, -1, 0, 0, 2, 1, 4]
    pool = KVPool(model.config, 8, BLOCK, torch.float64)
    table = [6, 1, 7, 0, 4, 2, 5]
    model(build(pool, [FeedRows(prompt[:18], table)]))
    logits = model(build(pool, [FeedRows(prompt[18:], table, 18, nodes, parents)]))[3:]
    for node, row in enumerate(logits):
        path, at = [], node
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        whole = feed(model, [prompt + path], "whole", torch.float64)[0]
        torch.testing.assert_close(row, whole[-1], rtol=1e-9, atol=1e-9)


def _swap_halves(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensor.chunk(2)[::-1])


@pytest.mark.parametrize(
    "broken",
    ["layers.1.self_attn.q_proj.weight", "layers.1.self_attn.k_proj.weight", "layers.2.mlp.up_proj.weight"],
)
def test_a_wrong_permutation_changes_the_logits(broken: str) -> None:
    """Negative control: rows in another order (which fits every shape) move the logits far beyond the tolerance."""
    theirs = oracle("llama-gqa")
    source = hf_source(theirs)
    source.tensors[f"model.{broken}"] = _swap_halves(source.tensors[f"model.{broken}"])
    batch = prompts()
    assert largest_gap(feed(load_model(source), batch, "whole"), oracle_logits(theirs, batch)) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "setting"),
    [("mistral-window", {"sliding_window": None}), ("llama-rope-llama3", {"rope_parameters": {"rope_theta": 500000.0}})],
)
def test_a_missing_setting_changes_the_logits(name: str, setting: dict[str, object]) -> None:
    """Negative control: without the window, or without the rotary scaling, the comparison fails."""
    theirs = oracle(name)
    source = hf_source(theirs)
    source.config.update(setting)
    batch = prompts()
    assert largest_gap(feed(load_model(source), batch, "whole"), oracle_logits(theirs, batch)) > 10 * TOLERANCE
