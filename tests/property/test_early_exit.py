"""Tokens that an exit or a smaller model writes, under random load: whatever lags, is pushed out, found again or forked, every
output equals the reference, in which who writes depends on the tokens before alone."""

from collections.abc import Callable

import pytest

from headrace.data.config import EngineConfig
from headrace.data.plan import StepOutput, StepPlan
from headrace.drafting.ngram import PromptLookup
from headrace.drafting.speculation import Speculation
from headrace.engine.engine import Engine
from tests.early_exit_controls import no_catching_up, published_too_early
from tests.property.drafters import Guessing
from tests.property.staged import CascadingJob, LeavingJob, StagedJob, with_a_smaller_model, with_an_exit
from tests.property.test_engine import run, wrong_outputs

SEEDS = range(16)
Build = Callable[[EngineConfig, int, Speculation | None], Engine]
KINDS: dict[str, tuple[Build, type[StagedJob]]] = {
    "an exit": (with_an_exit, LeavingJob),
    "a smaller model": (with_a_smaller_model, CascadingJob),
}
Tamper = Callable[[Engine], None]


def load(kind: str, seed: int, tamper: Tamper | None = None, check: bool = True) -> tuple[list[str], Engine]:
    """One load to its end, plain requests with drafts in it. Returns the outputs that are wrong."""
    build, job = KINDS[kind]

    def speculation() -> Speculation:
        return Speculation([Guessing(seed) if seed % 2 else PromptLookup()], max_model_len=256, gamma=6)

    jobs, outputs, engine = run(seed, tamper, check, speculation, job, build)
    return wrong_outputs(jobs, outputs), engine


@pytest.mark.parametrize("kind", KINDS)
def test_every_output_equals_the_reference(kind: str) -> None:
    """And all of it happens: tokens are written first and not, layers lag and catch up, forks, preemptions, plans under way."""
    seen = dict.fromkeys(("first", "whole", "lags", "catches up", "preempted", "depth 2"), 0)

    def watch(engine: Engine) -> None:
        execute = engine.executor.runner.execute  # type: ignore[attr-defined]

        def counting(plan: StepPlan) -> StepOutput:
            output: StepOutput = execute(plan)
            for number, one in output.exited.items():
                seen["whole" if one.layers == 2 else "first"] += 1
                seen["lags"] += number in output.unfilled
            seen["catches up"] += sum(feed.lag > 0 and at not in output.unfilled for at, feed in enumerate(plan.feeds))
            return output

        engine.executor.runner.execute = counting  # type: ignore[attr-defined]

    for seed in SEEDS:
        wrong, engine = load(kind, seed, watch)
        assert not wrong
        assert engine.blocks.used == 0
        assert not engine.scheduler.requests
        seen["preempted"] += engine.scheduler.preemptions
        seen["depth 2"] += engine.executor.depth > 1
    assert all(count >= 5 for count in seen.values()), seen


# -- negative controls: each breaks one rule, and the loads above must notice ----------------------------------------------


CONTROLS = {"no catching up": no_catching_up, "published too early": published_too_early}


@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_one_is_caught(kind: str, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    CONTROLS[control](monkeypatch)
    assert any(load(kind, seed, check=False)[0] for seed in SEEDS)
