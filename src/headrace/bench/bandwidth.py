"""How fast memory can be read right now: the ceiling that decoding at batch 1 runs against, and a noisy one."""

import ctypes
import threading
import time
from statistics import median

SIZE = 256 << 20  # bytes; several times what any cache holds


class BandwidthProbe:
    """Threads that each search their part of a buffer for a byte that is not in it: every byte is read, once."""

    def __init__(self, threads: int = 2, size: int = SIZE) -> None:
        self.threads = threads
        self._buffer = ctypes.create_string_buffer(size)
        ctypes.memset(self._buffer, 1, size)  # in memory, and without the byte searched for
        self._search = ctypes.CDLL(None).memchr
        self._search.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
        self._search.restype = ctypes.c_void_p

    def gb_per_s(self, passes: int = 5) -> float:
        """Median of the passes, in 10^9 bytes a second."""
        return median(self._pass() for _ in range(passes))

    def found(self, byte: int, part: int = 0) -> bool:
        """Search one thread's part for a byte."""
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
