"""bench parallel: modes and cells, equal tokens, figures and the picture of a pipeline's steps."""

import json
from pathlib import Path

import pytest

from headrace import core
from headrace.bench import parallel
from headrace.bench.interleave import Cell
from tests.cli_shell import Shell
from tests.tiny_files import write_tiny_gguf

pytestmark = pytest.mark.skipif(not core.available(), reason=core.reason() or "native")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=1024, layers=4)


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(tmp_path, monkeypatch, capsys)


def test_a_pipeline_next_to_one_process(shell: Shell, model: Path, tmp_path: Path) -> None:
    figures, drawn = tmp_path / "f.json", tmp_path / "steps.svg"
    arguments = ("--modes", "pp2", "--cells", "pp512,b8", "--rounds", "2", "--json", figures, "--trace", drawn)
    code, out, err = shell("bench", "parallel", model, *arguments)
    assert code == 0, err
    assert [line.split("\t")[:2] for line in out.splitlines()[1:]] == [
        [mode, cell] for cell in ("pp512", "b8") for mode in ("1 x 1", out.splitlines()[2].split("\t")[0], "pp2")
    ]
    found = json.loads(figures.read_text())
    pipeline = found["cells"]["pp512"]["modes"]["pp2"]
    assert len(pipeline["seconds"]) == 2
    assert len(pipeline["trace"]) == 2, "512 tokens are two chunks"
    for step in pipeline["trace"]:
        (began, passed), (received, ended) = step
        assert began <= passed <= received <= ended
    assert pipeline["predicted"] > 0
    assert 0 <= pipeline["idle"] < 1
    assert drawn.read_text().count('<rect class="h') == 4
    assert "stage 1" in drawn.read_text()


def test_unequal_tokens_raise_and_give_no_figures(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = parallel._run
    monkeypatch.setattr(parallel, "_run", lambda llm, cell, seed: (run(llm, cell, seed)[0], [[id(llm)]]))
    with pytest.raises(RuntimeError, match="the modes gave different tokens"):
        parallel.measure(model, [], [Cell("b1", 1, 8, 4)], 1, lambda line: None)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--modes", "dp2"), "there is no mode 'dp2'; write pp2, tp2 or tp2pp2"),
        (("--modes", "pp2pp2"), "there is no mode 'pp2pp2'"),
        (("--cells", "b7"), "there is no cell 'b7'; choose from pp512"),
        (("--modes", "tp2", "--trace", "x.svg"), "--trace draws the steps of a pipeline"),
    ],
)
def test_bad_arguments(shell: Shell, model: Path, arguments: tuple[str, ...], why: str) -> None:
    code, _, err = shell("bench", "parallel", model, *arguments)
    assert code != 0
    assert why in err


def test_modes() -> None:
    assert parallel.settings_of("tp2pp4") == {"tp": 2, "pp": 4}
    assert parallel.settings_of("pp3") == {"pp": 3}
