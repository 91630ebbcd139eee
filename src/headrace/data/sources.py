"""Sources of encoder-decoders: what the encoder reads next to the decoder's prompt."""

from functools import cached_property
from hashlib import sha256
from struct import pack

import msgspec


class Tokens(msgspec.Struct, frozen=True, tag=True, dict=True):
    """A source text as token ids."""

    ids: tuple[int, ...]

    @property
    def positions(self) -> int:
        """Rows that the encoder computes, and whose K/V the decoder reads."""
        return len(self.ids)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the ids, 32 bytes: sources with equal digests share their K/V."""
        return sha256(pack(f"<{len(self.ids)}i", *self.ids)).digest()


class Frames(msgspec.Struct, frozen=True, tag=True, dict=True):
    """A window of sound as log-mel rows, float32 [2 * positions, bins], little-endian."""

    bins: int
    rows: bytes

    @property
    def positions(self) -> int:
        """Rows that the encoder computes: the second convolution halves their number."""
        return len(self.rows) // (8 * self.bins)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of kind, width and rows, 32 bytes."""
        return sha256(b"frames" + self.bins.to_bytes(4, "little") + self.rows).digest()


Source = Tokens | Frames
