"""The second rule of verification as the loop calls it, in torch: a round's key, how rows are processed, broken rows."""

import numpy as np
import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.data.types import Decode, Request, Sequence
from headrace.ops.keys import Purpose, key, round_key
from headrace.ops.noise import coins, gumbel_at
from headrace.ops.processing import RowSpec
from headrace.ops.rejection import draw_draft, row_spec, verify, verify_block, verify_tokens

SIZE = 6
RULES = {"rejection": verify_tokens, "block": verify_block}


def specs(rule: str, gamma: int, seed: int = 0) -> list[RowSpec]:
    params = SamplingParams(temperature=1.0, verification=rule)
    return [RowSpec(params, [key(seed)], [3, 1, 4], 3, [0] * at, purpose=Purpose.DRAFT) for at in range(gamma + 1)]


def test_the_key_of_a_round_is_that_of_seeded_outputs() -> None:
    """Changing it changes every output that was drawn by rejection."""
    step = 0x9E3779B97F4A7C15
    assert round_key(7, 0, 2) == key(7, 2)
    assert round_key(7, 1, 2) == key(7 + step, 2)
    assert round_key(2**64 - 1, 3, 0) == key((2**64 - 1 + 3 * step) % 2**64, 0)
    assert len({round_key(1, known, child) for known in range(50) for child in range(3)}) == 150


def test_a_row_spec_has_the_parameters_of_its_request() -> None:
    params = SamplingParams(temperature=0.5, seed=9)
    request = Request(id="r", prompt=[1, 2], params=params, seed=9, strategy=None, arrival=0, stop_ids=frozenset({5, 3}))
    seq = Sequence(0, [1, 2, 4], 2, decode=Decode(index=2))
    assert row_spec(request, seq, [6, 7], b"mask") == RowSpec(
        params, [round_key(9, 3, 2)], [1, 2, 4], 2, [6, 7], stop_ids=[3, 5], purpose=Purpose.DRAFT, mask=b"mask"
    )
    assert row_spec(request, seq, []).mask == b""


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("drawn", [False, True], ids=["chosen", "drawn"])
def test_a_chain_is_judged_by_its_rule_with_the_noise_of_its_places(rule: str, drawn: bool) -> None:
    lengths = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        gamma = 1 + seed % 3
        logits = torch.from_numpy(rng.normal(0, 1, (gamma + 1, SIZE)).astype(np.float32))
        q = rng.dirichlet([1.0] * SIZE, gamma).astype(np.float32)
        chain = [int(row.argmax()) for row in q]
        if not drawn:
            q = np.eye(SIZE, dtype=np.float32)[chain]
        keys, places = torch.tensor([key(seed)] * (gamma + 1)), torch.arange(3, 4 + gamma)
        accepted, token = RULES[rule](
            logits.double().softmax(-1)[None],
            torch.from_numpy(q).double()[None],
            torch.tensor([chain]),
            coins(keys[:-1], places[:-1], Purpose.ACCEPT)[None],
            gumbel_at(keys, places, SIZE, Purpose.RESIDUAL).double()[None],
        )
        given = [row.tobytes() for row in q] if drawn else None
        assert verify(logits, specs(rule, gamma, seed), chain, given) == (int(accepted[0]), int(token[0]))
        lengths.add(int(accepted[0]))
    assert lengths >= {0, 1, 2}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")], ids=str)
def test_a_row_that_cannot_be_drawn_from_ends_the_chain_before_it(rule: str, value: float) -> None:
    """Token 1 is certain in every good row."""
    for broken in ([0], [1], [2], [3], [1, 3], [0, 1, 2, 3]):
        logits = torch.zeros(4, SIZE)
        logits[:, 1] = 60.0
        logits[broken] = value
        first = broken[0]
        assert verify(logits, specs(rule, 3), [1, 1, 1], None) == (first, None)
    logits = torch.zeros(4, SIZE)
    logits[:, 1], logits[2] = 60.0, value
    assert verify(logits, specs(rule, 3), [1, 4, 1], None) == (1, 1)  # rejected before the broken row is reached


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("width", [SIZE - 2, SIZE + 2])
def test_the_draft_vocabulary_may_be_smaller_or_larger(rule: str, width: int) -> None:
    """What is behind its vocabulary it cannot draw, and what is behind the target's counts nothing."""
    q = np.zeros(width, "<f4")
    q[:4] = 0.25
    for seed in range(20):
        logits = torch.randn(2, SIZE, generator=torch.Generator().manual_seed(seed))
        same = np.zeros(SIZE, "<f4")
        same[:4] = 0.25
        given = verify(logits, specs(rule, 1, seed), [2], [q.tobytes()])
        assert given == verify(logits, specs(rule, 1, seed), [2], [same.tobytes()])


def test_invalid_draft_logits_give_no_draft() -> None:
    (spec,) = specs("rejection", 0)
    for value in (float("nan"), float("-inf")):
        assert draw_draft(torch.full((SIZE,), value), spec) is None
    found = draw_draft(torch.tensor([0.0, 1.0, float("-inf"), 2.0]), spec)
    assert found is not None
    token, q = found
    assert token in (0, 1, 3)
    assert q.dtype == torch.float32
    assert q.tolist() == pytest.approx([0.0900306, 0.2447285, 0.0, 0.6652410], abs=1e-6)
