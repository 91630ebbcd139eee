"""Several exits in one decoder: a token takes the first confident one, and rows of one step may have different depths."""

from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.data.params import ParamError, SamplingParams
from headrace.data.plan import Feed, NewSlot, Propose, StepPlan, TableDelta
from headrace.engine import feeding
from headrace.llm import LLM
from headrace.runner import early_exit
from headrace.runner.early_exit import MOST_BEHIND, DraftExits, EarlyExit, Exit
from headrace.runner.runner import Runner
from headrace.runner.span import Span
from headrace.startup import thresholds
from headrace.training.early_exit_calibration import CalibrationConfig, calibrate_threshold
from tests.cli_shell import Shell
from tests.e2e.test_draft_model import Native, Torch
from tests.e2e.test_propagating import stored
from tests.early_exit_controls import deciding, no_catching_up
from tests.early_exits import (
    Job,
    Propagated,
    Reference,
    collect_exits,
    collect_logprobs,
    engine_of,
    expected,
    jobs_of,
    parts_of,
    played,
    side_of,
    write_exits,
)
from tests.tiny_files import write_tiny_gguf

LAYERS, AFTER = 6, (2, 3, 5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
KINDS = {"torch": Torch, "native": Native}
STATES: dict[str, type[Reference]] = {"deferred": Reference, "propagated": Propagated}
Case = tuple[Torch, list[Job], list[list[list[int]]]]


@lru_cache
def case_of(kind: str, state: str) -> Case:
    """Jobs, and the outputs of each alone and without a cache. Every exit writes some tokens, and so does the full model."""
    side, jobs = side_of(KINDS[kind], LAYERS), several_jobs(9 if kind == "native" else 3)
    reference = STATES[state](side, AFTER)
    outputs = expected(reference, jobs)
    may = sum(len(tokens) for each, (_, one) in zip(outputs, jobs, strict=True) for tokens in each if one.exit_threshold)
    counts = [*(reference.exits[layers] for layers in AFTER), may - reference.exited]
    assert min(counts) > 0.04 * may, f"exits and full model write {counts} tokens of {may}"
    return side, jobs, outputs


def several_jobs(count: int) -> list[Job]:
    """The jobs of tests of one exit; the last one that may exit needs more confidence at earlier exits."""
    return [(prompt, params.replace(exit_slope=0.1) if params.exit_decay else params) for prompt, params in jobs_of(5, count)]


def several(side: Torch, state: str, **settings: Any) -> Any:
    return engine_of(side, after=AFTER, propagate=state == "propagated", **settings)


WAYS: list[tuple[str, dict[str, Any], int]] = [
    ("native", {}, 0),
    ("native", {"seqs": 3}, 3),
    ("native", {"budget": 7}, 2),
    ("native", {"blocks": 10, "budget": 22}, 0),  # they preempt one another
    ("torch", {"budget": 7}, 3),
]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("kind", "settings", "preempt"), WAYS)
def test_every_output_equals_the_reference(kind: str, state: str, settings: dict[str, Any], preempt: int) -> None:
    side, jobs, outputs = case_of(kind, state)
    engine = several(side, state, **settings)
    for _ in range(2):  # the second time from the prefix cache
        assert played(engine, jobs, preempt) == outputs
    assert engine.scheduler.preemptions > 0 or not (preempt or "blocks" in settings)
    assert engine.blocks.used == 0


