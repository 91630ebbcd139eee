"""Description of the machine, model and commit of a measurement, and the machine's memory bandwidth at this moment."""

import ctypes
import platform
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from headrace import host

Say = Callable[[str], None]
# Bytes; several times larger than any cache.
SIZE = 256 << 20


def machine() -> dict[str, str | int | float]:
    """Processor, cores that this process may use, memory in GiB, system."""
    return {
        "cpu": host.cpu_model(),
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


class BandwidthProbe:
    """Reads a buffer with several threads: each searches its part with memchr for a byte that does not occur in it."""

    def __init__(self, threads: int = 2, size: int = SIZE) -> None:
        self.threads = threads
        self._buffer = ctypes.create_string_buffer(size)
        # Maps every page, and writes no byte 0.
        ctypes.memset(self._buffer, 1, size)
        self._search = ctypes.CDLL(None).memchr
        self._search.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        self._search.restype = ctypes.c_void_p

    def gb_per_s(self, passes: int = 5) -> float:
        """Median bandwidth over the passes, in 10^9 bytes per second."""
        return median(self._pass() for _ in range(passes))

    def found(self, byte: int, part: int = 0) -> bool:
        """Whether one thread's part of the buffer contains a byte."""
        size = len(self._buffer) // self.threads
        return self._search(ctypes.addressof(self._buffer) + part * size, byte, size) is not None

    def _pass(self) -> float:
        workers = [threading.Thread(target=self.found, args=(0, part)) for part in range(self.threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return len(self._buffer) / (time.perf_counter() - start) / 1e9
