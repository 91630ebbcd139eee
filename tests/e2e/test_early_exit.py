"""Early exit without verification: the exit of a token depends only on the tokens before it, on either back end."""

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.compress.pipeline import Pipeline
from headrace.compress.write import compress
from headrace.data.params import ParamError, SamplingParams
from headrace.data.settings import ModelSettings
from headrace.data.types import Request
from headrace.decoding.processors import LengthNudge
from headrace.engine.engine import AdmissionError
from headrace.llm import LLM
from headrace.runner import early_exit as leaving
from headrace.runner.early_exit import MOST_BEHIND
from headrace.startup import heads as files
from headrace.startup import thresholds
from headrace.startup.opening import open_files
from headrace.stats.paired_ratio import rouge_l
from headrace.training.early_exit_calibration import CalibrationConfig, calibrate_threshold
from headrace.training.overlap import hashes
from tests.cli_shell import Shell
from tests.e2e.test_draft_model import Native, Torch
from tests.early_exit_controls import deciding, no_catching_up, published_too_early
from tests.early_exits import (
    AFTER,
    LAYERS,
    Job,
    Reference,
    assert_same_logprobs,
    collect_exits,
    collect_logprobs,
    engine_of,
    expected,
    jobs_of,
    played,
    side_of,
    write_exits,
)
from tests.tiny import finish
from tests.tiny_files import write_tiny_gguf

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
KINDS = {"torch": Torch, "native": Native}
WAYS: dict[str, dict[str, Any]] = {"together": {}, "three at once": {"seqs": 3}, "chunks of seven": {"budget": 7}}
Case = tuple[Torch, list[Job], list[list[list[int]]]]


@pytest.fixture(scope="module", params=KINDS)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


@lru_cache
def case_of(kind: str) -> Case:
    """A side, jobs, and what comes of each, alone and without a cache."""
    side, jobs = side_of(KINDS[kind]), jobs_of(5)
    reference = Reference(side)
    outputs = expected(reference, jobs)
    may = sum(len(tokens) for each, (_, one) in zip(outputs, jobs, strict=True) for tokens in each if one.exit_threshold)
    assert 0.2 * may < reference.exited < 0.8 * may, f"the thresholds do not part the tokens: {reference.exited} of {may}"
    return side, jobs, outputs


@pytest.fixture
def native() -> Case:
    """What no back end changes is looked at on the one whose sums have one order."""
    return case_of("native")


def tight(side: Torch) -> int:
    """Blocks of a pool in which requests drive each other out."""
    return 10 if side.block == 16 else 52


@pytest.mark.parametrize(
    ("case", "way", "preempt"),
    [
        *(("native", way, preempt) for way in WAYS for preempt in (0, 3)),
        ("torch", "together", 0),
        ("torch", "chunks of seven", 3),
    ],
    indirect=["case"],
)
def test_every_output_equals_the_reference(case: Case, way: str, preempt: int) -> None:
    side, jobs, outputs = case
    engine = engine_of(side, **WAYS[way])
    for _ in range(2):  # the second time from the prefix cache
        assert played(engine, jobs, preempt) == outputs
    assert engine.scheduler.preemptions > 0 or not preempt
    assert engine.blocks.used == 0


