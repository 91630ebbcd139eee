"""Description of the machine, model and commit of a measurement."""

import platform
import subprocess
from collections.abc import Callable
from pathlib import Path

from headrace import host

Say = Callable[[str], None]


def machine() -> dict[str, str | int | float]:
    """Processor, cores that this process may use, memory in GiB, system."""
    return {
        "cpu": host.cpu_name(),
        "cores": host.cores(),
        "memory_gib": round(host.physical_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def commit(folder: Path = Path(__file__).parent) -> str:
    """Commit of the checkout that contains `folder`, with "+" if files differ from it; empty for an installed package."""
    try:
        name = _git(folder, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def others_share(others: float, seconds: float) -> float:
    """Share of the machine's cores, 0 to 1, that `others` CPU seconds are of `seconds` of wall time.

    The system counts CPU time in ticks, so an interval shorter than a tick can give a share outside 0 to 1.
    """
    return min(1.0, max(0.0, others / (seconds * host.cores())))


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
