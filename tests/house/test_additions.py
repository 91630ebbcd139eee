"""What is added to Headrace, and how many places that takes: a toy of each kind, written as if it lay in its room, and at
work in real engines on both back ends. Each has a control: without its row it is refused, with the reason."""

import re
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import typer
from typer.testing import CliRunner

from headrace.cli.options import option_fields, with_groups
from headrace.data.fields import Use, declared, fields_with_use, ignored_fields
from headrace.data.params import DRAWN, ParamError, SamplingParams
from headrace.data.plan import WANTS, AnyWant, Feed, Want
from headrace.data.types import Draft, Request, Sequence
from headrace.drafting.speculation import Speculation
from headrace.engine.admission import AdmissionError
from headrace.models.registry import MODELS
from headrace.ops.dtypes import TOLERANCE
from headrace.ops.registry import OPS, Op, declare
from headrace.runner.record import RecordError, record
from headrace.server.http.limits_check import StrictStruct
from headrace.server.protocols.fields import http_fields, struct_of
from tests.e2e.test_verification import BACKENDS, Make
from tests.house.dimming import Dimming
from tests.house.line_trainer import LineConfig, train_line
from tests.house.repeat_last import RepeatLast
from tests.house.scale import scale, scale_cases
from tests.house.scaled_llama import scaled_llama
from tests.house.second_best import SecondBest
from tests.killed import each_step, forgetful, killed_at
from tests.reference.params import entries
from tests.tiny import VOCAB, finish, run_alone, tiny_config, tiny_model, tokens_of
from tests.tiny_native import native_model, native_program
from tests.unit.test_imports import SOURCES, late_imports, wrong_imports

TOYS = {
    "second_best": "decoding",
    "repeat_last": "drafting",
    "scale": "ops",
    "adapter": "ops",
    "scaled_llama": "models",
    "parallel": "models",
    "loud_llama": "models",
    "listener": "models",
    "dimming": "data",
    "line_trainer": "training",
}
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [40, 40, 40])
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=BACKENDS)
def make(request: pytest.FixtureRequest) -> Make:
    return BACKENDS[request.param]("llama")


@pytest.mark.parametrize("toy", TOYS)
def test_an_example_obeys_the_import_rules_of_its_package(toy: str) -> None:
    source, module = Path(__file__).with_name(f"{toy}.py").read_text(), f"headrace.{TOYS[toy]}.{toy}"
    assert wrong_imports(module, source, {*SOURCES, module}) == []
    assert late_imports(module, source) == []
    assert wrong_imports(f"headrace.text.{toy}", source, {*SOURCES, module}), "any room would do"


# -- a decoding method: one file ---------------------------------------------------------------------------------------------


def second_best(make: Make, prompt: list[int], count: int) -> list[int]:
    """By an engine that is asked for one token at a time, and for what it thought of others."""
    tokens: list[int] = []
    for _ in range(count):
        engine = make()
        engine.add([*prompt, *tokens], GREEDY.replace(max_tokens=1, logprobs=2))
        (delta,) = [delta for _ in range(9) if engine.busy for delta in engine.step()]
        tokens.append(delta.logprobs[0].top_ids[1])
    return tokens


def test_a_strategy_is_one_file(make: Make) -> None:
    engine = make()
    toys = [engine.add(prompt, GREEDY.replace(max_tokens=5), strategy=SecondBest()) for prompt in PROMPTS]
    beside = engine.add(PROMPTS[0], GREEDY)
    finish(engine)
    assert [tokens_of(request)[0] for request in toys] == [second_best(make, prompt, 5) for prompt in PROMPTS]
    alone = make()
    request = alone.add(PROMPTS[0], GREEDY)
    finish(alone)
    assert tokens_of(beside) == tokens_of(request) != tokens_of(toys[0])


