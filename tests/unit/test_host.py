"""The operating system has one room in each language: `headrace.host` and csrc/system/os.h."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import host

ROOT = Path(__file__).parents[2]
# What another system has not, or has otherwise.
PYTHON = re.compile(r'"/(?:proc|sys)/|sys\.platform|\bimport (?:fcntl|resource)\b|sched_getaffinity|prctl\(|unshare\(')
CPP = re.compile(r"#include <(?:pthread|sched|unistd|fcntl|sys/|linux/)|__linux__|\bmadvise\(|\"/(?:proc|sys)/")


def strays(files: dict[str, str], system: re.Pattern[str]) -> list[str]:
    return [f"{name}: {found[0]}" for name, text in sorted(files.items()) for found in system.finditer(text)]


def sources(folder: str, *kinds: str) -> dict[str, str]:
    root = ROOT / folder
    return {str(path.relative_to(root)): path.read_text("utf-8") for kind in kinds for path in root.rglob(kind)}


def test_only_the_host_knows_the_system() -> None:
    files = sources("src/headrace", "*.py")
    # run by other engines' Pythons, where Headrace is not
    ours = {name: text for name, text in files.items() if not name.startswith("bench/workers/")}
    assert strays({"host.py": ours.pop("host.py")}, PYTHON)
    assert strays(ours, PYTHON) == []
    assert strays({"kv/pool.py": 'Path("/proc/meminfo")'}, PYTHON) == ['kv/pool.py: "/proc/']


def test_only_one_file_of_the_core_knows_the_system() -> None:
    files = sources("csrc", "*.cpp", "*.h", "*.inl")
    files.pop("system/os.h")  # names the folders that its tests may change
    assert strays({"os_linux.cpp": files.pop("system/os_linux.cpp")}, CPP)
    assert strays(files, CPP) == []
    assert strays({"arena.cpp": "#include <sys/mman.h>"}, CPP) == ["arena.cpp: #include <sys/"]


def test_figures_of_this_process_are_plausible() -> None:
    assert 0 < host.free_memory() <= 2**63
    assert host.free_memory() <= host.physical_memory()
    assert host.held_memory(os.getpid()) > 2**20
    assert host.peak_memory(os.getpid()) >= host.held_memory(os.getpid()) // 2
    assert 0 < host.anonymous_memory() < host.physical_memory()
    assert host.cpu_name()
    assert 1 <= host.cores() <= (os.cpu_count() or 1)
    assert host.process_clock(os.getpid()) > 0
    assert host.process_seconds(os.getpid()) >= 0
    assert host.busy_seconds() >= 0


def test_the_peak_of_a_process_excludes_its_parent() -> None:
    """Not that of whoever started it, as what `resource` says may be."""
    held = bytes(300 << 20)
    script = "import resource, sys; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert int(process.stdout.readline()) > 0  # it runs
        assert 2**20 < host.peak_memory(process.pid) < len(held) // 2
        process.stdin.close()


def test_a_missing_process_has_no_figures() -> None:
    nobody = 2**22 + 1  # above the largest process number
    assert host.held_memory(nobody) == host.peak_memory(nobody) == 0
    with pytest.raises(OSError, match="argument|process"):
        host.process_clock(nobody)


def test_an_open_file_is_locked_for_one(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with (tmp_path / "a").open("wb") as one, (tmp_path / "a").open("wb") as two:
        assert host.lock(one.fileno())
        assert not host.lock(two.fileno())
    with (tmp_path / "a").open("wb") as three:
        assert host.lock(three.fileno())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no priority of threads, and no /proc")
def test_a_thread_that_has_ended_keeps_no_other_at_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True) as process:
        never = str(2**30)  # above the largest thread id of Linux
        monkeypatch.setattr(os, "listdir", lambda path: [never, str(process.pid)])
        host.lower_priority(process.pid)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == host.IDLE_NICENESS
        process.kill()
