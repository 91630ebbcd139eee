"""doctor: facts for a bug report, problems with their remedy, and no secrets."""

import json

import pytest

from headrace import __version__, core
from tests.cli_shell import Shell


def test_the_facts_of_an_installation(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_API_KEY", "a very secret key")
    monkeypatch.setenv("HEADRACE_THREADS_X", "3")
    code, out, err = shell("doctor")
    assert "secret key" not in out + err
    assert "HEADRACE_API_KEY=(set)" in out
    assert "HEADRACE_THREADS_X=3" in out
    assert f"headrace:        {__version__}" in out
    found = json.loads(shell("doctor", "--json")[1])
    assert {"python", "system", "cpu", "core", "libraries", "extras", "home", "models"} <= set(found)
    assert found["home"].startswith(str(shell.folder / "home"))
    assert ("torch missing" in found["libraries"]) is False
    assert (code == 0) == (found["problems"] == [])


def test_a_problem_is_printed_and_sets_the_exit_code(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_CORE", None)
    monkeypatch.setattr(core, "_PROBLEM", "gone")
    code, out, _ = shell("doctor")
    assert code == 1
    assert "problem:         the native core is not built" in out
