"""Which processors each rank of a host runs on."""

from collections.abc import Sequence


def seats(world: int, threads: int, processors: Sequence[int]) -> list[list[int]]:
    """The processors of each rank: neighbours, one for each thread. Empty lists if there are fewer processors than threads."""
    if world * threads > len(processors):
        return [[] for _ in range(world)]
    return [list(processors[rank * threads : (rank + 1) * threads]) for rank in range(world)]
