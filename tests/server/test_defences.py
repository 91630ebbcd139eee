"""Each class of faults in docs/data/security.toml without its defence: a test of the class fails in a copy that lacks it.

tests/defences.toml lists the lines to remove. The short ones run in every test run, all of them with `pytest -m slow`.
"""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests import security
from tests.server.harness import ROOT

ROWS: dict[str, list[str]] = {one["class"]: one["tests"] for one in security.DATA["class"]}
DEFENCES: list[dict[str, Any]] = tomllib.loads((ROOT / "tests/defences.toml").read_text("utf-8"))["defence"]
NAMES = [defence["class"] for defence in DEFENCES]
SHORT = [defence for defence in DEFENCES if defence.get("short")]
SECONDS = 570  # for one test, which may wait for what does not come
PATIENCE = ("PATIENCE = 300.0", "PATIENCE = 20.0")  # seconds that a test of the copy waits for that
# An installation that is edited in place finds its modules before any path is looked at; the copy must find its own.
ALONE = """import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in type(one).__module__]
"""
FAILED = 1  # pytest's exit status; a test that cannot be collected has another


def test_every_row_has_a_defence_that_can_be_taken_out() -> None:
    """Each class once, with one of its tests, and what is removed is there."""
    assert len(ROWS) > 30
    for row, tests in ROWS.items():
        found = [defence for defence in DEFENCES if row == defence["class"]]
        assert len(found) == 1, f"{row}: {len(found)} defences"
        assert found[0]["test"] in tests, row
    assert len(DEFENCES) == len(ROWS)
    for defence in DEFENCES:
        source = (ROOT / "src/headrace" / defence["file"]).read_text("utf-8")
        for old, new in patches(defence):
            assert source.count(old) == 1, f"{defence['class']}: {old!r} is {source.count(old)} times in {defence['file']}"
            assert old != new


def test_without_their_defences_tests_fail(tmp_path: Path) -> None:
    """In one copy without any of the short ones, which have nothing to do with each other."""
    status, output = attempt(tmp_path, SHORT)
    assert status == FAILED, output
    assert [defence["test"] for defence in SHORT if f"FAILED {defence['test']}" not in output] == [], output[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("defence", DEFENCES, ids=NAMES)
def test_without_its_defence_a_test_fails(tmp_path: Path, defence: dict[str, Any]) -> None:
    status, output = attempt(tmp_path, [defence])
    assert status == FAILED, output


def test_with_their_defences_the_tests_pass(tmp_path: Path) -> None:
    """The control: the copy itself fails no test."""
    status, output = attempt(tmp_path, [{**defence, "new": defence["old"]} for defence in SHORT])
    assert status == 0, output


def patches(defence: dict[str, Any]) -> list[tuple[str, str]]:
    both = [[one] if isinstance(one, str) else one for one in (defence["old"], defence["new"])]
    return list(zip(*both, strict=True))


def attempt(folder: Path, defences: list[dict[str, Any]]) -> tuple[int, str]:
    """Run the tests of some defences in a copy of the project without these defences: pytest's exit status and output."""
    for name in ("src", "tests", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so"), symlinks=True)
    for core in (ROOT / "src/headrace/core").glob("*.so"):
        (folder / "src/headrace/core" / core.name).symlink_to(core.resolve())
    for name in ("benchmarks", "csrc", "tools", "Makefile", "README.md", "README.zh-CN.md"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    for defence in defences:
        edit(folder / "src/headrace" / defence["file"], patches(defence))
    edit(folder / "tests/server/harness.py", [PATIENCE])
    tests = [defence["test"] for defence in defences]
    first = ["-x"] if len(tests) == 1 else []  # its first failure says enough
    command = [sys.executable, "-m", "pytest", "-q", "-rf", *first, "-p", "no:cacheprovider", "-n0", *tests]
    (folder / "own").mkdir()
    (folder / "own/sitecustomize.py").write_text(ALONE)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join((str(folder / "own"), str(folder / "src")))
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            raise
    return process.returncode, output


def edit(file: Path, changes: list[tuple[str, str]]) -> None:
    text = file.read_text("utf-8")
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file.write_text(text, "utf-8")