@pytest.mark.parametrize(("case", "most"), [*(("native", most) for most in range(8)), ("torch", 5)], indirect=["case"])
def test_how_far_the_layers_above_lag_changes_nothing(case: Case, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pool in which requests drive each other out."""
    side, jobs, outputs = case
    monkeypatch.setattr(leaving, "MOST_BEHIND", most)
    engine = engine_of(side, blocks=tight(side), budget=22)
    assert played(engine, jobs) == outputs
    assert engine.scheduler.preemptions > 0


def answers_continued(side: Torch) -> list[Job]:
    """Prompts that are what another request has written, most of it by its exit."""
    first = list(range(5, 30)), GREEDY.replace(max_tokens=56, exit_threshold=0.0)  # it ends with a block, and lags seven tokens
    ((answer,),) = played(engine_of(side), [first])
    return [first, *((first[0] + answer[:count] + [3, 4], GREEDY) for count in (20, 41, 56))]


def continued(side: Torch) -> tuple[Any, Any, list[Request]]:
    """Those prompts, in the engine that has written them: outputs, those of the reference, and the requests."""
    first, *jobs = answers_continued(side)
    engine = engine_of(side, drafts=False)
    played(engine, [first])
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    return [[seq.output for seq in request.finished] for request in requests], expected(Reference(side), jobs), requests


def test_a_prefix_is_reused_up_to_the_slowest_layer(native: Case) -> None:
    outputs, wanted, requests = continued(native[0])
    assert outputs == wanted
    assert all(request.metrics.cached_tokens >= 32 for request in requests)


def test_upper_layers_run_once_in_eight_tokens(native: Case) -> None:
    """Where every token leaves, the layers above run for the prompt and then once in eight tokens, for all eight."""
    side, _, _ = native
    engine = engine_of(side, drafts=False)
    program: Any = engine.executor.runner.programs[0]  # type: ignore[attr-defined]
    rows: list[tuple[int, int]] = []
    run = program.run

    def counting(step: Any, span: Any, given: Any = None, keep: bool = False) -> Any:
        made = run(step, span, given, keep)
        rows.append((span.first, 0 if given is None else len(given)))
        return made

    program.run = counting
    engine.add([7] * 20, GREEDY.replace(exit_threshold=0.0, max_tokens=2 + 2 * (MOST_BEHIND + 1)))
    finish(engine)
    del program.run
    assert [count for first, count in rows if first == AFTER] == [20, MOST_BEHIND + 1, MOST_BEHIND + 1]
    assert sum(first == 0 for first, _ in rows) == 2 + 2 * (MOST_BEHIND + 1)


SAMPLED = GREEDY.replace(temperature=0.9, seed=4, n=2, exit_criterion="saturation")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_unreachable_threshold_equals_the_full_model(case: Case, params: SamplingParams) -> None:
    """Tokens and log-probabilities, bit for bit on the native core; in torch as its sums allow."""
    side, jobs, _ = case
    whole = params.replace(logprobs=3, max_tokens=12)
    for prompt, _ in jobs[:2]:
        left = collect_logprobs(engine_of(side), prompt, whole.replace(exit_threshold=1.01))
        plain = collect_logprobs(engine_of(side, leaves=False), prompt, whole)
        assert len(left) == params.n * 12
        assert_same_logprobs(left, plain, side.block == 16)


def test_each_token_has_its_exit_layer_confidence_and_votes(native: Case) -> None:
    """The layers it was written after, how sure the exit was, and under an audit what both would say."""
    side, _, _ = native
    tokens, exits = collect_exits(engine_of(side), [9, 8, 7], GREEDY.replace(exit_threshold=0.17, exit_audit=True))
    assert exits[0].layers == LAYERS
    assert exits[0].confidence is None
    assert not exits[0].votes
    for token, one in zip(tokens[1:], exits[1:], strict=True):
        assert one.layers == (AFTER if one.confidence >= 0.17 else LAYERS)
        assert token == one.votes[one.layers == LAYERS]
    assert {one.layers for one in exits} == {AFTER, LAYERS}
    assert any(one.votes[0] != one.votes[1] for one in exits[1:])


def test_w19_the_lead_is_not_the_probability(native: Case) -> None:
    """Of one token the probability, the lead and the cosine are three numbers, and the lead is never above the probability."""
    side, _, _ = native
    measured = []
    for criterion in ("max_prob", "margin", "saturation"):
        engine = engine_of(side)
        engine.add([9, 8, 7], GREEDY.replace(exit_threshold=1.01, exit_criterion=criterion))
        told_of = [one for _ in range(24) for delta in engine.step() for one in delta.exits]
        measured.append([one.confidence for one in told_of[1:]])
    assert all(lead < best for best, lead in zip(*measured[:2], strict=True))
    assert all(-1 <= cosine <= 1 for cosine in measured[2])
    assert len({tuple(each) for each in measured}) == 3


# -- negative controls: each of these must be seen -------------------------------------------------------------------------


CONTROLS = {
    "no catching up": no_catching_up,
    "by how far the layers above lag": deciding(lambda feed: feed.lag < 2),
    "by what is fed again": deciding(lambda feed: feed.count == 1),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_wrong_exit_rules_change_the_output(native: Case, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side, jobs, outputs = native
    CONTROLS[control](monkeypatch)
    assert played(engine_of(side), jobs, preempt=3) != outputs


def test_a_prefix_that_some_layers_have_not_seen_would_be_seen(native: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    published_too_early(monkeypatch)
    outputs, wanted, _ = continued(native[0])
    assert outputs != wanted


def test_lagging_rows_count_in_the_token_budget(native: Case) -> None:
    """Twelve requests that all exit fall behind together. One of them may exceed the budget, by what it lags."""
    engine = engine_of(native[0], budget=16, seqs=12, blocks=120, drafts=False)
    for at in range(12):
        engine.add([5 + at, 9], GREEDY.replace(exit_threshold=0.0, max_tokens=24))
    schedule, rows = engine.scheduler.schedule, []

    def watched() -> Any:
        flight = schedule()
        if flight is not None:
            rows.append(sum(feed.count + feed.lag for feed in flight.plan.feeds))
        return flight

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    finish(engine)
    assert 16 < max(rows) <= 16 + MOST_BEHIND


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"exit_threshold": 1.5}, "exit_threshold must be between 0 and 1.01"),
        ({"exit_threshold": -0.1}, "exit_threshold must be between 0 and 1.01"),
        ({"exit_threshold": 0.5, "exit_criterion": "entropy"}, "must be one of max_prob, margin, saturation, classifier"),
        ({"exit_threshold": 0.5, "exit_decay": 4.0, "max_tokens": None}, "set max_tokens, or leave exit_decay out"),
        ({"exit_threshold": 0.5, "best_of": 3}, "leave exit_threshold or best_of out"),
        ({"exit_threshold": 0.5, "prompt_logprobs": 0}, "leave exit_threshold or prompt_logprobs out"),
        ({"exit_threshold": 0.5, "logprobs_mode": "processed"}, "set logprobs_mode to raw"),
        ({"exit_threshold": 0.5, "contrastive_beta": 0.5}, "leave exit_threshold or contrastive_beta out"),
        ({"exit_threshold": 0.5, "defer_rule": "chow"}, "leave exit_threshold or defer_rule out"),
        ({"exit_threshold": 0.5, "penalty_alpha": 0.5, "top_k": 4}, "leave out exit_threshold"),
    ],
)
def test_fields_that_exclude_early_exit_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ParamError, match=why):
        SamplingParams(**fields)


def test_unsupported_exit_requests_are_refused(native: Case) -> None:
    side, _, _ = native
    with pytest.raises(AdmissionError, match="exit_threshold needs exits; open the model with exits=FOLDER"):
        engine_of(side, leaves=False).add([5], GREEDY.replace(exit_threshold=0.5))
    with pytest.raises(AdmissionError, match="this exit is after the first one; use max_prob or margin"):
        engine_of(side, upper=(1, 2)).add([5], GREEDY.replace(exit_threshold=0.5, exit_criterion="saturation"))
    with pytest.raises(AdmissionError, match="these exits have no classifier; use max_prob or margin, or train them again"):
        engine_of(side, judges=False).add([5], GREEDY.replace(exit_threshold=0.5, exit_criterion="classifier"))
    processor = LengthNudge(end_id=0, start=1)
    processor.scope = "stateful"
    with pytest.raises(AdmissionError, match="stateful logit processor sees every token's logits once"):
        engine_of(side).add([5], GREEDY.replace(exit_threshold=0.5), processors=(processor,))


# -- opened with a folder --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its exits."""
    place = tmp_path_factory.mktemp("leaving")
    model = write_tiny_gguf(place / "tiny.gguf", layers=LAYERS)
    return model, write_exits(place / "exits", model, AFTER)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_model_opened_with_exits(folders: tuple[Path, Path], backend: str) -> None:
    model, exits = folders
    settings: dict[str, Any] = {"backend": backend, "threads": 1, "device": "cpu"}
    settings |= {"dtype": "float64"} if backend == "torch" else {}
    with LLM(model, exits=exits, **settings) as llm, LLM(model, **settings) as plain:
        (never,) = llm.generate("The mill", GREEDY.replace(exit_threshold=1.01))
        (left,) = llm.generate("The mill", GREEDY.replace(exit_threshold=0.0))
        (without,) = llm.generate("The mill", GREEDY)
        (whole,) = plain.generate("The mill", GREEDY)
    assert never.outputs[0].token_ids == without.outputs[0].token_ids == whole.outputs[0].token_ids
    assert without.outputs[0].exits is None
    assert [one.layers for one in never.outputs[0].exits or ()] == [LAYERS] * 24
    assert [one.layers for one in left.outputs[0].exits or ()] == [LAYERS] + [AFTER] * 23
    assert left.outputs[0].token_ids != whole.outputs[0].token_ids
    assert left.to_dict()["outputs"][0]["exits"][1]["layers"] == AFTER


def test_exits_that_cannot_be_opened(folders: tuple[Path, Path], tmp_path: Path) -> None:
    model, exits = folders
    drafts = write_exits(tmp_path / "heads", model, kind="heads")
    with pytest.raises(ValueError, match="these heads are not exits; train some: headrace train-heads"):
        LLM(model, exits=drafts, threads=1, device="cpu")
    with pytest.raises(ValueError, match="are not opened together; leave one out"):
        LLM(model, exits=exits, draft=drafts, threads=1, device="cpu")
    with pytest.raises(ValueError, match="no such folder; train some: headrace train-heads"):
        LLM(model, exits=tmp_path / "none", threads=1, device="cpu")
    with pytest.raises(ValueError, match=r"has no exits \(heads.json is missing\); train some"):
        LLM(model, exits=tmp_path, threads=1, device="cpu")
    (tmp_path / "classifier.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a classifier of texts .headrace classify.*, and no exits; train some"):
        LLM(model, exits=tmp_path, threads=1, device="cpu")
    with pytest.raises(ValueError, match="holds trained heads or exits of a model .*, and no model; name a .gguf file"):
        LLM(exits)


def test_a_calibrated_threshold(folders: tuple[Path, Path]) -> None:
    """Answers that leave are written with each threshold; the last that can be shown to lose little enough is kept."""
    model, exits = folders
    prompts = [[5 + number, 9, 30 + number] for number in range(30)]
    tried: list[tuple[float, float]] = []
    with LLM(model, exits=exits, threads=1, device="cpu", backend="native") as llm:
        config = CalibrationConfig(max_tokens=8, delta=0.5)
        rule, found = calibrate_threshold(llm, prompts, config, lambda *one: tried.append(one), (1.01, 0.9, 0.0))
        whole = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY.replace(max_tokens=8))]
        params = GREEDY.replace(max_tokens=8, exit_threshold=tried[-1][0])
        left = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    assert tried[0] == (1.01, 0.0)
    assert tried[-1][1] == pytest.approx(sum(1 - rouge_l(*pair) for pair in zip(left, whole, strict=True)) / 30)
    assert rule is not None
    assert rule.threshold == found.threshold
    assert AFTER <= rule.layers <= LAYERS
    thresholds.save(exits, rule)
    thresholds.save(exits, msgspec.structs.replace(rule, delta=0.4))
    assert [one.delta for one in thresholds.load(exits)] == [0.4]
    wrong = ({"criterion": "most"}, {"threshold": -1.0}, {"n": 0}, {"delta": 2.0}, {"spread": -1.0})
    changed = [msgspec.json.encode([msgspec.to_builtins(rule) | change]) for change in wrong]
    for data in (b"[1]", b'[{"criterion": "\xff"}]', *changed):
        (exits / thresholds.CALIBRATION).write_bytes(data)
        with pytest.raises(ValueError, match=r"calibration\.json cannot be read"):
            thresholds.load(exits)
    (exits / thresholds.CALIBRATION).unlink()


