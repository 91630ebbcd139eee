"""Verification on real attention: with tree drafts = without, token for token, for every processor, batched with the rest.

Exactness class: bitwise on the native core, whose rows are invariant; in torch in float64 the tokens are equal.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.data.types import Request
from headrace.decoding.beam import BeamSearch, BeamSearchParams
from headrace.decoding.processors import LengthNudge
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.models.base import Model
from tests.drafters import Replaying
from tests.e2e.test_equalities import ARCHITECTURES, load
from tests.tiny import VOCAB, finish, tiny_config, tiny_engine, tiny_model, tokens_of
from tests.tiny_native import native_engine, native_model
from tests.ulps import rounded_once

Make = Callable[..., Engine]
Asks = list[tuple[list[int], SamplingParams, dict[str, Any]]]


def on_torch(architecture: str, **changes: object) -> Make:
    model = tiny_model(tiny_config(architecture, **changes))
    return lambda **settings: tiny_engine(model, **settings)


def on_native(architecture: str, **changes: object) -> Make:
    model: Model = native_model(architecture, **changes)
    return lambda **settings: native_engine(model, **settings)


BACKENDS = {"torch": on_torch, "native": on_native}


@pytest.fixture(scope="module", params=[(b, a) for b in BACKENDS for a in ARCHITECTURES], ids="-".join)
def make(request: pytest.FixtureRequest) -> Make:
    backend, architecture = request.param
    return BACKENDS[backend](architecture)


def play(engine: Engine, asks: Asks) -> list[Request]:
    requests = [engine.add(prompt, params, **more) for prompt, params, more in asks]
    finish(engine)
    return requests


def both(make: Make, asks: Asks, seed: int = 0, **settings: Any) -> tuple[list[Request], list[Request]]:
    """The same requests without drafts and with trees around what came out then."""
    plain = play(make(budget=256, blocks=256), asks)
    answers = {
        (tuple(request.prompt), request.seed, seq.decode.index): seq.output for request in plain for seq in request.finished
    }
    speculation = Speculation([Replaying(answers, VOCAB, seed)], max_model_len=256, gamma=8)
    return plain, play(make(speculation=speculation, **settings), asks)


def requests_of(jobs: list[tuple[list[int], SamplingParams]], **more: Any) -> Asks:
    return [(prompt, params.replace(seed=params.seed or 0), more) for prompt, params in jobs]


@pytest.mark.parametrize("settings", [{"budget": 256, "blocks": 128}, {"budget": 24, "blocks": 40, "seqs": 6}])
def test_drafts_change_nothing(make: Make, settings: dict[str, int]) -> None:
    plain, drafted = both(make, requests_of(load(5)), **settings)
    assert [tokens_of(request) for request in drafted] == [tokens_of(request) for request in plain]
    assert sum(request.metrics.accepted for request in drafted) > 20
    assert sum(request.metrics.drafted - request.metrics.accepted for request in drafted) > 20


def test_log_probabilities_come_with_accepted_tokens(make: Make) -> None:
    prompt = load(6)[4][0]
    heard: list[list[Any]] = []
    for mode in ("raw", "processed"):
        params = SamplingParams(temperature=0.9, top_k=20, seed=2, max_tokens=16, logprobs=2, logprobs_mode=mode)
        for speculation in (None, Speculation([Replaying(_answer(make, prompt, params), VOCAB)], 256, gamma=8)):
            engine = make(speculation=speculation)
            engine.add(prompt, params)
            heard.append([entry for _ in range(100) for delta in engine.step() for entry in delta.logprobs])
        plain, drafted = heard[-2:]
        assert len(drafted) == 16
        for ours, theirs in zip(drafted, plain, strict=True):
            assert (ours.token, ours.rank, ours.top_ids) == (theirs.token, theirs.rank, theirs.top_ids)
            assert rounded_once([ours.logprob, *ours.top_logprobs], [theirs.logprob, *theirs.top_logprobs])


def _answer(make: Make, prompt: list[int], params: SamplingParams) -> dict[Any, list[int]]:
    (request,) = play(make(), [(prompt, params, {})])
    return {(tuple(prompt), request.seed, 0): tokens_of(request)[0]}


def test_the_callers_processors_are_right_at_every_node(make: Make) -> None:
    nudge = {"processors": (LengthNudge(7, 4, slope=3.0), _NoneTwice())}
    asks = [(p, s.replace(seed=1, max_tokens=14, stop_token_ids=(7,)), nudge) for p, s in load(7)[:4]]
    plain, drafted = both(make, asks)
    assert [tokens_of(request) for request in drafted] == [tokens_of(request) for request in plain]
    assert sum(request.metrics.accepted for request in drafted) > 5
    assert any(7 in seq.output for request in plain for seq in request.finished), "the nudge does nothing"


class _NoneTwice:
    """No token twice in an output: wrong wherever the path is not seen."""

    scope = "path"

    def apply(self, logits: torch.Tensor, history: Any, paths: Any) -> torch.Tensor:
        for row, path in zip(logits, paths, strict=True):
            row[[*history.output, *path]] = float("-inf")
        return logits


def test_siblings_and_beams_in_one_batch(make: Make) -> None:
    """n = 3 with drafts, beams without, stop tokens inside an accepted path."""
    prompts = [prompt for prompt, _ in load(8)]
    beam = BeamSearchParams(beam_width=3, max_tokens=10, n=2)
    asks: Asks = [
        (prompts[3], SamplingParams(n=3, temperature=1.0, seed=9, max_tokens=20), {}),
        (prompts[4], beam.sampling().replace(seed=0), {"strategy": BeamSearch(beam)}),
        (prompts[5], SamplingParams(temperature=0.8, seed=4, max_tokens=30, stop_token_ids=tuple(range(0, VOCAB, 9))), {}),
        (prompts[2], SamplingParams(temperature=0.8, seed=4, max_tokens=30, min_tokens=9, stop_token_ids=tuple(range(30))), {}),
    ]
    answers: dict[Any, list[int]] = {}
    results = []
    for settings in ({"blocks": 256}, {"blocks": 48, "budget": 20}):
        speculation = Speculation([Replaying(answers, VOCAB)], 256, gamma=8) if answers else None
        engine = make(speculation=speculation, **settings)
        texts: dict[tuple[int, int], list[int]] = {}
        requests = [engine.add(prompt, params, request_id=str(i), **more) for i, (prompt, params, more) in enumerate(asks)]
        while engine.busy:
            for delta in engine.step():
                texts.setdefault((int(delta.request_id), delta.index), []).extend(delta.token_ids)
            engine.check()
        results.append(texts)
        for number, request in enumerate(requests):
            keys = [(tuple(request.prompt), request.seed, index) for index in range(request.params.n)]
            answers |= {key: texts[number, index] for index, key in enumerate(keys)}
    assert results[0] == results[1]
    assert sum(request.metrics.accepted for request in requests) > 5
    assert all(request.metrics.drafted == 0 for request in requests if isinstance(request.strategy, BeamSearch))
