"""Help in two lengths, hints, settings of a chat and what is near a name that is not there."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from headrace.cli import chat
from headrace.cli.app import main
from headrace.cli.commands import BENCH, COMMANDS, build, description
from headrace.data.params import SamplingParams
from headrace.data.spelling import did_you_mean
from tests.cli_shell import Shell

LONG = (
    "run", "chat", "ask", "generate", "embed", "serve", "perplexity", "compare", "distil", "train-heads",
    "bench local", "bench serve", "bench speculate", "bench cascade",
    "bench token-cascade",
)  # fmt: skip
# What costs a help more than all else of it.
SLOW = ("pydantic", "rich.console", "filelock", "numpy", "torch", "huggingface_hub", "headrace.llm")


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.setenv("COLUMNS", "100")
    return Shell(tmp_path, monkeypatch, capsys)


def options(text: str) -> set[str]:
    return set(re.findall(r"^  (?:-\w, )?(--[\w-]+|-n)(?= )", text, re.MULTILINE))


def sections(text: str) -> list[str]:
    return re.findall(r"^(\w[^:\n]*):$", text, re.MULTILINE)


def command_of(name: str) -> Any:
    found: Any = get_command(build())
    for part in name.split():
        found = found.commands[part]
    return found


@pytest.mark.parametrize("name", LONG)
def test_help_lists_common_options_and_help_all_lists_every_option(name: str, shell: Shell) -> None:
    code, short, _ = shell(*name.split(), "--help")
    assert code == 0
    whole = shell(*name.split(), "--help-all")[1]
    assert 4 <= len(options(short)) <= 18
    assert options(short) < options(whole)
    assert f"headrace {name}" in short.partition("Examples:")[2]
    left = int(re.search(r"(\d+) more options?, by group: headrace " + name + " --help-all", short)[1])  # type: ignore[index]
    command = command_of(name)
    assert left == len({one.name for one in command.params if one.param_type_name == "option"}) + 1 - len(options(short))
    assert "Examples:" not in whole
    grouped = any(one.rich_help_panel for one in command.params)
    assert (
        (len(sections(whole)) > len(sections(short)) - 1 >= 2) if grouped else sections(short) == [*sections(whole), "Examples"]
    )


@pytest.mark.parametrize("name", LONG)
def test_every_common_name_is_an_option(name: str) -> None:
    """A name that was changed must not go missing from the help."""
    command = command_of(name)
    assert command.common <= {one.name for one in command.params}


def test_the_examples_are_commands_that_parse() -> None:
    for name in LONG:
        command = command_of(name)
        assert command.examples
        for line, _ in command.examples:
            flags = set(re.findall(r"(?<= )--?[a-z][\w-]*", line.partition(f"headrace {name}")[2]))
            known = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
            assert flags <= known, line


def test_the_list_describes_each_command_like_its_help() -> None:
    """Descriptions are read from sources; the imported commands give the same ones, in the same order."""
    complete: Any = get_command(build())
    listed: Any = get_command(build([]))
    bench: Any = get_command(build(["bench"]))
    pairs = ((listed, complete, COMMANDS), (bench.commands["bench"], complete.commands["bench"], BENCH))
    for short, whole, panels in pairs:
        lines = {name: short.commands[name].get_short_help_str(1000) for panel in panels.values() for name in panel}
        assert lines == {name: command.get_short_help_str(1000) for name, command in whole.commands.items()}
    with pytest.raises(FileNotFoundError):
        description("", "nosuch")


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["bench", "--help"]])
def test_help_imports_no_heavy_module(arguments: list[str]) -> None:
    """A help is there within 0.3 s of CPU time where none of this is imported; what is imported by hand must be seen."""
    assert imported(arguments) == []
    assert imported(arguments, "import pydantic") == ["pydantic"]


def imported(arguments: list[str], first: str = "") -> list[str]:
    code = f"import json, sys\n{first}\nfrom headrace.cli.app import main\nassert main({arguments!r}) == 0\n"
    code += f"print(json.dumps([name for name in {SLOW!r} if name in sys.modules]), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    return json.loads(done.stderr)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("headrace ru", {"run"}),
        ("headrace run --temp", {"--temperature"}),
        ("headrace bench s", {"serve", "speculate", "self-draft", "sharing"}),
    ],
)
def test_a_shell_completes_commands_and_their_options(typed: str, expected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"_HEADRACE_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": typed}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    code = "from headrace.cli.app import main; main([])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert expected <= set(re.findall(r'"([\w-]+)"', done.stdout)), done


@pytest.mark.parametrize(
    ("arguments", "code", "clue"),
    [("run MODEL hi -n 0", 2, "greater than or equal to 1"), ("run MODEL hi -t warm", 2, "--temperature"), ("run", 2, "MODEL")],
)
def test_option_values_are_checked(arguments: str, code: int, clue: str, shell: Shell) -> None:
    assert shell(*arguments.split())[0] == code
    assert clue in shell(*arguments.split())[2]


def test_a_command_is_imported_alone(shell: Shell) -> None:
    assert set(get_command(build(["run"])).commands) == {"run"} if hasattr(get_command(build(["run"])), "commands") else True  # type: ignore[attr-defined]
    assert len(get_command(build(["nosuch"])).commands) > 12, "to say which is near"  # type: ignore[attr-defined]


def test_a_model_in_the_place_of_a_command_hints_at_run(shell: Shell, tmp_path: Path) -> None:
    model = tmp_path / "mine.gguf"
    code, _, err = shell("smollm2-135m", "hi there")
    assert (code, err) == (
        2,
        "headrace: smollm2-135m is a model, not a command; to prompt it: headrace run smollm2-135m 'hi there'\n",
    )
    assert f"headrace run {model}" in shell(model)[2]
    assert "Did you mean 'run'?" in shell("runn", "x")[2]
    assert "headrace run" not in shell("nosuchmodel", "x")[2]
    err = shell("run", "smollm2-135m", "x", "--temprature", "1")[2]
    assert err == "headrace: No such option: --temprature; did you mean --temperature? (headrace run --help shows the usage)\n"


def test_documents_in_place_of_a_stage_hint_at_rerank(shell: Shell) -> None:
    """`headrace rank` runs a stage of a pipeline. Control: the stage's own missing option is named, too."""
    code, _, err = shell("rank", "smollm2-135m", "water power", "a mill")
    assert (code, "Missing option '--key-file'" in err) == (2, True)
    assert "to rank documents: headrace rerank" in err
    assert "headrace rerank" not in shell("run", "smollm2-135m", "--no-such")[2]


def test_settings_of_a_chat_are_a_table_with_descriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = chat._table(SamplingParams(temperature=0.5, top_n_sigma=1.5)).splitlines()
    assert lines[0].split(maxsplit=2) == [
        "temperature",
        "0.5",
        "0: always the most probable token; higher: more varied answers.",
    ]
    assert len(lines) <= 10
    assert any(line.startswith("top_n_sigma ") for line in lines), "what was changed is shown"
    assert not any(line.startswith("xtc_threshold") for line in lines)
    assert len(chat._table(SamplingParams(), everything=True).splitlines()) == len(chat.SETTINGS)
    assert max(map(len, lines)) < 100


@pytest.mark.parametrize(("typed", "near"), [("temprature", "temperature"), ("temp", "temperature"), ("topk", "top_k")])
def test_a_setting_that_is_not_there_names_one_that_is(typed: str, near: str) -> None:
    assert near in did_you_mean(typed, chat.SETTINGS)
    assert did_you_mean("zzz", chat.SETTINGS) == ""


def test_a_misspelled_help_option_is_refused_with_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help-al"]) == 2
    assert "--help" in capsys.readouterr().err
