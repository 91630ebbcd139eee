"""Logit processors next to early exits: no request fails because an exit chooses from a part of the vocabulary, and an audit
reports both votes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.decoding.processors import History
from headrace.llm import LLM
from headrace.runner.early_exit import EarlyExit
from tests.early_exits import write_exits
from tests.tiny_files import write_tiny_gguf

PROMPT = [5, 9, 7]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PART = range(4, 60)  # tokens of the exit
AFTER, LAYERS = 2, 3


class Only:
    """Lets only some tokens come."""

    scope = "pointwise"

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)

    def apply(self, logits: torch.Tensor, history: History, paths: Any) -> torch.Tensor:
        kept = logits[:, self.ids].clone()
        logits[:] = float("-inf")
        logits[:, self.ids] = kept
        return logits


@pytest.fixture(scope="module", params=["native", "torch"])
def kinds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    place = tmp_path_factory.mktemp("models")
    path = write_tiny_gguf(place / "three.gguf", layers=LAYERS)
    part, full = write_exits(place / "part", path, AFTER, ids=PART), write_exits(place / "full", path, AFTER)
    how: dict[str, Any] = {"backend": request.param, "threads": 1, "max_num_seqs": 4, "speculate": None}
    how |= {"dtype": "float64"} if request.param == "torch" else {}
    smaller = write_tiny_gguf(place / "smaller.gguf", layers=2, seed=5)
    return {
        "deferred": LLM(path, exits=part, **how),
        "propagated": LLM(path, exits=part, exit_state="propagate", **how),
        "all tokens": LLM(path, exits=full, **how),
        "cascade": LLM(path, cascade=smaller, **how),
    }


def params_of(kind: str, threshold: float, audit: bool = False) -> SamplingParams:
    name = "cascade" if kind == "cascade" else "exit"
    return GREEDY.replace(**{f"{name}_threshold": threshold, f"{name}_audit": audit})


@pytest.mark.parametrize("kind", ["deferred", "propagated", "all tokens"])
@pytest.mark.parametrize("threshold", [0.0, 1.01])
def test_a_processor_equals_the_same_token_restriction(kinds: dict[str, LLM], kind: str, threshold: float) -> None:
    """Tokens that the exit has, that it lacks, and some of each. The restriction is made where the logits are."""
    params, writers = params_of(kind, threshold), set()
    for ids in ((100, 101), (10, 11, 12), (11, 100, 12, 101)):
        (found,) = kinds[kind].generate([PROMPT], params, processors=(Only(ids),))
        (wanted,) = kinds[kind].generate([PROMPT], params.replace(allowed_token_ids=ids))
        assert found.error is None
        one, other = found.outputs[0], wanted.outputs[0]
        if kind != "propagated" or threshold > 1 or not set(ids) - set(PART):  # there the row has exited, whoever writes
            assert one.token_ids == other.token_ids
            assert [each.layers for each in one.exits or ()] == [each.layers for each in other.exits or ()]
        assert set(one.token_ids) <= set(ids)
        writers |= {each.layers for each in one.exits or ()}
    assert writers == ({AFTER, LAYERS} if threshold == 0 else {LAYERS})


def test_the_control_without_the_full_models_row_fails(kinds: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EarlyExit, "_runs_both", lambda self, feed, live: live.params.audited)
    (found,) = kinds["deferred"].generate([PROMPT], params_of("deferred", 0.0), processors=(Only((100, 101)),))
    assert found.error is not None


@pytest.mark.parametrize("kind", ["deferred", "propagated", "all tokens", "cascade"])
@pytest.mark.parametrize("threshold", [0.0, 0.02, 1.01])
def test_an_audit_reports_both_votes_next_to_a_processor(kinds: dict[str, LLM], kind: str, threshold: float) -> None:
    params = params_of(kind, threshold, audit=True)
    everything = Only(range(kinds[kind].model_config.vocab_size))
    (plain,) = kinds[kind].generate([PROMPT], params)
    (found,) = kinds[kind].generate([PROMPT], params, processors=(everything,))
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    votes = [one.votes for one in found.outputs[0].exits or ()]
    assert votes == [one.votes for one in plain.outputs[0].exits or ()]
    assert all(len(vote) == 2 for vote in votes[1:]), "of the first token only the full model has a vote"
    assert any(first != second for first, second in votes[1:]), "the control: the two differ"


@pytest.mark.parametrize("kind", ["deferred", "cascade"])
def test_a_processor_that_bars_everything_is_named(kinds: dict[str, LLM], kind: str) -> None:
    (found,) = kinds[kind].generate([PROMPT], params_of(kind, 0.0), processors=(Only(()),))
    assert found.error == "NoTokenError: logit processors (Only) bar every token; leave one a finite logit"
