"""The threads of the process, which the native core's engines share."""

from functools import cache
from typing import Any

from headrace.native import core, processors

SPIN_MICROSECONDS = 1000  # workers stay awake while Python works between two steps


def thread_pool(threads: int) -> Any:
    """A pool of so many threads (0: one for each core the process may use), the same for all that ask for as many; engines
    take turns on it. Raises _core.ThreadsError, a RuntimeError, where the system does not start them all: fewer may do."""
    return _pool(threads or processors())


@cache
def _pool(threads: int) -> Any:
    pool = core().ThreadPool(threads)
    pool.set_spin(SPIN_MICROSECONDS)
    return pool
