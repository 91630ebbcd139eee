"""Memory read bandwidth of the machine at this moment, the ceiling of decoding at batch 1."""

import ctypes
import threading
import time
from statistics import median

# Bytes; several times larger than any cache.
SIZE = 256 << 20


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
