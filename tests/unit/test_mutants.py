"""Mutation testing finds what a test misses, on a project of three lines, and is not fooled about what is imported."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("mutmut", reason="extra dev: mutmut")

TOOLS = Path(__file__).parents[2] / "tools"
SOURCE = """def half(number: int) -> int:
    if number < 0:
        raise ValueError("negative " + "number")
    return number // 2
"""
MUTANTS = {"if number < 1:", "if number <= 0:", "return number / 2", "return number // 3"}
TEST = """import pytest
from headrace.ops.trees import half

def test_half():
    assert half(9) == 4

def test_negative():
    with pytest.raises(ValueError):
        half(-1)
"""
# What a module `half` of another installation is found by, before sys.path.
FINDER = """import importlib.util, sys
class Finder:
    __module__ = "{module}"
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "headrace.ops.trees":
            return importlib.util.spec_from_file_location(name, "{file}")
sys.meta_path.insert(0, Finder)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {"src/headrace/__init__.py": "", "src/headrace/ops/__init__.py": "", "src/headrace/ops/trees.py": SOURCE}
    files |= {"tests/ops/test_half.py": TEST, "tests/mutants_equivalent.toml": "equivalent = []\n", ".gitignore": "build/\n"}
    files |= {f"tools/{path.name}": path.read_text() for path in TOOLS.glob("mutant*.py")}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    return tmp_path


def run(project: Path, *options: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    """`before`: Python that runs when the process starts, as an installation's does."""
    (project / "before").mkdir(exist_ok=True)
    (project / "before" / "sitecustomize.py").write_text(before)
    packages = [path for path in sys.path if "site-packages" in path]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(project / "before"), *packages])}
    command = [sys.executable, "tools/mutants.py", "ops.trees", "--jobs", "1", "--tests", "ops", *options]
    return subprocess.run(command, cwd=project, env=env, capture_output=True, text=True, timeout=600, check=False)


def outcomes(project: Path) -> dict[str, str]:
    """By the line that the mutant puts there."""
    lines = (project / "build/mutants/results.jsonl").read_text().splitlines()
    return {told["diff"].splitlines()[-1].lstrip("+ "): told["outcome"] for told in map(json.loads, lines)}


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch, project: Path) -> ModuleType:
    """The tool, at work on the project."""
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COVERAGE_CORE", "ctrace")
    for name in ("mutants", "mutant_tests"):
        monkeypatch.setattr(importlib.import_module(name), "ROOT", project)
    return importlib.import_module("mutants")


def test_a_sample_is_seeded_and_excludes_error_texts(mutants: ModuleType, project: Path) -> None:
    lines = lambda found: [mutant.diff.splitlines()[-1].lstrip("+ ") for mutant in found]  # noqa: E731
    everything = lines(mutants.mutants("ops.trees", 100, 1))
    assert sorted(everything) == sorted(MUTANTS)
    three = lines(mutants.mutants("ops.trees", 3, 1))
    assert three == lines(mutants.mutants("ops.trees", 3, 1))
    assert len(three) == 3
    assert {str(lines(mutants.mutants("ops.trees", 3, seed))) for seed in range(9)} > {str(three)}
    decorated = "import functools\n\n@functools.cache\n" + SOURCE
    (project / "src/headrace/ops/trees.py").write_text(decorated)
    assert sorted(lines(mutants.mutants("ops.trees", 100, 1))) == sorted(MUTANTS)


def test_tests_of_a_line_are_ordered_by_time(mutants: ModuleType, project: Path) -> None:
    name = "src/headrace/ops/trees.py"
    (project / name).write_text("LIMIT = 1\n\ndef f(a, b):\n    return (\n        a\n        + b\n    )\n")
    cover = mutants.Cover([name])
    seconds = {"slow": 19.0, "fast": 1.0, "too slow": 21.0, "middle": 5.0, "elsewhere": 0.1}
    cover._add({test: {"seconds": taken, "lines": {name: [5]}} for test, taken in seconds.items() if test != "elsewhere"})
    cover._add({"elsewhere": {"seconds": 0.1, "lines": {name: [40]}}})
    assert cover.tests(name, 6) == (["fast", "middle", "slow"], 4)  # a + b begins in line 4, and line 5 was seen
    assert cover.tests(name, 1) == (["elsewhere", "fast", "middle", "slow"], 0)  # runs when the file is imported


def test_an_entry_matches_a_mutant_by_its_diff_or_pattern(mutants: ModuleType) -> None:
    name = "src/headrace/ops/trees.py"
    mutant = mutants.Mutant("ops.trees", name, 4, "-    return f(a, device=x)\n+    return f(a, device=None)", "")
    assert mutants._is(mutant, {"file": name, "diff": f"\n{mutant.diff}\n"})
    assert mutants._is(mutant, {"file": "src/headrace/*.py", "but": r"device=\w+"})
    assert not mutants._is(mutant, {"file": "src/headrace/kv/*.py", "but": r"device=\w+"})
    assert not mutants._is(mutant, {"file": name, "but": "device="})
    assert not mutants._is(mutant, {"file": name, "diff": "-    return f(a, device=x)\n+    return f(a)"})


@pytest.mark.slow
def test_surviving_mutants_are_reported(project: Path) -> None:
    done = run(project)
    assert done.returncode == 0, done.stderr
    found = outcomes(project)
    assert set(found) == MUTANTS
    assert {line for line, outcome in found.items() if outcome == "survived"} == {"if number < 1:", "if number <= 0:"}
    assert "| ops.trees | 4 | 2 | 0 | 2 | 0 |" in done.stdout
    assert "-    if number < 0:\n+    if number <= 0:" in done.stdout

    entry = '[[equivalent]]\nfile = "src/headrace/ops/trees.py"\nwhy = "nobody asks"\n'
    entry += 'diff = """\n-    if number < 0:\n+    if number < 1:\n"""\n'
    (project / "tests/mutants_equivalent.toml").write_text(entry)
    with (project / "tests/ops/test_half.py").open("a") as file:
        file.write("\ndef test_none():\n    pass\n")
    known = run(project)
    assert "1/" not in known.stderr  # every outcome is known
    assert "| ops.trees | 4 | 2 | 0 | 1 | 1 |" in known.stdout

    with (project / "tests/ops/test_half.py").open("a") as file:
        file.write("\ndef test_zero():\n    assert half(0) == 0\n")
    again = run(project, "--again")
    assert "2/2 killed" in again.stderr
    assert "| ops.trees | 4 | 4 | 0 | 0 | 0 |" in again.stdout


@pytest.mark.slow
def test_the_mutated_copy_is_imported(project: Path) -> None:
    """An editable install's finder, which comes before sys.path, does not count; any other one ends the run."""
    right = project / "elsewhere.py"
    right.write_text(SOURCE)
    done = run(project, before=FINDER.format(module="_editable_fake", file=right))
    assert done.returncode == 0, done.stderr
    assert outcomes(project)["return number // 3"] == "killed"
    done = run(project, "--seed", "2", before=FINDER.format(module="some_finder", file=right))
    assert done.returncode == 1
    assert "the control failed" in done.stderr