def test_risk_is_measured_against_references(folders: tuple[Path, Path], shell: Shell, tmp_path: Path) -> None:
    """Answers may differ from the full model's for nothing, as long as references are met as well; the control: references that
    are the full model's answers make it the loss of texts."""
    model, exits = folders
    prompts = [[5 + number, 9, 30 + number] for number in range(30)]
    lost: dict[str, list[float]] = {}
    with LLM(model, exits=exits, threads=1, device="cpu", backend="native") as llm:
        whole = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY.replace(max_tokens=8))]
        never = [[1, 2, 3]] * len(prompts)
        cases = {"text": (None, "text"), "same": (whole, "risk"), "other": (never, "risk")}
        for name, (references, loss) in cases.items():
            config = CalibrationConfig(max_tokens=8, delta=0.9, loss=loss)
            means: list[float] = lost.setdefault(name, [])
            calibrate_threshold(llm, prompts, config, lambda _, mean, to=means: to.append(mean), (0.9, 0.0), references)  # type: ignore[misc]
        with pytest.raises(ValueError, match="some prompts have none"):
            calibrate_threshold(llm, prompts, CalibrationConfig(loss="risk"), lambda *_: None)
    assert lost["same"] == pytest.approx(lost["text"])
    assert lost["text"][-1] > 0.1
    assert lost["other"][-1] < 0.5 * lost["text"][-1]
    source = tmp_path / "prompts.jsonl"
    source.write_text("\n".join(json.dumps({"prompt": f"line {at}", "reference": "the mill"}) for at in range(6)))
    ask = ("calibrate", model, "--exits", exits, "-i", source, "-m", "4", "--threads", "1", "--delta", "0.9", "--loss", "risk")
    code, _, err = shell(*ask)
    assert code == 0, err
    assert thresholds.load(exits)[0].loss == "risk"
    (exits / thresholds.CALIBRATION).unlink()
    source.write_text(json.dumps({"prompt": "line"}))
    assert 'line 1: has no text in "reference"' in shell(*ask)[2]


