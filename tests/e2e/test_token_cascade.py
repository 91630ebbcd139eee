"""Cascades by token: a smaller model writes where it is sure, else the larger one reads what it has not seen, and writes. Who
does is a pure function of the tokens before, on either back end."""

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.data.params import ParamError, SamplingParams
from headrace.data.plan import Feed, Sample
from headrace.data.types import Request
from headrace.decoding.processors import LengthNudge
from headrace.engine.engine import AdmissionError, Engine
from headrace.llm import LLM
from headrace.runner import early_exit as leaving
from headrace.runner.early_exit import MOST_BEHIND, TokenCascade
from headrace.startup import thresholds
from tests.cascading import Reference, engine_of, jobs_of, smaller
from tests.cli_shell import Shell
from tests.e2e.test_draft_model import Native, Torch
from tests.early_exit_controls import deciding, no_catching_up, published_too_early
from tests.early_exits import LAYERS, Job, assert_same_logprobs, collect_exits, collect_logprobs, played, side_of, write_exits
from tests.tiny import finish, run_alone
from tests.tiny_files import write_tiny_gguf
from tests.tiny_native import native_alone

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
    outputs = reference.outputs(jobs)
    assert 0.2 < reference.written / reference.asked < 0.8, "the thresholds do not part the tokens"
    return side, jobs, outputs


@pytest.fixture
def native() -> Case:
    """What no back end changes is looked at on the one whose sums have one order."""
    return case_of("native")


