"""DRY, XTC, top-n-sigma, mirostat and best_of give the same outputs with and without tree drafts, on both back ends."""

from typing import Any

import pytest

from headrace.data.params import SamplingParams
from headrace.data.types import Request
from headrace.drafting.speculation import Speculation
from tests.drafters import Replaying
from tests.e2e.test_verification import BACKENDS, Make, play
from tests.tiny import VOCAB, tokens_of

PROMPT = [5, 9, 2, 11, 5, 9, 2]
SETTINGS: dict[str, dict[str, Any]] = {
    "DRY": {"dry_multiplier": 3.0, "dry_allowed_length": 1, "temperature": 0.7},
    "greedy DRY": {"dry_multiplier": 3.0, "dry_allowed_length": 1, "temperature": 0.0},
    "XTC": {"xtc_probability": 0.5, "xtc_threshold": 0.05, "temperature": 0.6},
    "top-n-sigma": {"top_n_sigma": 1.2},
    "mirostat": {"mirostat_tau": 2.5, "mirostat_eta": 0.6},
    "all": {"dry_multiplier": 1.0, "dry_allowed_length": 1, "top_n_sigma": 2.0, "xtc_probability": 0.5, "temperature": 0.9},
}


@pytest.fixture(scope="module", params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Make:
    return BACKENDS[request.param]("llama")


def ended(requests: list[Request]) -> list[list[list[int]]]:
    return [tokens_of(request) for request in requests]


@pytest.mark.parametrize("name", SETTINGS)
def test_drafts_change_nothing(make: Make, name: str) -> None:
    asks = [(PROMPT, SamplingParams(seed=seed, n=2, max_tokens=24, **SETTINGS[name]), {}) for seed in range(3)]
    plain = play(make(budget=256, blocks=256), asks)
    answers = {(tuple(r.prompt), r.seed, seq.decode.index): seq.output for r in plain for seq in r.finished}
    drafted = play(make(budget=256, blocks=256, speculation=Speculation([Replaying(answers, VOCAB)], 256, gamma=8)), asks)
    assert ended(drafted) == ended(plain)
    assert sum(request.metrics.accepted for request in drafted) > 20
    plainly = [(prompt, SamplingParams(seed=params.seed, n=2, max_tokens=24), {}) for prompt, params, _ in asks]
    free = play(make(budget=256, blocks=256), plainly)
    assert ended(free) != ended(plain)  # the control: the sampler does something here


def test_best_of_ranks_drafted_outputs_by_all_their_tokens(make: Make) -> None:
    params = SamplingParams(seed=4, n=2, best_of=4, max_tokens=20)
    (plain,) = play(make(budget=256, blocks=256), [(PROMPT, params, {})])
    expected = [(seq.output, score) for seq, score in plain.strategy.results(plain)]
    answers = {(tuple(PROMPT), plain.seed, seq.decode.index): seq.output for seq in plain.finished}
    speculation = Speculation([Replaying(answers, VOCAB)], 256, gamma=8)
    (drafted,) = play(make(budget=256, blocks=256, speculation=speculation), [(PROMPT, params, {})])
    found = [(seq.output, score) for seq, score in drafted.strategy.results(drafted)]
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert [score for _, score in found] == pytest.approx([score for _, score in expected], abs=1e-5)
    assert drafted.metrics.accepted > 10
