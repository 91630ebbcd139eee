"""The operating system: all that Headrace asks of it beyond Python's own library. Nothing else reads /proc or /sys, or sets the
limits of a process."""

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
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000


def user_home() -> Path | None:
    """The user's home directory; None for a user id without a passwd entry if HOME is not set (containers, cron)."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def free_memory() -> int:
    """Free bytes of RAM, within what the control group allows."""
    info = Path("/proc/meminfo").read_text()
    found = re.search(r"MemAvailable:\s*(\d+) kB", info)
    free = int(found[1]) * 1024 if found else 4 * 2**30
    return min(free, _control_group_room())


def _control_group_room() -> int:
    """What the control group (v2, then v1) leaves; unbounded where there is none."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            text = Path(limit).read_text().strip()
            if text != "max":
                return max(0, int(text) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return 2**63


def physical_memory() -> int:
    """Bytes of RAM that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def held_memory(pid: int) -> int:
    """Bytes of a process that are in RAM; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def peak_memory(pid: int) -> int:
    """The most bytes of a process that were in RAM since its program began; 0 where the system does not say. What resource says
    begins with the memory of whoever started it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    found = re.search(r"VmHWM:\s*(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def anonymous_memory() -> int:
    """Bytes of this process that are no mapped file; 0 where the system does not say."""
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
    """Bytes that this process has allocated and not freed; without glibc its bytes in RAM, which a free may not lower."""
    read = _heap_reader()
    if read is None:
        return held_memory(os.getpid())
    found = read()
    return int(found.uordblks + found.hblkhd)


def cpu_name() -> str:
    """What the processor calls itself."""
    return _cpuinfo("model name") or os.uname().machine


def cpu_flags() -> frozenset[str]:
    """The processor's features by Linux's names for x86; empty where the system does not say."""
    return frozenset(_cpuinfo("flags").split())


def _cpuinfo(field: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(field)), "")


def cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
    """CPU time of one process, to the nanosecond. Raises OSError where there is no such clock."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux's number for the clock of a process


def end_with(parent: int) -> None:
    """Let the system kill this process when the thread ends that started it, whatever this one is doing then; Linux only.
    Exits where `parent`, a process id, has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(0)


def leave_the_network() -> None:
    """Into namespaces of its own, where the system lets anybody make them: there is no network in them."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)


def limit(name: str, most: int, hard: int | None = None) -> None:
    """At most so much of what Linux calls RLIMIT_`name`, for good; with `hard` it may be raised to that again. Nothing happens
    where the system has no such limit."""
    with contextlib.suppress(AttributeError, OSError, ValueError):
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most if hard is None else hard))


def lock(file: int) -> bool:
    """Lock an open file for this process alone, until it is closed; False where another one has it. Raises OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def allow_files(needed: int) -> int | None:
    """Raise this process's limit of open files to `needed`. None, or the system's limit where that is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        return hard
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return None