def test_rouge_l_of_answers() -> None:
    assert rouge_l([1, 2, 3], [1, 2, 3]) == 1
    assert rouge_l([1, 2, 3], [4, 5, 6]) == 0
    assert rouge_l([1, 2, 3, 4], [2, 4]) == pytest.approx(4 / 6)
    assert rouge_l([], []) == 1


def test_a_threshold_that_falls() -> None:
    """As the paper writes it: from 0.9 of the threshold and 0.1 down to 0.9 of the threshold."""
    params = SamplingParams(exit_threshold=0.8, exit_decay=4.0, max_tokens=100)
    assert params.sure_at(0) == pytest.approx(0.82)
    assert params.sure_at(50) == pytest.approx(0.72 + 0.1 * 0.1353352832)
    assert params.sure_at(1) > params.sure_at(2)
    assert params.replace(exit_decay=0.0).sure_at(50) == 0.8
    assert params.replace(exit_threshold=1.01).sure_at(99) == 1.01
    assert SamplingParams(exit_threshold=1.0, exit_decay=1.0).sure_at(0) == 1.0


def test_the_command_line_shows_early_exits(shell: Shell, folders: tuple[Path, Path]) -> None:
    model, exits = folders
    ask = ("run", model, "The mill", "--raw", "-m", "12", "-t", "0", "--threads", "1")
    code, out, err = shell(*ask, "--exits", exits, "--exit-threshold", "0.0", "--exit-audit", "--show-exits")
    assert code == 0, err
    assert f"after {AFTER} of {LAYERS} layers: 11 tokens" in out
    assert f"after {LAYERS} of {LAYERS} layers: 1 token" in out
    assert "92% exited early" in out
    assert "audit: the exit agrees with the full model at" in out
    code, out, err = shell(*ask, "--exits", exits, "--exit-threshold", "1.01", "--json")
    assert [one["layers"] for one in json.loads(out)["outputs"][0]["exits"]] == [LAYERS] * 12
    assert f"{LAYERS}.0 layers a token" in err
    for more, why in (
        (("--exit-threshold", "0.5"), "needs exits of the model: --exits FOLDER"),
        (("--exits", exits, "--show-exits"), "--show-exits goes with --exit-threshold"),
        (("--exits", exits, "--exit-threshold", "0.5", "--show-exits", "--json"), "leave out --json"),
        (("--exits", exits, "--exit-threshold", "2"), "--exit-threshold must be between 0 and 1.01"),
    ):
        code, _, err = shell(*ask, *more)
        assert code == 2
        assert why in " ".join(err.split())
    source = shell.folder / "prompts.txt"
    source.write_text("\n".join(f"line {number}" for number in range(6)))
    code, _, err = shell("calibrate", model, "--exits", exits, "-i", source, "-m", "4", "--threads", "1")
    assert code == 1
    assert "has 6 prompts, and fewer than 29 can show nothing" in err
    code, _, err = shell("calibrate", model, "--exits", exits, "-i", source, "-m", "4", "--threads", "1", "--delta", "0.9")
    assert code == 0, err
    (rule,) = thresholds.load(exits)
    assert f"calibrated: {rule.summary()}" in " ".join(shell(*ask, "--exits", exits)[2].split())
    (exits / thresholds.CALIBRATION).unlink()


