"""Contents of the wheel: the package alone, without benchmarks, tests and workers of other engines."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import sys, scikit_build_core.build as b; print(b.build_wheel(sys.argv[1], {'wheel.cmake': 'false'}))"
WORKERS = {"headrace/bench/workers/ours.py", "headrace/bench/workers/serve.py"}


def contents(folder: Path, source: Path = ROOT) -> list[str]:
    """File names in a wheel of `source`, built without the C++ core."""
    command = [sys.executable, "-c", BUILD, str(folder)]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True, env=environment)
    with zipfile.ZipFile(folder / done.stdout.splitlines()[-1]) as wheel:
        return wheel.namelist()


def foreign(names: list[str]) -> list[str]:
    """Names that do not belong into the wheel."""
    return [
        name
        for name in names
        if name.split("/")[0] not in ("headrace", "headrace-0.1.0.dist-info")
        or {"tests", "benchmarks", "conftest.py"} & {*name.split("/")}
        or name.split("/")[-1].startswith("test_")
        or ("/workers/" in name and name not in WORKERS)
    ]


def test_the_wheel_has_the_package_and_nothing_else(tmp_path: Path) -> None:
    names = contents(tmp_path)
    assert foreign(names) == []
    assert {name for name in names if "/workers/" in name} == WORKERS
    assert {"headrace/py.typed", "headrace/llm.py", "headrace/server/page/static/inter.txt"} <= {*names}
    assert "headrace/bench/compare_builds.py" in names


@pytest.mark.parametrize("name", ["benchmarks/masks.py", "headrace/bench/workers/vllm.py", "headrace/tests/test_a.py"])
def test_a_foreign_file_is_reported(name: str) -> None:
    assert foreign(["headrace/llm.py", name]) == [name]
