"""Calls of the operating system beyond Python's library. No other module reads /proc or /sys, or sets process limits."""

import contextlib
import ctypes
import fcntl
import functools
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
IDLE_NICENESS = 19
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
# linux/fcntl.h; Python has no name for it. Mappings that exist stay writable.
SEAL_FUTURE_WRITE = 0x0010


def user_home() -> Path | None:
    """The user's home directory; None for a user id without a passwd entry if HOME is not set (containers, cron)."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def free_memory() -> int:
    """Free bytes of RAM, limited by the control group."""
    info = Path("/proc/meminfo").read_text()
    found = re.search(r"MemAvailable:\s*(\d+) kB", info)
    free = int(found[1]) * 1024 if found else 4 * 2**30
    return min(free, _control_group_room())


# Below the folder of control groups: limit, usage, statistics, and the statistic of cached file pages that can be released.
MEMORY_GROUPS = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def _control_group_room(membership: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> int:
    """Bytes left in the control group and the groups above it (v2 and v1); 2**63 without a limit.

    Pages of files that the system can release do not count as used.
    """
    try:
        lines = Path(membership).read_text().splitlines()
    except OSError:
        lines = []
    room = 2**63
    for number, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        kind = "" if (number, controllers) == ("0", "") else "memory" if "memory" in controllers.split(",") else None
        if kind is None:
            continue
        limit, used, cached = MEMORY_GROUPS[kind]
        top, place = Path(root, kind), Path(root, kind, path.lstrip("/"))
        for folder in [place, *place.parents]:
            with contextlib.suppress(OSError, ValueError, KeyError):
                most = int((folder / limit).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                room = min(room, max(0, most - int((folder / used).read_text()) + int(stat[cached])))
            if folder == top:
                break
    return room


def in_memory(folder: Path) -> bool:
    """Whether the files of a folder are in memory (tmpfs, ramfs); False if the system does not say."""
    try:
        number = folder.stat().st_dev
        lines = [line.split(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return False
    device = f"{os.major(number)}:{os.minor(number)}"
    return any(mount.split()[2] == device and kind.split()[0] in ("tmpfs", "ramfs") for mount, kind in lines)


def physical_memory() -> int:
    """Bytes of RAM of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def held_memory(pid: int) -> int:
    """Resident bytes of a process; 0 if the system does not report them."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_memory(pid: int) -> int:
    """Largest number of resident bytes of a process since its program started; 0 if the system does not report it.

    `resource.getrusage` is not used, as its value includes the parent's memory before exec.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def anonymous_memory() -> int:
    """Resident bytes of this process that are not mapped files; 0 if the system does not report them."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    found = re.search(r"RssAnon:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


class _HeapInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


@functools.cache
def _heap_reader() -> Callable[[], Any] | None:
    """glibc's mallinfo2, or None if the C library has none."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if read is not None:
        read.restype = _HeapInfo
    return read


def heap_memory() -> int:
    """Bytes that this process has allocated and not freed. Without glibc: resident bytes, which freeing may not lower."""
    read = _heap_reader()
    if read is None:
        return held_memory(os.getpid())
    found = read()
    return int(found.uordblks + found.hblkhd)


def cpu_name() -> str:
    """The processor's model name."""
    return _cpuinfo("model name") or os.uname().machine


def cpu_model() -> str:
    """The processor's model name with its family and model numbers, since virtual machines give many models one name."""
    numbers = {"family": _cpuinfo("cpu family"), "model": _cpuinfo("model\t")}
    return ", ".join([cpu_name(), *(f"{name} {number}" for name, number in numbers.items() if number)])


def cpu_flags() -> frozenset[str]:
    """Processor features by Linux's names for x86; empty if the system does not report them."""
    return frozenset(_cpuinfo("flags").split())


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def cores() -> int:
    """Number of processors that this process may run on."""
    return len(processors())


