"""The file in memory in which the replicas of one model have its packed weights once."""

import os
from typing import Self


class SharedWeights:
    """An open memfd; the web process keeps it, so that a replica that starts again finds the weights.

    bits: digest of the model's files and settings. The first engine process packs the weights into the file and seals it
    (backends/native/shared.py).
    """

    def __init__(self, descriptor: int, bits: str) -> None:
        self.descriptor, self.bits = descriptor, bits

    @classmethod
    def make(cls, bits: str) -> Self | None:
        """Make an empty file. None without a digest, or if the system has no such files: each replica then has a copy."""
        if not bits or not hasattr(os, "memfd_create"):
            return None
        try:
            return cls(os.memfd_create("headrace-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), bits)
        except OSError:
            return None

    @property
    def bytes(self) -> int:
        """Bytes of memory that the file takes."""
        return 512 * os.fstat(self.descriptor).st_blocks

    def __del__(self) -> None:
        os.close(self.descriptor)
