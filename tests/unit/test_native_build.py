"""The native core is there where it can be built, and its absence is said where it cannot."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from headrace import core

ROOT = Path(__file__).parents[2]

BUILD = """
import sys
from scikit_build_core.build import build_wheel
print(build_wheel(sys.argv[1], {"build-dir": sys.argv[2]}))
"""


def test_the_core_is_built_where_a_compiler_is() -> None:
    if not any(shutil.which(name) for name in core.COMPILERS):
        pytest.skip("no C++ compiler on this machine")
    assert core.available(), core.reason()
    assert core.reason() == ""
    assert core.module().__name__ == "headrace.core._core"


@pytest.mark.parametrize(
    ("compiler", "advice"), [(None, "install one (Debian, Ubuntu: g++"), ("/usr/bin/c++", "pip install -v")]
)
def test_a_missing_core_names_the_packages_to_install(
    monkeypatch: pytest.MonkeyPatch, compiler: str | None, advice: str
) -> None:
    monkeypatch.setattr(core, "_CORE", None)
    monkeypatch.setattr(shutil, "which", lambda _: compiler)
    assert not core.available()
    with pytest.raises(RuntimeError) as caught:
        core.module()
    assert advice in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_core_is_reported_at_import() -> None:
    code = "import sys; sys.modules['headrace.core._core'] = None; import headrace.core"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("SLOW: the native core is not built")
    assert len(done.stderr.splitlines()) == 1


def test_without_a_compiler_the_install_is_pure_python(tmp_path: Path) -> None:
    env = {**os.environ, "CXX": str(tmp_path / "no-such-compiler")}
    command = [sys.executable, "-c", BUILD, str(tmp_path), str(tmp_path / "build")]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WITHOUT its native core" in done.stdout
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "headrace/core/__init__.py" in names
    assert not [name for name in names if "_core" in name]
