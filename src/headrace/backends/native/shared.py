"""Packed weights in memory that the replicas of one model share: one process packs them, the others map them read-only.

The file is a memfd that the web process made. A process that has packed all weights seals it, so its seals say whether it is
complete. Pages are small ones: the system gives no large pages to such files by default.
"""

import os
from typing import Self

from headrace import host


class SharedFile:
    """The file of shared weights while one process loads them. Use it as a context manager.

    Only one process fills the file: others wait until it is sealed, or until that process has ended.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.filled = False  # sealed by another process

    def __enter__(self) -> Self:
        host.wait_for_lock(self.descriptor)
        self.filled = host.sealed(self.descriptor)
        if not self.filled:
            os.ftruncate(self.descriptor, 0)  # a process that ended early may have left a part
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None and not self.filled:
            host.seal(self.descriptor)
        host.unlock(self.descriptor)
