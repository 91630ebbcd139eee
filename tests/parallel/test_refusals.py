"""What does not run on several ranks or in a pipeline: one line when the model is opened, in Python and on the command line."""

from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, core
from headrace.parallel.refusals import REFUSALS, Refusal, unsupported_reason
from tests.cli_shell import Shell
from tests.pages import generated, stale, written
from tests.parallel.engines import no_process_is_left
from tests.parallel.refusals import CASES, MODES, Case, Files

__all__ = ["no_process_is_left"]

if not core.available():
    pytest.skip(core.reason(), allow_module_level=True)

BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("refusals"))


@pytest.fixture(autouse=True)
def home(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_HOME", str(files.folder))


def refusal_of(case: Case, files: Files, mode: str) -> Refusal | None:
    recipe = case.recipe(files, **{mode: 2})
    return next((one for one in REFUSALS if mode in one.modes and one.check(recipe)), None)


def test_each_refusal_has_a_case(files: Files) -> None:
    found = {(one.part, mode) for case in CASES for (mode,) in MODES[:2] if (one := refusal_of(case, files, mode))}
    assert found == {(one.part, mode) for one in REFUSALS for mode in one.modes}


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("name", [case.name for case in CASES if case.changes is None])
def test_a_refusal_is_one_line_with_part_and_advice(files: Files, name: str, layout: dict[str, int]) -> None:
    case = BY_NAME[name]
    # A pipeline is refused first.
    refused = [(one, mode) for mode in ("pp", "tp") if mode in layout and (one := refusal_of(case, files, mode))]
    if not refused:
        return  # `test_each_refusal_has_a_case` shows that others are
    one, mode = refused[0]
    with pytest.raises(ValueError, match=f"^{mode}=2 does not run ") as error:
        LLM(case.model(files), device="cpu", **case.settings(files), **layout)
    message = str(error.value)
    assert one.part in message
    assert message.endswith(one.remedy.format(mode=mode))
    assert "\n" not in message


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers that differ in their heads", "a model whose layers differ in their heads"),
        ("a norm over all queries of a row (OLMo 2)", "a model that norms all queries of a row as one vector"),
    ],
)
def test_models_that_a_pipeline_alone_runs(files: Files, name: str, part: str) -> None:
    recipe = BY_NAME[name].recipe(files, tp=2, pp=2)
    assert unsupported_reason(recipe, "tp").startswith(f"tp=2 does not run {part} (")
    assert unsupported_reason(recipe, "pp") == ""


HEADS = "HEADS"  # stands for a folder of heads
OPTIONS = {
    "encoder": (["--pp", 2], "--pp 2 does not run an encoder (", {"model": "encoders and their classifiers"}),
    "encoder-decoder": (["--pp", 2], "--pp 2 does not run an encoder-decoder (", {"model": "encoder-decoders"}),
    "act-order": (["--tp", 2], "its columns lie on all ranks: use pp", {"model": "act-order folders (GPTQ)"}),
    "torch": (["--tp", 2, "--backend", "torch"], "leave backend, dtype and device out", {}),
    "float64": (["--pp", 2, "--dtype", "float64"], "leave backend, dtype and device out", {}),
    "split": (["--tp", 2, "--quantize", "int8", "--activations", "split"], "use group or token", {}),
    "tp 3": (["--tp", 3], "tp must be 1, 2, 4 or 8, not 3", {}),
    "tp 3 with pp": (["--tp", 3, "--pp", 2], "tp must be 1, 2, 4 or 8, not 3", {}),
    "above the units": (["--tp", 8], "7 units of 64; use a smaller tp", {}),
    "above the layers": (["--pp", 4], "--pp 4: the model has 3 layers; use pp of 1 to 3", {}),
    "above the layers with tp": (["--tp", 2, "--pp", 4], "--pp 4: the model has 3 layers; use pp of 1 to 3", {}),
    "stages": (["--pp", 2, "--stages", "2,2"], "stages 2,2: give 2 numbers of layers with the sum 3", {}),
    "stages with tp": (["--tp", 2, "--pp", 2, "--stages", "3"], "stages 3: give 2 numbers of layers with the sum 3", {}),
    "draft": (["--pp", 2, "--draft", "MODEL"], "leave draft or pp out", {}),
    "amateur": (["--tp", 2, "--pp", 2, "--amateur", "MODEL"], "leave amateur or pp out", {}),
    "exits": (["--pp", 2, "--exits", HEADS], "leave exits or pp out", {}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_command_line_prints_one_line(
    files: Files, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, wanted, more = OPTIONS[name]
    model = BY_NAME[more["model"]].model(files) if more else files.model
    given: dict[Any, Any] = {"MODEL": model, HEADS: files.heads() if HEADS in options else ""}
    command = ["embed", model] if name == "encoder" else ["run", model]
    code, out, err = Shell(tmp_path, monkeypatch, capsys)(*command, "The mill", *(given.get(one, one) for one in options))
    assert code != 0
    assert out == ""
    (message,) = (line for line in err.splitlines() if line.startswith("headrace: "))
    assert wanted in message
    assert err.endswith(f"{message}\n")


@pytest.mark.parametrize("layout", [{"pp": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_more_threads_than_cores_are_a_warning(files: Files, layout: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
    with LLM(files.model, threads=64, kv_cache_memory="8MiB", device="cpu", **layout) as llm:
        assert f"{2 ** len(layout)} processes of 64 threads share" in caplog.text
        assert len(llm.generate("The mill", max_tokens=2)[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("part", ["tp-refusals", "combinations"])
def test_pages_have_the_refusals_of_the_code(part: str) -> None:
    assert written(part) == generated(part), stale(part)


@pytest.mark.parametrize(
    "name", ["act-order folders (GPTQ)", "activations by split", "trained heads", "self-drafts that skip layers"]
)
def test_combinations_that_run(files: Files, name: str) -> None:
    """Cells of the table that no other test runs."""
    case = BY_NAME[name]
    mode = "pp" if refusal_of(case, files, "tp") else "tp"
    tokens = []
    for count in (1, 2):
        with LLM(
            case.model(files), threads=1, kv_cache_memory="8MiB", device="cpu", **case.settings(files), **{mode: count}
        ) as llm:
            outputs = llm.generate([[5, 6, 7], [8] * 20], max_tokens=8, temperature=0.0)
            tokens.append([output.outputs[0].token_ids for output in outputs])
    assert tokens[0] == tokens[1]
