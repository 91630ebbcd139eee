"""Thread pools of the process, which the native core's engines share."""

import os
from functools import cache
from typing import Any

from headrace import core

SPIN_MICROSECONDS = 1000  # idle workers stay awake while Python works between two steps
QUOTA_SPIN_MICROSECONDS = 50  # under a CPU quota, time that a worker spins is missing for its work


def thread_pool(threads: int) -> Any:
    """Return the process's pool of `threads` threads; 0: one for each core that the process may use. Engines take turns on it.

    Raises _core.ThreadsError (a RuntimeError) if the system does not start them all; fewer threads may work.
    """
    return _pool(threads or core.processors())


@cache
def _pool(threads: int) -> Any:
    pool = core.module().ThreadPool(threads)
    pool.set_spin(spin_microseconds(core.module().cpu_info()["quota"]))
    return pool


def spin_microseconds(quota: float) -> int:
    """Time that an idle worker spins for the next step. `quota`: CPUs that the control group grants; 0: no limit."""
    return QUOTA_SPIN_MICROSECONDS if quota else SPIN_MICROSECONDS


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has no workers; a model that it loads gets a new pool
