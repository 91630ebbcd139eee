"""The operating system has one room in each language: `headrace.host` and csrc/system/os.h."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import host
from headrace.parallel.ranks.seats import seats

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
    for header in ("os.h", "nodes.h"):  # name the folders that their tests may change
        files.pop(f"system/{header}")
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


# Membership as in /proc/self/cgroup, files below the root of the cgroup file system, bytes left.
STAT = "anon 5\ninactive_file 200\ntotal_inactive_file 300\n"
GROUPS: dict[str, tuple[str, dict[str, str], int]] = {
    "no limit": ("0::/box", {"box/memory.max": "max\n", "box/memory.current": "500", "box/memory.stat": STAT}, 2**63),
    "no files": ("0::/box", {}, 2**63),
    "its own": ("0::/box", {"box/memory.max": "1000\n", "box/memory.current": "500\n", "box/memory.stat": STAT}, 700),
    "a container": ("0::/", {"memory.max": "1000\n", "memory.current": "1300\n", "memory.stat": STAT}, 0),
    "a group above": ("0::/a/b", {"a/memory.max": "900\n", "a/memory.current": "500\n", "a/memory.stat": STAT}, 600),
    "another group": ("0::/box", {"other/memory.max": "10\n", "other/memory.current": "5", "other/memory.stat": STAT}, 2**63),
    "version 1": (
        "3:cpu:/x\n2:memory:/docker/box\n0::/",
        {
            "memory/docker/box/memory.limit_in_bytes": "1000\n",
            "memory/docker/box/memory.usage_in_bytes": "900\n",
            "memory/docker/box/memory.stat": STAT,
        },
        400,
    ),
    "damaged": ("0::/box\nnonsense\n", {"box/memory.max": "much\n", "box/memory.current": "", "box/memory.stat": "x"}, 2**63),
}


@pytest.mark.parametrize("name", GROUPS)
def test_the_limit_of_a_control_group_bounds_free_memory(name: str, tmp_path: Path) -> None:
    """Pages of files that the system can release count as free."""
    membership, files, room = GROUPS[name]
    (tmp_path / "membership").write_text(membership)
    for path, words in files.items():
        (tmp_path / "root" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / path).write_text(words)
    assert host._control_group_room(str(tmp_path / "membership"), str(tmp_path / "root")) == room


def test_folders_in_memory_are_recognised(tmp_path: Path) -> None:
    assert not host.in_memory(Path("/proc/self"))
    assert not host.in_memory(tmp_path / "missing")
    if Path("/dev/shm").is_dir():
        assert host.in_memory(Path("/dev/shm"))


def fake_nodes(folder: Path, *lists: str) -> str:
    for number, text in enumerate(lists):
        (folder / f"node{number}").mkdir()
        (folder / f"node{number}" / "cpulist").write_text(text + "\n")
    (folder / "node_list").mkdir()
    return str(folder)


def test_processors_are_ordered_by_memory_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of two nodes whose processors alternate; this process may not run on all of them."""
    root = fake_nodes(tmp_path, "0,2,4,6,16-17", "1,3,5,7")
    assert host.memory_nodes(root) == [[0, 2, 4, 6, 16, 17], [1, 3, 5, 7]]
    monkeypatch.setattr(host, "processors", lambda: [0, 1, 2, 3, 4, 5, 16])
    assert host.processors_by_node(root) == [0, 2, 4, 16, 1, 3, 5]


@pytest.mark.parametrize("lists", [(), ("0-6",), ("",), ("none",)])
def test_without_several_nodes_the_order_is_that_of_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lists: tuple[str, ...]
) -> None:
    monkeypatch.setattr(host, "processors", lambda: [0, 1, 5, 6])
    assert host.processors_by_node(fake_nodes(tmp_path, *lists)) == [0, 1, 5, 6]


def test_parts_of_processors_have_one_node_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = fake_nodes(tmp_path, "0,2,4,6", "1,3,5,7")
    monkeypatch.setattr(host, "processors", lambda: list(range(8)))
    assert seats(2, 4, host.processors_by_node(root)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert seats(2, 4, host.processors()) == [[0, 1, 2, 3], [4, 5, 6, 7]]  # control: each has both nodes
