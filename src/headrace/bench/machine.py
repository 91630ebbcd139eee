"""Where and with what a measurement was made."""

import os
import platform
import subprocess
from pathlib import Path


def machine() -> dict[str, str | int | float]:
    """Processor, cores this process may use, memory in GiB, system."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit of a checkout, with "+" where files differ from it; empty for an installed package. `folder`: within it."""
    try:
        name = _git(folder, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def busy_seconds() -> float:
    """CPU time that all processes have used since the system started, and time stolen from it (/proc/stat)."""
    names = "user nice system idle iowait irq softirq steal".split()
    with open("/proc/stat") as file:
        ticks = dict(zip(names, map(int, file.readline().split()[1:9]), strict=True))
    return (sum(ticks.values()) - ticks["idle"] - ticks["iowait"]) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int, *, children: bool = False) -> float:
    """CPU time of one process, all its threads, and of its `children` that have ended (/proc/PID/stat)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


def others_share(others: float, seconds: float) -> float:
    """The share of the machine's cores that other processes used: `others` CPU seconds of `seconds`.

    The system counts CPU time in ticks, so that a moment shorter than a tick can look fuller, or emptier, than it can be.
    """
    return min(1.0, max(0.0, others / (seconds * cores())))


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _field(path: str, name: str) -> str:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
