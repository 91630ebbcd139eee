"""The C++ test programs, linked with the very kernels of the module. `make sanitize` runs them under the sanitizers."""

import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from headrace import core

ROOT = Path(__file__).parents[2]
PROGRAMS = sorted(path.name.removesuffix(".cpp") for path in (ROOT / "tests" / "native").glob("*_test.cpp"))


@pytest.fixture(scope="module")
def folder() -> Path:
    """Where the native core was built, with the programs built beside it."""
    cmake = shutil.which("cmake") or pytest.skip("no cmake here (extra `dev`)")
    if not core.available():
        pytest.skip(core.reason())
    built = [path.parent for path in (ROOT / "build").glob("*/libheadrace_kernels.a") if _is_module(path.parent)]
    if not built:
        pytest.skip("the native core was built elsewhere; `make native` builds it here")
    newest = max(built, key=lambda path: (path / "libheadrace_kernels.a").stat().st_mtime)
    with FileLock(newest / "programs.lock"):  # tests run side by side, and two builds at once would spoil each other's files
        done = subprocess.run([cmake, "--build", newest, "--target", "programs"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    return newest


def _is_module(folder: Path) -> bool:
    cache = (folder / "CMakeCache.txt").read_text("utf-8", "replace")
    return "HEADRACE_MODULE:BOOL=ON\n" in cache


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_native_test_program_passes(name: str, folder: Path) -> None:
    done = subprocess.run([folder / name], capture_output=True, text=True, timeout=1800, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name.removesuffix('_test')}: ok\n", "")
