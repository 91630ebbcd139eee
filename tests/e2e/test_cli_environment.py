"""Commands in a bare environment: no home directory, a stdout that is not UTF-8, closed streams."""

import io
import json
import pwd
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.app import main
from headrace.cli.output import status
from headrace.llm import LLM
from headrace.weights.store import StoreError, home
from tests.cli_shell import MAIN, SECONDS, Shell, environment


@pytest.fixture
def homeless(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A user id without a passwd entry, and none of the variables that name a folder."""
    for name in ("HOME", "HEADRACE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with pytest.raises(RuntimeError):
        Path.home()  # the control: this user has no home directory
    return shell


def test_a_model_given_by_path_needs_no_home(homeless: Shell, tiny_gguf: Path) -> None:
    code, out, err = homeless("run", tiny_gguf, "x", "-m", 2, "-q", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("arguments", [("list",), ("show", "smollm2-135m"), ("add", "mine", "x.gguf"), ("rm", "mine")])
def test_without_a_home_the_rest_names_the_variable(homeless: Shell, arguments: tuple[str, ...]) -> None:
    code, out, err = homeless(*arguments)
    assert (code, out) == (1, "")
    assert err == "headrace: this user has no home directory; set HEADRACE_HOME to a folder of yours\n"


def test_doctor_reports_a_missing_home(homeless: Shell) -> None:
    code, out, _ = homeless("doctor", "--json")
    assert code == 1
    assert any("set HEADRACE_HOME" in one for one in json.loads(out)["problems"])


def test_headrace_home_is_enough(homeless: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="set HEADRACE_HOME"):
        home()
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    assert homeless("list")[0] == 0


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_json_is_valid_in_every_encoding_of_stdout(
    encoding: str, shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["perplexity", str(tiny_gguf), str(written(shell.folder)), "--json"]) == 0
    out.flush()
    found = json.loads(out.buffer.getvalue().decode(encoding))  # type: ignore[attr-defined]
    assert "é水" in json.dumps(found, ensure_ascii=False)


def written(folder: Path) -> Path:
    path = folder / "é水.txt"
    path.write_text("The mill stands by the river.\n" * 4, "utf-8")
    return path


@pytest.mark.parametrize("closed", ["stdin", "stdout", "stderr"])
def test_a_closed_stream_is_no_error(closed: str, shell: Shell, tiny_gguf: Path) -> None:
    number = ("stdin", "stdout", "stderr").index(closed)
    command = f'exec {number}>&-; exec "$@"'
    run = [sys.executable, "-c", f"import sys\n{MAIN}", "run", str(tiny_gguf), "x", "-m", "2", "--threads", "1"]
    done = subprocess.run(
        ["bash", "-c", command, "-", *run], env=environment(), capture_output=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"Error" not in done.stderr


@pytest.mark.parametrize("command", ["run", "chat"])
def test_other_bytes_on_stdin_name_the_encoding(command: str, shell: Shell, tiny_gguf: Path) -> None:
    process = shell.start(command, tiny_gguf, "-m", 2, stdin=subprocess.PIPE, text=False)
    out, err = process.communicate("Die Mühle".encode("latin-1"), timeout=SECONDS)
    assert process.returncode == 1
    assert out == b""
    assert b"standard input is not UTF-8 text (byte 5); convert it, for example: iconv -f latin1 -t UTF-8" in err


def test_a_status_is_shown_while_the_template_is_rendered(
    shell: Shell, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[bool, str]] = []
    render = LLM.render

    def watched(self: LLM, *arguments: Any, **more: Any) -> list[int]:
        line: Any = status()
        seen.append((line._shown, line._what))
        return render(self, *arguments, **more)

    monkeypatch.setattr(LLM, "render", watched)
    assert shell.watched("run", tiny_gguf, "hi", "-m", "2")[0] == 0
    assert seen == [(True, "reading the prompt")]