def test_prompts_that_trained_the_exits_do_not_calibrate_them(
    shell: Shell, folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds a hash of each prompt, so that any overlap is found, also after its work is removed."""
    model, place, source = folders[0], tmp_path / "exits", tmp_path / "prompts.txt"
    shutil.copytree(folders[1], place)
    prompts = [f"line {number}" for number in range(8)]
    source.write_text("\n".join(prompts))
    ask = ("calibrate", model, "--exits", place, "-i", source, "-m", "4", "--threads", "1", "--delta", "0.9")
    info = json.loads((place / files.HEADS_INFO).read_text())

    def calibrate(trained: list[str] | None) -> tuple[int, str]:
        known = None if trained is None else hashes(trained)
        (place / files.HEADS_INFO).write_text(json.dumps(info | {"prompts": known}))
        code, _, err = shell(*ask)
        return code, err

    code, err = calibrate(prompts[:2])
    assert code == 0, err
    assert "2 of 8 prompts trained the exits" in err
    assert thresholds.load(place)[0].n == 6
    code, err = calibrate(["another"])
    assert (code, "trained the exits" in err) == (0, False)
    assert "does not record which prompts trained its exits" in calibrate(None)[1]
    code, err = calibrate(prompts)
    assert code == 1
    assert "all 8 prompts trained the exits" in err
    monkeypatch.setattr(
        "headrace.training.early_exit_calibration.calibrate_threshold.__defaults__", ((1.01,), None)
    )  # a confidence that no token has
    assert f"no token exited early: all took {LAYERS} of {LAYERS} layers, so this rule saves nothing" in calibrate([])[1]


def test_a_rule_is_of_one_model_and_of_its_exits(
    folders: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Exits may draft for any model of the same shape; what was shown of a threshold is of one, as it was stored then."""
    model, exits = folders
    own, place = open_files(model), tmp_path / "exits"
    shutil.copytree(exits, place)
    rule = thresholds.CalibratedThreshold(
        "max_prob",
        0.5,
        0.0,
        8,
        "text",
        0.1,
        0.05,
        100,
        0.01,
        1.5,
        0.25,
        "0" * 64,
        fits=thresholds.exits_fingerprint(own, place),
    )
    thresholds.save(place, rule)
    settings = ModelSettings(exits=place)
    assert thresholds.load_for(own, settings, None) == (rule,)
    compress(model, tmp_path / "other.gguf", Pipeline(format="Q8_0"))
    assert thresholds.load_for(open_files(tmp_path / "other.gguf"), settings, None) == ()
    assert "calibration.json is of another model or of other exits and is not used" in caplog.text
    weights = place / "heads.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert thresholds.load_for(own, settings, None) == ()
