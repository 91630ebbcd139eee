"""The number of threads of torch, which belongs to the caller of the engine."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def keep_torch_threads() -> Iterator[None]:
    """Restore the number of torch's threads at the end, if torch was imported before.

    A step gives torch one thread, or those of the torch back end: threads of torch that wait for work would take the cores
    of the native core's threads.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
