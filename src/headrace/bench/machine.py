"""Where and with what a measurement was made."""

import platform
import subprocess
from pathlib import Path

from headrace import host


def machine() -> dict[str, str | int | float]:
    """Processor, cores this process may use, memory in GiB, system."""
    return {
        "cpu": host.cpu_name(),
        "cores": host.cores(),
        "memory_gib": round(host.physical_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit of a checkout, with "+" where files differ from it; empty for an installed package. `folder`: within it."""
    try:
        name = _git(folder, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def others_share(others: float, seconds: float) -> float:
    """The share of the machine's cores that other processes used: `others` CPU seconds of `seconds`.

    The system counts CPU time in ticks, so that a moment shorter than a tick can look fuller, or emptier, than it can be.
    """
    return min(1.0, max(0.0, others / (seconds * host.cores())))


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
