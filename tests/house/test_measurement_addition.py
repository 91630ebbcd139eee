"""A measurement is one file and one name in `cli/commands.py`: help, table, JSON and SVG follow."""

import ast
import json
import sys
from pathlib import Path

import pytest

from headrace.cli import commands
from tests.cli_shell import Shell
from tests.house import prompt_lengths
from tests.tiny_files import write_tiny_gguf


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """With the measurement among the commands of bench."""
    monkeypatch.setitem(commands.BENCH, "Commands", (*commands.BENCH["Commands"], "prompt-lengths"))
    monkeypatch.setitem(sys.modules, "headrace.cli.bench_prompt_lengths", prompt_lengths)
    return Shell(tmp_path, monkeypatch, capsys)


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[object, ...]:
    (tmp_path / "prompts.txt").write_text("The mill\nA wheel turns\n")
    return ("bench", "prompt-lengths", write_tiny_gguf(tmp_path / "tiny.gguf"), "-i", tmp_path / "prompts.txt")


def test_it_is_short() -> None:
    source = Path(prompt_lengths.__file__).read_text("utf-8")
    lines = {line for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt) for line in (node.lineno,)}
    assert len(lines) <= 20


def test_its_help_lists_its_own_and_the_common_options(shell: Shell) -> None:
    code, out, _ = shell("bench", "prompt-lengths", "--help")
    assert code == 0
    assert "Tokens of each prompt." in out
    assert all(option in out for option in ("--input", "--json", "--plot", "headrace bench prompt-lengths MODEL -i FILE"))
    assert "--plot" not in shell("bench", "sharing", "--help")[1], "control: a measurement without curves"


def test_it_prints_a_table_and_writes_its_files(shell: Shell, arguments: tuple[object, ...], tmp_path: Path) -> None:
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.svg"
    code, out, err = shell(*arguments, "--json", figures, "--plot", plot)
    assert code == 0, err
    assert [line.split("\t")[0] for line in out.splitlines()] == ["prompt", "The mill", "A wheel turns"]
    rows = json.loads(figures.read_text())
    assert out.splitlines()[1].split("\t") == ["The mill", f"{rows[0]['tokens']}", f"{rows[0]['letters']:.2f}"]
    assert plot.read_text().startswith("<svg")
    code, _, err = shell(*arguments, "--json", tmp_path / "none" / "figures.json")
    assert code == 2
    assert "does not exist; create it first" in err


def test_a_command_without_its_name_does_not_exist(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    monkeypatch.setitem(commands.BENCH, "Commands", commands.BENCH["Commands"][:-1])
    assert "No such command" in shell("bench", "prompt-lengths", "--help")[2]


def test_a_column_that_its_rows_lack_is_an_error(
    shell: Shell, arguments: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control: the table reads the rows."""
    monkeypatch.setattr(prompt_lengths, "COLUMNS", (prompt_lengths.Column("tokens", "{count}"),))
    code, _, err = shell(*arguments)
    assert code == 1
    assert "KeyError: 'count'" in err
