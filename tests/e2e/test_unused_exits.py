"""With an exit that no request uses, all kinds of requests give the outputs of an engine without exits."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.engine.engine import Engine
from headrace.runner.early_exit import EarlyExit
from headrace.runner.span import Span
from tests.beams import add_beam
from tests.e2e.test_draft_model import Native, Torch
from tests.early_exits import LAYERS, engine_of
from tests.tiny import finish, tokens_of
from tests.tiny_native import native_model

KINDS = {"torch": Torch, "native": Native}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"num_layers": LAYERS},
    "qwen3": {"num_layers": LAYERS},
    "gemma3_text": {"slides": (True, True, False)},
}
TEXT = [7, 9, 11, 13, 7, 9, 11, 13, 7, 9, 11]  # there is something to look up in it
GREEDY = SamplingParams(temperature=0.0, max_tokens=14)
DRAWN = SamplingParams(temperature=0.8, seed=4, n=2, max_tokens=14)
NEVER: dict[str, Any] = {"exit_threshold": 1.01}


def side_of(kind: str, architecture: str) -> Torch:
    side = KINDS[kind]()
    side.target = native_model(architecture, **ARCHITECTURES[architecture])
    return side


def answered(engine: Engine, may_leave: bool) -> tuple[list[Any], int]:
    """What comes of greedy, drawn and searched requests, all in one batch, and how many tokens were drafted beside them.
    `may_leave`: some ask for a threshold that nobody reaches."""
    never = NEVER if may_leave else {}
    jobs = [(TEXT, GREEDY), (TEXT, GREEDY.replace(**never)), (TEXT[3:], DRAWN), (TEXT[1:], DRAWN.replace(**never))]
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    beams = add_beam(engine, TEXT[2:], BeamSearchParams(beam_width=3, n=3, max_tokens=10))
    finish(engine)
    found = [(seq.output, score) for seq, score in beams.strategy.results(beams)]
    return [*map(tokens_of, requests), found], sum(request.metrics.drafted for request in requests)


def same(a: list[Any], b: list[Any], bitwise: bool) -> bool:
    """Tokens and scores; in torch these up to the order of sums."""
    if bitwise:
        return a == b
    pairs = zip(a[-1], b[-1], strict=True)
    return a[:-1] == b[:-1] and all(x == y and score == pytest.approx(other, abs=1e-9) for (x, score), (y, other) in pairs)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_an_unused_exit_changes_nothing(kind: str, architecture: str) -> None:
    side = side_of(kind, architecture)
    plain, _ = answered(engine_of(side, leaves=False), False)
    for may_leave in (False, True):
        found, drafted = answered(engine_of(side), may_leave)
        assert same(found, plain, kind == "native")
        assert drafted > 0, "nothing was drafted beside them"


def skipping(patch: pytest.MonkeyPatch) -> None:
    """The layers above begin one too late."""
    finish = EarlyExit._finish

    def skipped(self: EarlyExit, climb: Any, rest: Any) -> Any:
        return finish(self, climb, lambda a, b, span, x: rest(a, b, Span(first=span.first + 1), x))

    patch.setattr(EarlyExit, "_finish", skipped)


def rows_of_another_layer(patch: pytest.MonkeyPatch) -> None:
    """All layers run, and the rows that are handed on are those of the layer below the exit."""

    def below(self: EarlyExit, exit: int, feeds: Any, lives: Any, rows: Any) -> Any:
        before = self._run(feeds, lives, Span(self.depth - 1), None)
        self._run(feeds, lives, Span(self.depth, first=self.depth - 1), before)
        return before, None

    patch.setattr(EarlyExit, "_below", below)


@pytest.mark.parametrize("control", [skipping, rows_of_another_layer])
def test_a_wrong_span_changes_the_output(
    control: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = side_of("native", "llama")
    plain, _ = answered(engine_of(side, leaves=False), False)
    control(monkeypatch)
    found, _ = answered(engine_of(side), True)
    assert not same(found, plain, True)