@pytest.mark.parametrize(
    ("case", "way", "preempt"),
    [
        *(("native", way, preempt) for way in WAYS for preempt in (0, 3)),
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


@pytest.mark.parametrize("most", [0, 1, 3, 31])
def test_how_far_the_larger_model_lags_changes_nothing(native: Case, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pool in which requests drive each other out."""
    side, jobs, outputs = native
    monkeypatch.setattr(leaving, "MOST_BEHIND", most)
    engine = engine_of(side, blocks=10, budget=11)
    assert played(engine, jobs) == outputs
    assert engine.scheduler.preemptions > 0


# -- what is found in the cache --------------------------------------------------------------------------------------------


def continued(side: Torch, first: SamplingParams, then: SamplingParams) -> tuple[Any, Any, list[Request]]:
    """Prompts that are what another request has written, in the engine that has written them: outputs, those of the reference,
    and the requests."""
    engine, beginning = engine_of(side, drafts=False), list(range(5, 30))
    ((answer,),) = played(engine, [(beginning, first)])
    jobs = [(beginning + answer[:count] + [3, 4], then) for count in (20, 41, 56)]
    requests = [engine.add(prompt, params) for prompt, params in jobs]
    finish(engine)
    return [[seq.output for seq in request.finished] for request in requests], Reference(side).outputs(jobs), requests


def cached_tokens_of(side: Torch, first: SamplingParams, then: SamplingParams) -> list[int]:
    """Tokens that each of those prompts found in the prefix cache; the outputs are right."""
    outputs, wanted, requests = continued(side, first, then)
    assert outputs == wanted
    return [request.metrics.cached_tokens for request in requests]


CASCADES = GREEDY.replace(cascade_threshold=0.2)
WRITES = GREEDY.replace(max_tokens=56, cascade_threshold=0.0)  # the smaller model does; the text ends with a block, seven lag


def test_a_prefix_is_reused_up_to_the_slower_model(native: Case) -> None:
    """By plain requests and by those that cascade; what the smaller model has not seen is found by the plain ones alone."""
    for then in (GREEDY, CASCADES):
        assert min(cached_tokens_of(native[0], WRITES, then)) >= 32
    plain = GREEDY.replace(max_tokens=56)
    assert min(cached_tokens_of(native[0], plain, GREEDY)) >= 32
    assert cached_tokens_of(native[0], plain, CASCADES)[0] == 0


# -- what runs -------------------------------------------------------------------------------------------------------------


def rows_of(engine: Engine, prompt: list[int], params: SamplingParams) -> tuple[list[int], list[int]]:
    """How many tokens each step of the larger model reads for a request, and each of the smaller one."""
    runner: Any = engine.executor.runner  # type: ignore[attr-defined]
    counts: list[list[int]] = []
    for program in runner.programs:
        read: list[int] = []
        counts.append(read)
        make = program.step

        def counting(make: Callable[[], Any] = make, read: list[int] = read) -> Any:
            step = make()  # the same one again and again

            def fed(one: Feed, *more: Any) -> None:
                read.append(one.count)
                type(step).feed(step, one, *more)

            step.feed = fed
            return step

        program.step = counting
    engine.add(prompt, params)
    finish(engine)
    large, small = counts
    return large, small


def test_the_larger_model_reads_in_batches(native: Case) -> None:
    """Where the smaller model is sure of every token the larger one reads the prompt, and then eight tokens at a time; where it
    is of some, every token is read once, as soon as the smaller one is not."""
    side, _, _ = native
    params = GREEDY.replace(cascade_threshold=0.0, max_tokens=2 + 2 * (MOST_BEHIND + 1))
    large, small = rows_of(engine_of(side, drafts=False), [7] * 20, params)
    assert large == [20, MOST_BEHIND + 1, MOST_BEHIND + 1]
    assert small == [20, *[1] * (2 * MOST_BEHIND + 3)]
    engine = engine_of(side, drafts=False)
    large, small = rows_of(engine, [7] * 20, CASCADES)
    assert small == [20, *[1] * 23]
    assert len(small) > len(large) > 2
    assert any(count > 1 for count in large[1:])
    assert sum(small) - MOST_BEHIND <= sum(large) <= sum(small)


def test_plain_requests_cost_the_smaller_model_nothing(native: Case) -> None:
    large, small = rows_of(engine_of(native[0], drafts=False), [7] * 20, GREEDY)
    assert not small
    assert large == [20]  # then the short way of a step, as without a cascade


# -- its ends --------------------------------------------------------------------------------------------------------------


SAMPLED = GREEDY.replace(temperature=0.9, seed=4, n=2, cascade_criterion="margin")


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_unreachable_threshold_equals_the_larger_model(case: Case, params: SamplingParams) -> None:
    """Tokens and log-probabilities, bit for bit on the native core; in torch as its sums allow."""
    side, jobs, _ = case
    for prompt, _ in jobs[:2]:
        whole = params.replace(logprobs=3, max_tokens=12)
        both = collect_logprobs(engine_of(side), prompt, whole.replace(cascade_threshold=1.01))
        plain = collect_logprobs(engine_of(side, cascade=False), prompt, whole)
        assert len(both) == params.n * 12
        assert_same_logprobs(both, plain, side.block == 16)


@pytest.mark.parametrize("heat", [0.0, 0.9])
def test_a_threshold_of_0_is_the_smaller_model_after_the_first_token(case: Case, heat: float) -> None:
    side, jobs, _ = case
    alone = native_alone if side.block == 16 else run_alone
    for prompt, _ in jobs[:2]:
        params = GREEDY.replace(temperature=heat, seed=7, max_tokens=12)
        ((written,),) = played(engine_of(side), [(prompt, params.replace(cascade_threshold=0.0))])
        first = alone(side.target, prompt, params.replace(max_tokens=1))
        assert written == first + alone(smaller(side), prompt + first, params.replace(max_tokens=11))
        assert written != alone(side.target, prompt, params)


def test_each_token_has_its_model_confidence_and_votes(native: Case) -> None:
    """Who wrote it, how sure the smaller model was, and under an audit what both would say."""
    tokens, exits = collect_exits(engine_of(native[0]), [9, 8, 7], CASCADES.replace(cascade_audit=True))
    assert exits[0].layers == LAYERS
    assert exits[0].confidence is None
    for token, one in zip(tokens[1:], exits[1:], strict=True):
        assert one.layers == (0 if one.confidence >= 0.2 else LAYERS)
        assert token == one.votes[one.layers == LAYERS]
    assert {one.layers for one in exits} == {0, LAYERS}
    assert any(one.votes[0] != one.votes[1] for one in exits[1:])


# -- negative controls: each of these must be seen -------------------------------------------------------------------------


def other_noise(patch: pytest.MonkeyPatch) -> None:
    """The smaller model draws as another child would."""
    with_top = leaving._with_top

    def shifted(feed: Feed) -> Feed:
        wants = tuple(Sample(want.child + 1) if isinstance(want, Sample) else want for want in feed.wants)
        return with_top(msgspec.structs.replace(feed, wants=wants))

    patch.setattr(leaving, "_with_top", shifted)


CONTROLS = {
    "the last token alone": no_catching_up,
    "other noise": other_noise,
    "by how far the larger model lags": deciding(lambda feed: feed.lag < 2, TokenCascade),
    "by what is fed again": deciding(lambda feed: feed.count == 1, TokenCascade),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_anything_else_would_be_seen(native: Case, control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side, jobs, outputs = native
    CONTROLS[control](monkeypatch)
    assert played(engine_of(side), jobs, preempt=3) != outputs


def test_a_prefix_that_the_larger_model_has_not_seen_would_be_seen(native: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    published_too_early(monkeypatch)
    outputs, wanted, _ = continued(native[0], WRITES, GREEDY)
    assert outputs != wanted


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cascade_threshold": 1.5}, "cascade_threshold must be between 0 and 1.01"),
        ({"cascade_threshold": 0.5, "cascade_criterion": "saturation"}, "cascade_criterion must be max_prob or margin"),
        ({"cascade_threshold": 0.5, "exit_threshold": 0.5}, "leave exit_threshold or cascade_threshold out"),
        ({"cascade_threshold": 0.5, "best_of": 3}, "leave cascade_threshold or best_of out"),
        ({"cascade_threshold": 0.5, "prompt_logprobs": 0}, "leave cascade_threshold or prompt_logprobs out"),
        ({"cascade_threshold": 0.5, "contrastive_beta": 0.5}, "leave cascade_threshold or contrastive_beta out"),
        ({"cascade_threshold": 0.5, "defer_rule": "chow"}, "leave cascade_threshold or defer_rule out"),
        ({"cascade_threshold": 0.5, "penalty_alpha": 0.5, "top_k": 4}, "leave out cascade_threshold"),
    ],
)
def test_fields_that_exclude_a_cascade_are_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ParamError, match=why):
        SamplingParams(**fields)


def test_unsupported_cascade_requests_are_refused(native: Case) -> None:
    side, _, _ = native
    with pytest.raises(AdmissionError, match="cascade_threshold needs a smaller model; open the model with cascade=MODEL"):
        engine_of(side, cascade=False).add([5], CASCADES)
    with pytest.raises(AdmissionError, match="exit_threshold needs exits; open the model with exits=FOLDER"):
        engine_of(side).add([5], GREEDY.replace(exit_threshold=0.5))
    processor = LengthNudge(end_id=0, start=1)
    processor.scope = "stateful"
    with pytest.raises(AdmissionError, match="sees every token's logits once; leave cascade_threshold out"):
        engine_of(side).add([5], CASCADES, processors=(processor,))


# -- opened by name --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and a smaller one."""
    place = tmp_path_factory.mktemp("cascade")
    return write_tiny_gguf(place / "large.gguf", layers=LAYERS), write_tiny_gguf(place / "small.gguf", layers=1, seed=3)


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_a_model_opened_with_a_smaller_one(files: tuple[Path, Path], backend: str) -> None:
    model, small = files
    settings: dict[str, Any] = {"backend": backend, "threads": 1, "device": "cpu"}
    settings |= {"dtype": "float64"} if backend == "torch" else {}
    with LLM(model, cascade=small, **settings) as llm, LLM(model, **settings) as plain:
        (never,) = llm.generate("The mill", GREEDY.replace(cascade_threshold=1.01))
        (always,) = llm.generate("The mill", GREEDY.replace(cascade_threshold=0.0))
        (without,) = llm.generate("The mill", GREEDY)
        (whole,) = plain.generate("The mill", GREEDY)
    assert never.outputs[0].token_ids == without.outputs[0].token_ids == whole.outputs[0].token_ids
    assert without.outputs[0].exits is None
    assert [one.layers for one in never.outputs[0].exits or ()] == [LAYERS] * 24
    assert [one.layers for one in always.outputs[0].exits or ()] == [LAYERS] + [0] * 23
    assert always.outputs[0].token_ids != whole.outputs[0].token_ids


def test_a_cascade_with_exits_or_heads_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, small = files
    settings: dict[str, Any] = {"threads": 1, "device": "cpu"}
    exits = write_exits(tmp_path / "exits", model)
    with pytest.raises(ValueError, match="smaller model and exits by which tokens leave are not opened together"):
        LLM(model, exits=exits, cascade=small, **settings)
    with pytest.raises(ValueError, match="smaller model and trained heads that draft are not opened together"):
        LLM(model, draft=exits, cascade=small, **settings)
    other = write_tiny_gguf(tmp_path / "other.gguf", control="<other>")
    with pytest.raises(ValueError, match="cannot be the smaller model of .*: their vocabularies differ"):
        LLM(model, cascade=other, **settings)


def test_the_command_line(shell: Shell, files: tuple[Path, Path]) -> None:
    model, small = files
    ask = ("run", model, "The mill", "--raw", "-m", "12", "-t", "0", "--threads", "1")
    code, out, err = shell(*ask, "--cascade", small, "--cascade-threshold", "0", "--cascade-audit", "--show-exits")
    assert code == 0, err
    assert "by the smaller model: 11 tokens" in out
    assert f"after {LAYERS} of {LAYERS} layers: 1 token" in out
    assert "audit: the smaller model agrees with the full model at" in out
    code, out, err = shell(*ask, "--cascade", small, "--cascade-threshold", "1.01", "--json")
    assert [one["layers"] for one in json.loads(out)["outputs"][0]["exits"]] == [LAYERS] * 12
    code, _, err = shell(*ask, "--cascade-threshold", "0.5")
    assert code == 2
    assert "needs a smaller model of the same vocabulary: --cascade MODEL" in " ".join(err.split())


def test_chat_and_generate_show_the_model_of_each_token(shell: Shell, files: tuple[Path, Path]) -> None:
    """A run that was stopped does not go on with another smaller model."""
    model, small = files
    of = ("-t", "0", "-m", "8", "--threads", "1", "--show-exits")
    code, out, err = shell("chat", model, "--cascade", small, *of, "--cascade-threshold", "0", stdin="one\n")
    assert code == 0, err
    assert "by the smaller model: 7 tokens" in out
    source, target = shell.folder / "in.jsonl", shell.folder / "out.jsonl"
    source.write_text(json.dumps({"prompt": "line", "cascade_threshold": 0.0}) + "\n")
    generate = ("generate", model, *of, "-i", source, "-o", target)
    code, _, err = shell(*generate, "--cascade", small)
    assert code == 0, err
    assert "by the smaller model: 7 tokens" in err
    assert shell(*generate, "--cascade", model)[0] == 1


def test_a_rule_is_of_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, and as they are: other weights in their place, or in one of a folder's files, have no rule yet."""
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    file, folder = tmp_path / "large.gguf", tmp_path / "small"
    folder.mkdir()
    (part := folder / "model.safetensors").write_bytes(b"12")
    file.write_bytes(b"1")
    places = [thresholds.cascade_folder(file, folder), thresholds.cascade_folder(folder, file)]
    assert thresholds.cascade_folder(file, folder) == places[0]
    for changed in (file, part):
        changed.write_bytes(b"123")
        places.append(thresholds.cascade_folder(file, folder))
    assert len(set(places)) == 4
    assert all(place.parent == tmp_path / "home" / "cascades" for place in places)


def test_a_calibrated_threshold(shell: Shell, files: tuple[Path, Path]) -> None:
    """By writing answers with it; a smaller model that says what the model does may always write."""
    model, small = files
    prompts = shell.folder / "prompts.txt"
    prompts.write_text("\n".join(f"line {number}" for number in range(30)))
    calibrate = ("calibrate", model, "-i", prompts, "-m", "4", "--threads", "1", "--delta", "0.1")
    code, out, err = shell(*calibrate, "--cascade", model)
    assert code == 0, err
    assert "max_prob 0.05: text loss at most 0.1 with probability 0.95" in " ".join(f"{out} {err}".split())
    (rule,) = thresholds.load(thresholds.cascade_folder(model, model))
    assert (rule.threshold, rule.n, rule.loss) == (0.05, 30, "text")
    assert 0 < rule.layers < LAYERS
    code, out, err = shell(*calibrate, "--cascade", small)
    assert code == 0, err
    assert "max_prob 0.05: text" not in " ".join(f"{out} {err}".split())
    own = thresholds.load(thresholds.cascade_folder(model, small))
    assert all(one.threshold > 0.05 for one in own), "those of the other pair"
    assert thresholds.load(thresholds.cascade_folder(small, model)) == ()
    ask = ("run", model, "The mill", "--raw", "-m", "2", "--threads", "1")
    assert f"calibrated: {rule.summary()}" in " ".join(shell(*ask, "--cascade", model)[2].split())
    assert rule.summary() not in " ".join(shell(*ask, "--cascade", small)[2].split())
    of_exits = (("--decay", "2"), ("--criterion", "classifier"), ("--criterion", "saturation"))
    refused = [(("--cascade", small, *one), "need exits; leave them out") for one in of_exits]
    for more, why in (((), "or a smaller model: --cascade MODEL"), *refused):
        code, _, err = shell(*calibrate, *more)
        assert code == 2
        assert why in " ".join(err.split())