def test_a_strategy_refuses_parameters_that_it_does_not_use(make: Make) -> None:
    with pytest.raises(AdmissionError, match="the strategy SecondBest does not use top_p"):
        make().add(PROMPTS[0], GREEDY.replace(top_p=0.5), strategy=SecondBest())
    with pytest.raises(AdmissionError, match=r"inherit from headrace\.decoding\.base\.Strategy"):
        make().add(PROMPTS[0], GREEDY, strategy=object())  # type: ignore[arg-type]


# -- a want: a row in WANTS, and an answer of every back end -----------------------------------------------------------------


class Guess(Want, frozen=True, array_like=True, gc=False):
    """A want that no back end knows."""


class Guessing(SecondBest):
    def want(self, request: Request, seq: Sequence, feed: Feed, last: bool) -> tuple[AnyWant, ...]:
        return (Guess(),)  # type: ignore[return-value]


@pytest.mark.parametrize("row", [False, True])
def test_a_want_is_answered_by_every_back_end_or_refused(make: Make, monkeypatch: pytest.MonkeyPatch, row: bool) -> None:
    if row:
        monkeypatch.setitem(WANTS, Guess, ())
    engine = make()
    request = engine.add(PROMPTS[0], GREEDY, strategy=Guessing())
    while engine.busy:
        engine.step()
    assert request.error is not None
    assert ("returned unknown wants" in request.error) != row
    assert "Guess" in request.error


# -- a drafter: one file -----------------------------------------------------------------------------------------------------


def test_a_drafter_is_one_file(make: Make) -> None:
    plain, drafted = make(), make(speculation=Speculation([RepeatLast()], 256, gamma=3))
    requests = [[engine.add(prompt, GREEDY) for prompt in PROMPTS] for engine in (plain, drafted)]
    for engine in (plain, drafted):
        finish(engine)
    assert [tokens_of(request) for request in requests[0]] == [tokens_of(request) for request in requests[1]]
    assert sum(request.metrics.drafted for request in requests[1]) > 10


def test_invalid_drafts_are_dropped(make: Make) -> None:
    """What no step could feed is not fed, and nobody fails."""

    class Nonsense(RepeatLast):
        def __init__(self) -> None:
            self.drafts = iter([Draft([VOCAB + 5], [-1]), Draft([-1], [-1]), Draft([1, 1], [-1, 1]), Draft([1], [])])

        def draft(self, request: Request, seq: Sequence, most: int) -> Draft | None:
            return next(self.drafts, None)

    engine = make(speculation=Speculation([Nonsense()], 256, gamma=3))
    request = engine.add(PROMPTS[0], GREEDY)
    finish(engine)
    alone = make()
    expected = alone.add(PROMPTS[0], GREEDY)
    finish(alone)
    assert tokens_of(request) == tokens_of(expected)
    assert request.metrics.drafted == 0


# -- an op, and an order of ops that has it ----------------------------------------------------------------------------------


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Op[..., Any]]:
    monkeypatch.delitem(OPS, "scale", raising=False)
    yield declare("tests.house.scale")(scale).body(scale_cases, TOLERANCE)(scale)
    OPS.pop("scale", None)


