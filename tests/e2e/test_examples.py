"""The programs in examples/ run on a tiny model, and on the default model if it is installed."""

import runpy
from pathlib import Path

import pytest

from tests.places import model_file
from tests.tiny_files import write_tiny_gguf

FOLDER = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))


def output_of(name: str, model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(FOLDER / f"{name}.py"))["main"](str(model))
    return capsys.readouterr().out


def test_all_of_them_are_here() -> None:
    assert NAMES == ["custom_processor", "custom_strategy", "offline_batch", "streaming"]


@pytest.mark.parametrize("name", NAMES)
def test_on_a_tiny_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = output_of(name, write_tiny_gguf(tmp_path / "tiny.gguf", context=1024), capsys)
    check(name, said)


@pytest.mark.weights
@pytest.mark.parametrize("name", NAMES)
def test_on_the_default_model(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = output_of(name, model_file("SmolLM2-135M-Instruct.Q4_1.gguf"), capsys)
    check(name, said)
    if name == "offline_batch":
        assert "Paris" in said
        likely, unlikely = (float(line.split()[1]) for line in said.splitlines() if line.startswith("perplexity"))
        assert likely < unlikely


def check(name: str, said: str) -> None:
    lines = said.splitlines()
    if name == "custom_processor":
        plain, without = lines
        assert "e" in plain.partition(":")[2].lower()
        assert "e" not in without.partition(":")[2].lower()
    elif name == "custom_strategy":
        assert len(lines) == 2
        assert lines[0].partition(": ")[2] != lines[1].partition(": ")[2]
    elif name == "streaming":
        assert any(line.startswith("[") and "first token after" in line for line in lines)
        assert lines[-1].endswith("[enough]")
    else:
        assert len([line for line in lines if line.startswith(("  0: ", "  1: "))]) == 6
