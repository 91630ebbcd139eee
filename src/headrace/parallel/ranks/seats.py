"""Which processors each rank of a host runs on, and with how many threads."""

import logging
from collections.abc import Sequence

from headrace import core, host
from headrace.data.settings import ModelSettings

log = logging.getLogger("headrace")


def seats(world: int, threads: int, processors: Sequence[int]) -> list[list[int]]:
    """The processors of each rank: neighbours, one for each thread. Empty lists if there are fewer processors than threads."""
    if world * threads > len(processors):
        return [[] for _ in range(world)]
    return [list(processors[rank * threads : (rank + 1) * threads]) for rank in range(world)]


def threads_of_process(settings: ModelSettings) -> int:
    """Threads of each rank and stage; 0, one for each core, for a model in one process."""
    processes = max(1, settings.tp * settings.pp)
    if settings.threads is not None or processes == 1:
        return settings.threads or 0
    return max(1, core.processors() // processes)


def warn_if_crowded(settings: ModelSettings) -> None:
    """Log a warning if the ranks and stages of a model have more threads than the host has cores."""
    processes, threads, cores = settings.tp * settings.pp, threads_of_process(settings), host.cores()
    if processes > 1 and processes * threads > cores:
        text = "%d processes of %d threads share %d cores and wait for each other; one process is faster"
        log.warning(text, processes, threads, cores)
