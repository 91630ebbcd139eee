"""Drafts of outputs that are held to a grammar: trees, trained heads and lookahead, on both back ends. What comes is what comes
without drafts, and what one of them would have led to, had it been right, harms nobody."""

from typing import Any

import pytest
import torch

from headrace.data.params import SamplingParams
from headrace.data.plan import Answer, Drawn
from headrace.data.types import Draft, Request, Sequence
from headrace.decoding.constrained import Constraint
from headrace.drafting.lookahead import Lookahead
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from headrace.ops.trees import paths
from tests.drafters import Replaying
from tests.e2e.test_draft_model import Torch
from tests.e2e.test_heads import COUNT, HEADS, engine_of, heads, side
from tests.e2e.test_verification import BACKENDS, Asks, Make
from tests.tiny import VOCAB, finish, tokens_of
from tests.toy_grammar import ToyMatcher, fits, held, held_params

__all__ = ["side"]
PROMPT = [5, 9, 2, 11, 5, 9, 2]
PARAMS = (held_params(temperature=0.0, max_tokens=24), held_params(temperature=1.0, seed=3, n=2, max_tokens=24))


@pytest.fixture(scope="module", params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Make:
    return BACKENDS[request.param]("llama")


def play(engine: Engine, asks: Asks) -> list[Request]:
    """The requests when all have ended, some of them with an error."""
    requests = [engine.add(prompt, params, **more) for prompt, params, more in asks]
    while engine.busy:
        engine.step()
        engine.check()
    return requests


def outcomes(requests: list[Request]) -> list[tuple[str | None, list[list[int]]]]:
    return [(request.error, tokens_of(request)) for request in requests]


def replayed(make: Make, limits: frozenset[int] = frozenset()) -> tuple[list[Request], list[Request]]:
    """The requests of PARAMS without drafts and with trees around what came out."""
    asks = [(PROMPT, params.replace(seed=seed), {}) for params in PARAMS for seed in range(3)]
    plain = play(held(make(budget=256, blocks=256), limits), asks)
    answers = {(tuple(PROMPT), request.seed, seq.decode.index): seq.output for request in plain for seq in request.finished}
    speculation = Speculation([Replaying(answers, VOCAB, 1)], 256, gamma=8)
    return plain, play(held(make(budget=256, blocks=256, speculation=speculation), limits), asks)


def test_trees_change_nothing(make: Make) -> None:
    plain, drafted = replayed(make)
    assert outcomes(drafted) == outcomes(plain)
    assert all(request.error is None for request in plain)
    assert sum(request.metrics.accepted for request in drafted) > 40
    assert all(fits(tokens) for request in plain for tokens in tokens_of(request))
    free = play(make(budget=256, blocks=256), [(PROMPT, PARAMS[0].replace(structured_outputs=None), {})])
    assert not fits(tokens_of(free[0])[0]), "the grammar forbids nothing"


def test_a_state_taken_from_the_node_before_would_be_seen(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: in a tree the node before is not the parent."""

    def before(self: Constraint, tokens: list[int], parents: list[int]) -> list[Any]:
        matchers: list[Any] = []
        for token in tokens:
            last = matchers[-1] if matchers else self._matcher
            after = None if last is None else last.deep_copy()
            matchers.append(after if after is not None and after.consume_token(token) else None)
        return matchers

    monkeypatch.setattr(Constraint, "_nodes", before)
    plain, drafted = replayed(make)
    assert outcomes(drafted) != outcomes(plain)


class Dangerous:
    """Drafts every token of some that may come, all as siblings."""

    name = "dangerous"

    def __init__(self, tokens: frozenset[int]) -> None:
        self.tokens = sorted(tokens)

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        return Draft(list(self.tokens), [-1] * len(self.tokens))


def test_a_matcher_failure_in_a_rejected_draft_is_ignored(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grammar reaches a limit behind tokens that are drafted and never come."""
    (plain,) = play(held(make()), [(PROMPT, PARAMS[0], {})])
    limits = frozenset(range(VOCAB)).difference(*tokens_of(plain))
    limits = frozenset(sorted(limits)[:40])
    failures = []
    said = ToyMatcher.is_error
    monkeypatch.setattr(ToyMatcher, "is_error", lambda self: said(self) and failures.append(self) is None)
    engine = held(make(speculation=Speculation([Dangerous(limits)], 256, gamma=4)), limits)
    (drafted,) = play(engine, [(PROMPT, PARAMS[0], {})])
    assert outcomes([drafted]) == outcomes([plain])
    assert len(failures) > 20


class Chain:
    """Drafts what is known to come, one token a node."""

    name = "chain"

    def __init__(self, answers: dict[int, list[int]]) -> None:
        self.answers = answers  # of each seed

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        drawn = len(seq.output)
        tokens = self.answers[request.seed][drawn : drawn + most]
        return Draft(tokens, list(range(-1, len(tokens) - 1))) if tokens else None


class Unchanged:
    """A processor that leaves every row as it is: what is drawn is drawn on the host."""

    scope = "pointwise"

    def apply(self, logits: torch.Tensor, history: Any, paths: Any) -> torch.Tensor:
        return logits


@pytest.mark.parametrize("processors", [(), (Unchanged(),)], ids=["", "on-the-host"])
@pytest.mark.parametrize(
    "settings", [{}, {"verification": "rejection"}, {"verification": "block"}], ids=["walk", "tokens", "block"]
)
def test_a_matcher_failure_on_the_accepted_path_ends_as_in_plain_decoding(make: Make, settings: Any, processors: Any) -> None:
    """With the token behind which nothing can be drawn, and then with the matcher's own words."""
    asks = [
        (PROMPT, held_params(temperature=0.5, max_tokens=12, seed=seed, **settings), {"processors": processors})
        for seed in range(6)
    ]
    answers = {request.seed: tokens_of(request)[0] for request in play(held(make()), asks)}
    accepted = failed = 0
    for ask, answer in zip(asks, answers.values(), strict=True):
        limits = frozenset(answer[3:4])
        said = []
        for speculation in (None, Speculation([Chain(answers)], 256, gamma=8)):
            engine = held(make(speculation=speculation), limits)
            request = engine.add(ask[0], ask[1], **ask[2])
            tokens: list[int] = []
            while engine.busy:
                tokens += [token for delta in engine.step() for token in delta.token_ids]
            said.append((request.error, tokens))
            accepted += request.metrics.accepted
        assert said[1] == said[0] or settings, "the walk draws what plain decoding draws"
        for error, tokens in said:  # rejection may have drawn others
            assert (error, limits.isdisjoint(tokens[:-1])) == ("item limit" if limits.intersection(tokens) else None, True)
            failed += bool(error)
    assert accepted > 3
    assert failed > 6


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"])
def test_heads_draft_only_permitted_tokens(side: Torch, params: SamplingParams) -> None:
    jobs = [([*PROMPT, at], params) for at in range(3)]
    plain = held(engine_of(side, heads(HEADS, True)))
    plain.speculation = None
    expected = [plain.add(*job) for job in jobs]
    finish(plain)
    engine = held(engine_of(side, heads(HEADS, True)))
    drafts: list[tuple[list[int], list[int]]] = []
    assert engine.speculation is not None
    observe = engine.speculation.observe

    def observing(request: Request, seq: Sequence, draft: Draft, *answered: Any) -> None:
        drafts.append((seq.output, list(draft.tokens)))
        observe(request, seq, draft, *answered)

    engine.speculation.observe = observing  # type: ignore[method-assign]
    requests = [engine.add(*job) for job in jobs]
    finish(engine)
    assert [tokens_of(request) for request in requests] == [tokens_of(request) for request in expected]
    assert max(len(draft) for _, draft in drafts) == COUNT
    assert sum(request.metrics.drafted for request in requests) > 60


class Watched(Lookahead):
    """Compares what is collected with what was drawn behind each trajectory that the grammar left whole."""

    def __init__(self) -> None:
        super().__init__(width=4, length=3, guesses=4)
        self.collected: list[tuple[int, ...]] = []
        self.expected: list[tuple[int, ...]] = []
        self.pruned = 0

    def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
        draft = super().draft(request, seq, most)
        self.whole = 0 if draft is None else len(draft.tokens)
        return draft

    def observe(self, request: Request, seq: Sequence, draft: Draft, path: tuple[int, ...], nodes: tuple[Answer, ...]) -> None:
        levels = [list(level) for level in seq.decode.memory[self.name].levels]
        self.pruned += len(nodes) < self.whole
        known = dict(zip(map(tuple, paths(draft.tokens, draft.parents)), nodes, strict=False))
        for column in range(len(levels[0])):
            along = (*levels[0][: column + 1], levels[1][column])
            if isinstance(answer := known.get(along), Drawn):
                self.expected.append((*along[-2:], answer.tokens[0]))
        super().observe(request, seq, draft, path, nodes)

    def _collect(self, window: Any, ngram: tuple[int, ...]) -> None:
        self.collected.append(ngram)
        super()._collect(window, ngram)


def test_lookahead_learns_from_the_remaining_nodes(make: Make) -> None:
    drafter = Watched()
    (plain,) = play(held(make()), [(PROMPT, held_params(temperature=0.0, max_tokens=80), {})])
    engine = held(make(speculation=Speculation([drafter], 256, gamma=8)))
    (drafted,) = play(engine, [(PROMPT, held_params(temperature=0.0, max_tokens=80), {})])
    assert tokens_of(drafted) == tokens_of(plain)
    assert drafter.pruned > 20
    assert drafter.collected == drafter.expected
    assert len(drafter.collected) > 20