def processors() -> list[int]:
    """The processors that this process may run on, ascending; all of the machine where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def processors_by_node(root: str = "/sys/devices/system/node") -> list[int]:
    """`processors`, those of one memory node (NUMA) after those of another, so that parts of the list share a node's memory."""
    have = processors()
    nodes = {number: node for node, numbers in enumerate(memory_nodes(root)) for number in numbers}
    return sorted(have, key=lambda number: (nodes.get(number, 0), number))


def memory_nodes(root: str = "/sys/devices/system/node") -> list[list[int]]:
    """The processors of each memory node of the machine; empty if the system does not report them."""
    folders = [path for path in Path(root).glob("node[0-9]*") if path.name[4:].isdigit()]
    lists = []
    for folder in sorted(folders, key=lambda path: int(path.name[4:])):
        with contextlib.suppress(OSError, ValueError):
            lists.append(_processor_list((folder / "cpulist").read_text()))
    return lists


def _processor_list(text: str) -> list[int]:
    """Read Linux's list of processors, such as "0-3,8". Raises ValueError."""
    ends = [part.partition("-") for part in text.strip().split(",") if part]
    return [number for first, dash, last in ends for number in range(int(first), int(last if dash else first) + 1)]


def has_terminal() -> bool:
    """Whether this process has a controlling terminal; False after it was closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def run_on(processors: list[int]) -> None:
    """Run this process and those that it starts on these processors alone, where the system supports it."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)


def busy_seconds() -> float:
    """CPU time that all processes have used since the system started, and time stolen from it (/proc/stat)."""
    names = "user nice system idle iowait irq softirq steal".split()
    with open("/proc/stat") as file:
        ticks = dict(zip(names, map(int, file.readline().split()[1:9]), strict=True))
    return (sum(ticks.values()) - ticks["idle"] - ticks["iowait"]) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int, *, children: bool = False) -> float:
    """CPU time of one process, all its threads, and of its `children` that have ended (/proc/PID/stat), in whole ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


def process_clock(pid: int) -> float:
    """CPU time of one process in seconds, to the nanosecond. Raises OSError if the clock is not available."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux's number for the clock of a process


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends (Linux only). Exits if `parent`, a process id, has
    already ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(0)


def lower_priority(pid: int) -> bool:
    """Set the niceness of all threads of one process, and of its scheduling group, to 19. False if the group refused.

    Linux schedules each session as a group (autogroup, sched(7)), and a thread's niceness counts within its group alone.
    The system limits how often groups may change: the caller tries again later.
    """
    threads: list[str] = [str(pid)]
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task") if sys.platform == "linux" else threads
    for thread in threads:
        # A thread that has just ended must not keep the others at their priority.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, int(thread), IDLE_NICENESS)
    try:
        Path(f"/proc/{pid}/autogroup").write_text(str(IDLE_NICENESS))
    except BlockingIOError:
        return False
    # Systems without such groups have no file to write.
    except OSError:
        pass
    return True


def leave_the_network() -> None:
    """Move this process into a network namespace without interfaces, if the system allows it."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)


def limit(name: str, most: int, hard: int | None = None) -> None:
    """Set RLIMIT_`name` to `most`, permanently; with `hard` it may be raised to that again. No effect without such a limit."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most if hard is None else hard))


def lock(file: int) -> bool:
    """Lock an open file until it is closed. Returns False if another process holds the lock. Raises OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(file: int) -> None:
    """Lock an open file, also if another process must unlock it first. Raises OSError."""
    fcntl.lockf(file, fcntl.LOCK_EX)


def unlock(file: int) -> None:
    """End the lock of `wait_for_lock`."""
    fcntl.lockf(file, fcntl.LOCK_UN)


def sealed(file: int) -> bool:
    """Whether a file in memory can no longer be written."""
    return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEAL_FUTURE_WRITE)


def seal(file: int) -> None:
    """Forbid writing to a file in memory and resizing it. Existing mappings stay writable."""
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | SEAL_FUTURE_WRITE)


def allow_files(needed: int) -> int | None:
    """Raise this process's limit of open files to `needed`. Returns None, or the system's limit if that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return hard
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None