@pytest.mark.parametrize("most", [0, 1, 3])
def test_how_far_the_layers_above_lag_changes_nothing(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    side, jobs, outputs = case_of("native", "deferred")
    monkeypatch.setattr(early_exit, "MOST_BEHIND", most)
    assert played(several(side, "deferred", blocks=12, budget=22), jobs) == outputs


@pytest.mark.parametrize("state", STATES)
def test_an_unreachable_threshold_equals_the_full_model(state: str) -> None:
    side, _, _ = case_of("native", state)
    whole = GREEDY.replace(logprobs=3, max_tokens=12)
    left = collect_logprobs(several(side, state), [5, 9, 7], whole.replace(exit_threshold=1.01))
    assert left == collect_logprobs(engine_of(side, leaves=False), [5, 9, 7], whole)


def test_rows_of_one_step_have_different_depths() -> None:
    """Each layer runs only the rows that have not exited below it, and those that it has not seen."""
    side, _, _ = case_of("native", "deferred")
    engine = several(side, "deferred", drafts=False)
    program: Any = engine.executor.runner.programs[0]
    steps: list[dict[int, int]] = []
    run, leaving = program.run, engine.executor.runner.leaving.run

    def counting(step: Any, span: Any, given: Any = None, keep: bool = False) -> Any:
        made = run(step, span, given, keep)
        steps[-1][span.first] = len(made if given is None else given)
        return made

    def stepping(*given: Any) -> Any:
        steps.append({})
        return leaving(*given)

    program.run, engine.executor.runner.leaving.run = counting, stepping
    for at in range(8):
        engine.add([5 + at, 9, 30 + at], GREEDY.replace(exit_threshold=0.17))
    depths = []
    while engine.busy:
        depths.append(Counter(one.layers for delta in engine.step() for one in delta.exits))
    del program.run
    assert any(len(each) >= 3 for each in depths), "one step has rows of three depths"
    for rows, each in zip(steps[1:], depths[1:], strict=False):
        assert rows[0] == each.total()
        assert all(rows.get(layers, 0) <= MOST_BEHIND * each.total() + each.total() for layers in AFTER)
        if not each[LAYERS]:
            assert AFTER[-1] not in rows or max(rows.values()) > each.total(), "the last layers run only to catch up"


def test_an_audit_reports_the_deciding_exit_and_the_full_model() -> None:
    side, _, _ = case_of("native", "deferred")
    tokens, exits = collect_exits(several(side, "deferred"), [9, 8, 7], GREEDY.replace(exit_threshold=0.17, exit_audit=True))
    plain, without = collect_exits(several(side, "deferred"), [9, 8, 7], GREEDY.replace(exit_threshold=0.17))
    assert tokens == plain
    assert [one.layers for one in exits] == [one.layers for one in without]
    for token, one in zip(tokens[1:], exits[1:], strict=True):
        assert (one.layers < LAYERS) == (one.confidence >= 0.17)
        assert token == one.votes[one.layers == LAYERS]


# -- negative controls: each of these must be seen -------------------------------------------------------------------------


def one_store(patch: pytest.MonkeyPatch) -> None:
    """Rows of all exits lie in one store, so those of one exit replace those of another."""
    begin = EarlyExit.__init__

    def shared(self: EarlyExit, target: Any, exits: Any, kept: Any) -> None:
        begin(self, target, exits, [kept[0]] * len(kept))

    patch.setattr(EarlyExit, "__init__", shared)


def lag_of_the_first(patch: pytest.MonkeyPatch) -> None:
    """All layers above the first exit are taken to lag alike."""
    entering = EarlyExit._entering

    def alike(self: EarlyExit, exit: int, feed: Feed, asks: bool) -> Feed:
        lags = feed.lags[:1] * len(feed.lags)
        return entering(self, exit, early_exit.msgspec.structs.replace(feed, lags=lags), asks)

    patch.setattr(EarlyExit, "_entering", alike)


def last_exit_alone(patch: pytest.MonkeyPatch) -> None:
    """A token may take the last exit only."""
    judge = EarlyExit._judge

    def judged(self: EarlyExit, exit: int, *more: Any) -> Any:
        return judge(self, exit, *more) if exit == len(self.depths) - 1 else {}

    patch.setattr(EarlyExit, "_judge", judged)


CONTROLS = {
    "no catching up": no_catching_up,
    "lag of the first": lag_of_the_first,
    "last exit alone": last_exit_alone,
    "by how far the layers above lag": deciding(lambda feed: feed.lag < 2),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_wrong_rules_change_the_output(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side, jobs, outputs = case_of("native", "deferred")
    CONTROLS[control](monkeypatch)
    assert played(several(side, "deferred"), jobs, preempt=3) != outputs


def test_the_pool_after_preemptions_is_the_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are computed again exit where they did; the control lets them exit at the first exit."""
    side, _, _ = case_of("native", "propagated")

    def pool(*preempt: int) -> tuple[list[int], Any]:
        engine, last = several(side, "propagated"), 0
        request = engine.add(list(range(5, 30)), GREEDY.replace(max_tokens=30, exit_threshold=0.17))
        (seq,) = request.seqs
        for _ in range(200):
            if len(seq.tokens) == 50:
                break
            if len(seq.tokens) in preempt and len(seq.tokens) > last and request in engine.scheduler.running:
                last = len(seq.tokens)
                engine.scheduler._preempt(request)
            engine.step()
        return list(seq.kv.depths), stored(engine, seq.kv.tables[0], 49)

    depths, first = pool()
    assert len(set(depths)) >= 2, "rows exited at two exits"
    again, kept = pool(35, 42)
    assert again == depths
    assert np.array_equal(kept, first)
    depth_of = feeding.depth_of
    monkeypatch.setattr(feeding, "depth_of", lambda seq, index: AFTER[0] if depth_of(seq, index) else 0)
    assert not np.array_equal(pool(35, 42)[1], first)


# -- drafts ----------------------------------------------------------------------------------------------------------------


def drafting(side: Torch, exits: tuple[Exit, ...], tokens: list[int], count: int) -> tuple[list[int], list[tuple[int, bool]]]:
    """A chain of `count` draft tokens after known tokens, and the spans of the target that ran: first layer, whether filled."""
    target, _ = parts_of(side, 8, AFTER)
    runner = Runner(target, [DraftExits(exits)])
    blocks = list(range(8 if side.block == 16 else 32))
    params = SamplingParams(temperature=0.0)
    runner.execute(StepPlan(0, new=[NewSlot(0, tokens=tokens, params=params)], tables=[TableDelta(0, 0, 0, blocks)]))
    spans: list[tuple[int, bool]] = []
    run = target.run

    def seen(step: Any, span: Span, *more: Any, **named: Any) -> Any:
        spans.append((span.first, span.fill))
        return run(step, span, *more, **named)

    target.run = seen
    chain: list[int] = []
    for at in range(count):
        nodes, parents = ((chain[-1],), (-1,)) if chain else ((), ())
        start = len(tokens) + at - 1 if chain else 0
        feed = Feed(0, start, 0 if chain else len(tokens), wants=(Propose(0, at),), nodes=nodes, parents=parents)
        (answers,) = runner.run(StepPlan(at + 1, 1, feeds=[feed])).feeds
        chain.append(answers[0].tokens[0])  # type: ignore[union-attr]
    return chain, spans


def test_a_draft_token_comes_from_the_first_confident_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """With no confidence needed the first exit drafts all tokens, with more than there is the last one; between, both do, and
    the layers above an exit take K/V from its row."""
    side, _, _ = case_of("native", "deferred")
    _, exits = parts_of(side, 8, AFTER)
    text = [9, 8, 7, 30, 11]

    def chain(least: float, chosen: tuple[Exit, ...] = exits) -> tuple[list[int], list[tuple[int, bool]]]:
        monkeypatch.setattr(early_exit, "DRAFT_CONFIDENCE", least)
        return drafting(side, chosen, text, 6)

    first, spans = chain(0.0)
    assert {one for one, fill in spans if not fill} == {0}, "no layer above the first exit runs"
    assert sum(fill for _, fill in spans) == 6
    last, spans = chain(1.01)
    assert last == chain(0.0, exits[-1:])[0]
    assert not any(fill for _, fill in spans)
    mixed, spans = chain(0.17)
    assert {one for one, fill in spans if not fill} > {0}
    assert any(fill for _, fill in spans)
    assert mixed not in (first, last) or first == last

    ran = early_exit._run

    def without_fill(target: Any, feeds: Any, lives: Any, span: Span, rows: Any) -> Any:
        return None if span.fill else ran(target, feeds, lives, span, rows)

    monkeypatch.setattr(early_exit, "_run", without_fill)
    assert not [one for one in chain(0.17)[1] if one[1]], "the control leaves the layers between without K/V"


# -- opened with a folder --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model with four layers and exits after one, two and three."""
    place = tmp_path_factory.mktemp("several")
    model = write_tiny_gguf(place / "tiny.gguf", layers=4)
    return model, write_exits(place / "exits", model, 1, 2, 3)


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("state", ["deferred", "propagate"])
def test_a_model_opened_with_several_exits(folders: tuple[Path, Path], backend: str, state: str) -> None:
    model, exits = folders
    settings: dict[str, Any] = {"exits": exits, "exit_state": state, "backend": backend, "threads": 1, "device": "cpu"}
    settings |= {"dtype": "float64"} if backend == "torch" else {}
    rule = GREEDY.replace(exit_threshold=0.0, exit_slope=50.0)  # only the last exit needs no confidence
    with LLM(model, exit_layers="all", **settings) as llm, LLM(model, **settings) as single:
        (never,) = llm.generate("The mill", GREEDY.replace(exit_threshold=1.01))
        (first,) = llm.generate("The mill", GREEDY.replace(exit_threshold=0.0))
        (last,) = llm.generate("The mill", rule)
        (alone,) = single.generate("The mill", GREEDY.replace(exit_threshold=0.0))
        (plain,) = single.generate("The mill", GREEDY)
    assert never.outputs[0].token_ids == plain.outputs[0].token_ids
    assert [one.layers for one in first.outputs[0].exits or ()] == [4] + [1] * 23
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids
    assert [one.layers for one in last.outputs[0].exits or ()] == [4] + [3] * 23
    with LLM(model, exit_layers="2,3", **settings) as llm:
        (second,) = llm.generate("The mill", GREEDY.replace(exit_threshold=0.0))
    assert [one.layers for one in second.outputs[0].exits or ()] == [4] + [2] * 23


def test_several_exits_draft(folders: tuple[Path, Path]) -> None:
    model, exits = folders
    settings: dict[str, Any] = {"threads": 1, "device": "cpu", "backend": "native", "draft_tokens": 3}
    with LLM(model, **settings | {"speculate": None, "draft_tokens": None}) as llm:
        (plain,) = llm.generate("The mill", GREEDY)
    with LLM(model, draft=exits, exit_layers="all", speculate="heads", **settings) as llm:
        assert isinstance(llm.runner._exits[1], DraftExits)
        (drafted,) = llm.generate("The mill", GREEDY)
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.drafted > 0


def test_exit_layers_that_cannot_be_used(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, exits = folders
    with pytest.raises(ValueError, match="exit_layers needs exits; name their folder"):
        LLM(model, exit_layers="all", threads=1, device="cpu")
    with pytest.raises(ValueError, match=r"stand after 1, 2, 3 layers; name some, or all"):
        LLM(model, exits=exits, exit_layers="1,4", threads=1, device="cpu")
    heads = write_exits(tmp_path / "heads", model, kind="heads")
    with pytest.raises(ValueError, match="these heads are not exits, so exit_layers names none"):
        LLM(model, draft=heads, exit_layers="all", threads=1, device="cpu")
    with pytest.raises(ParamError, match="exit_slope"):
        SamplingParams(exit_threshold=0.5, exit_slope=-1.0)


def test_earlier_exits_need_more_confidence() -> None:
    """The threshold of each exit, and its decay from there on."""
    params = SamplingParams(exit_threshold=0.8, exit_slope=1.0, max_tokens=100)
    assert [params.sure_at(9, share) for share in (0.25, 0.5, 1.0)] == pytest.approx([0.95, 0.9, 0.8])
    assert params.replace(exit_decay=4.0).sure_at(0, 0.5) == pytest.approx(0.91)
    assert params.replace(exit_slope=0.0).sure_at(9, 0.25) == 0.8
    assert params.replace(exit_threshold=1.01).sure_at(9, 0.25) == 1.01


def test_a_rule_holds_for_the_exits_it_was_calibrated_with(shell: Shell, folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, exits = folders
    source = tmp_path / "prompts.txt"
    source.write_text("\n".join(f"line {number}" for number in range(6)))
    ask = ("calibrate", model, "--exits", exits, "-i", source, "-m", "4", "--threads", "1", "--delta", "0.9")
    code, _, err = shell(*ask, "--exit-layers", "all", "--slope", "0.5")
    assert code == 0, err
    (rule,) = thresholds.load(exits)
    assert (rule.exits, rule.slope) == ("all", 0.5)
    assert "slope 0.5, exit_layers all" in rule.summary()
    run = ("run", model, "The mill", "--raw", "-m", "12", "-t", "0", "--threads", "1", "--exits", exits)
    code, out, err = shell(*run, "--exit-layers", "all", "--exit-threshold", "0.0", "--exit-slope", "0", "--show-exits")
    assert code == 0, err
    assert "calibrated: " in err
    assert "after 1 of 4 layers: 11 tokens" in out
    assert "calibrated: " not in shell(*run)[2], "the exit that drafts has no rule of its own"
    (exits / thresholds.CALIBRATION).unlink()


def test_thresholds_of_several_exits_are_calibrated(folders: tuple[Path, Path]) -> None:
    """The mean depth lies between the first exit and all layers, and the loss is that of answers written so."""
    model, exits = folders
    prompts = [[5 + number, 9, 30 + number] for number in range(30)]
    means: list[float] = []
    with LLM(model, exits=exits, exit_layers="all", threads=1, device="cpu", backend="native") as llm:
        config = CalibrationConfig(max_tokens=8, delta=0.99, slope=0.2)
        rule, found = calibrate_threshold(llm, prompts, config, lambda _, mean: means.append(mean), (1.01, 0.0))
    assert rule is not None
    assert 1 <= rule.layers < 4
    assert means[0] == 0
    assert np.isclose(found.tried[-1].risk, means[-1])
