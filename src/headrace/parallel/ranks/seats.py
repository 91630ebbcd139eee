"""Which processors each rank of a host runs on."""

import os
from collections.abc import Sequence


def allowed_processors() -> list[int]:
    """The processors that this process may run on; all of the machine where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


def seats(world: int, threads: int, processors: Sequence[int]) -> list[list[int]]:
    """The processors of each rank: neighbours, one for each thread. Empty lists if there are fewer processors than threads."""
    if world * threads > len(processors):
        return [[] for _ in range(world)]
    return [list(processors[rank * threads : (rank + 1) * threads]) for rank in range(world)]
