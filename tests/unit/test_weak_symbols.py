"""Objects of different instruction sets define no weak symbols: the linker would keep one copy for all CPUs. What they are made
of stands for itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "csrc" / "weak_symbols.cmake"

SOURCES = {
    "static": "static int twice(int x) { return 2 * x; } int four() { return twice(2); }",
    "inline function": "inline int twice(int x) { return 2 * x; } int (*keep)(int) = twice;",
    "template": "template <class T> T twice(T x) { return 2 * x; } template int twice(int);",
    "local of an inline function": "inline int& count() { static int n = 0; return n; } int* keep = &count();",
}


def checked(*objects: Path) -> subprocess.CompletedProcess[str]:
    cmake, nm = shutil.which("cmake"), shutil.which("nm")
    if cmake is None or nm is None:
        pytest.skip("needs cmake (extra `dev`) and nm")
    command = [cmake, f"-DNM={nm}", f"-DOBJECTS={';'.join(map(str, objects))}", "-P", str(CHECK)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SOURCES)
def test_the_check_of_the_build_finds_them(name: str, tmp_path: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++") or pytest.skip("no C++ compiler on this machine")
    source, made = tmp_path / "a.cpp", tmp_path / "a.o"
    source.write_text(SOURCES[name] + "\n")
    subprocess.run([compiler, "-O0", "-c", source, "-o", made], check=True)
    done = checked(made)
    assert (done.returncode == 0) == (name == "static")
    assert ("weak symbols; make them static" in " ".join(done.stderr.split())) == (name != "static")


def test_missing_objects_are_an_error(tmp_path: Path) -> None:
    assert checked().returncode != 0
    assert checked(tmp_path / "none.o").returncode != 0


def test_the_built_kernels_have_no_weak_symbols() -> None:
    """Every file of kernels, once for each instruction set. The soft tiles of tests are two of these files."""
    built = [path for path in (ROOT / "build").glob("*/CMakeFiles") if "sanitize" not in path.parent.name]
    found = [
        [path for path in sorted(folder.glob("headrace_*.dir/csrc/kernels/*.o")) if "soft" not in path.parts[-4]]
        for folder in built
    ]
    objects = max(found, key=len, default=[])
    if not objects:
        pytest.skip("the native core was built elsewhere; `make native` builds it here")
    kernels, sets = {path.name for path in objects}, {path.parts[-4] for path in objects}
    assert len(kernels) == len(list((ROOT / "csrc/kernels").glob("*.cpp")))
    assert len(objects) == len(kernels) * len(sets)
    done = checked(*objects)
    assert done.returncode == 0, done.stderr


OPENS = "namespace headrace::HEADRACE_ISA {"


def leans(text: str) -> bool:
    """Whether a part of a kernel needs to be included where others have opened the namespace, or does so with others."""
    before, opens, within = text.partition(OPENS)
    return not opens or "#pragma once" not in before or "#include" in within


def test_parts_of_kernels_open_the_namespace_themselves() -> None:
    parts = {str(path): path.read_text() for path in (ROOT / "csrc").rglob("*.inl")}
    assert [name for name, text in parts.items() if leans(text)] == []
    for text in parts.values():
        assert leans(text.replace(OPENS, ""))
    kernels = [path.read_text().partition(OPENS) for path in (ROOT / "csrc/kernels").glob("*.cpp")]
    assert not any("#include" in within for _, _, within in kernels)