def test_an_op_records_plays_and_is_refused_natively(scaling: Op[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, plain = list(PROMPTS[0]), tiny_model(tiny_config())
    expected = run_alone(plain, prompt, GREEDY)
    outputs = {}
    for by in (1.0, 3.0):
        monkeypatch.setitem(MODELS, "llama", scaled_llama(scaling, by))
        model = tiny_model(tiny_config())
        assert [node.op for node in record(model).layers[0].nodes].count("scale") == 1
        outputs[by] = run_alone(model, prompt, GREEDY)
    assert outputs[1.0] == expected != outputs[3.0]
    with pytest.raises(RecordError, match="the native core has no phase for 'scale'"):
        native_program(native_model.__wrapped__("llama"))


def test_an_unregistered_function_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the same function without its registration."""
    monkeypatch.setitem(MODELS, "llama", scaled_llama(scale, 3.0))
    with pytest.raises(RecordError, match="cannot be recorded"):
        record(tiny_model(tiny_config()))


def test_an_op_is_held_to_its_cases(scaling: Op[..., Any]) -> None:
    assert OPS["scale"] is scaling
    for case in scaling.inputs(torch.float32, torch.device("cpu")):
        torch.testing.assert_close(scaling(*case.args, **case.kwargs), case.args[0] * 0.5)
    with pytest.raises(ValueError, match="defined twice"):
        scaling.body(scale_cases, TOLERANCE)(scale)


# -- a sampling field: its declaration; beside it a stage in torch, one in C++ with its parameter and binding ----------------


def body_of(params: type[SamplingParams], said: bytes) -> Any:
    return msgspec.json.decode(said, type=struct_of("Body", http_fields(params), StrictStruct))


def command_of(params: type[SamplingParams], heard: list[Any]) -> typer.Typer:
    """A command with the options of `params`, which makes these of what it is given."""
    options: Any = make_dataclass("Options", option_fields(declared(params), "Sampling"))

    def draw(given: options) -> None:
        heard.append(params(**{name: value for name, value in vars(given).items() if value is not None}))

    app = typer.Typer()
    app.command()(with_groups(draw))
    return app


def test_a_sampling_field_is_declared_once() -> None:
    """Checks, protocols, the command line, the native core's names and the documents have it from there."""
    assert Dimming(dimming=1).dimming == 1
    with pytest.raises(ParamError, match=r"^dimming must be between 0 \(off\) and 1, not 1.5$"):
        Dimming(dimming=1.5)
    assert body_of(Dimming, b'{"dimming": 0.5}').dimming == 0.5
    heard: list[Any] = []
    assert CliRunner().invoke(command_of(Dimming, heard), ["--dimming", "0.5"]).exit_code == 0
    assert heard == [Dimming(dimming=0.5)]
    help_text = CliRunner(env={"COLUMNS": "200"}).invoke(command_of(Dimming, heard), ["--help"]).output
    assert re.search(r"--dimming +<float> +How much less each token counts \(0: off\)\.", help_text)
    assert fields_with_use(Dimming, Use.CORE) == (*fields_with_use(SamplingParams, Use.CORE), "dimming")
    assert ignored_fields(Dimming(dimming=0.5), DRAWN) == ["dimming"]
    *known, added = entries(Dimming)
    assert known == list(entries(SamplingParams))
    assert added == "* `dimming`: How much less each token counts. *Between 0 (off) and 1; default 0.0.*"


def test_a_field_that_is_not_declared_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="dimming"):
        SamplingParams(dimming=0.5)  # type: ignore[call-arg]
    with pytest.raises(msgspec.ValidationError, match="dimming"):
        body_of(SamplingParams, b'{"dimming": 0.5}')
    refused = CliRunner().invoke(command_of(SamplingParams, []), ["--dimming", "0.5"])
    assert (refused.exit_code, "No such option: --dimming" in refused.output) == (2, True)
    assert not any("dimming" in row for row in entries(SamplingParams))


# -- a trainer: a config and a step on `training.run.Run` --------------------------------------------------------------------


def test_a_trainer_resumes_after_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed training ends with the bytes of one that ran through. Control: without the optimizer's state it does not."""
    each_step(monkeypatch)
    points = [0.0, 1.0, 2.0], [1.0, 3.0, 5.0]

    def trained(name: str, **settings: Any) -> bytes:
        train_line(*points, tmp_path / name, LineConfig(seed=5, threads=1, **settings))
        return (tmp_path / name / "line.safetensors").read_bytes()

    whole = trained("whole")
    for count in (1, 7):
        killed_at("checkpoint.safetensors", count, lambda: trained("killed"))
    killed_at("line.safetensors", 1, lambda: trained("killed"))
    assert trained("killed") == whole
    with pytest.raises(ValueError, match=r"holds another training \(steps: 12 then, 13 now\)"):
        trained("killed", steps=13)
    killed_at("checkpoint.safetensors", 7, lambda: trained("forgetful"))
    forgetful(monkeypatch)
    assert trained("forgetful") != whole
