"""Segments of the prefix cache in files: `SEGMENT_BLOCKS` blocks of one hash chain in each, in a folder of limited size.

Layout of the folder, all of it private to its user (0700, 0600):

    DIR/BITS/HASH.GROUPS.kv

- BITS is the digest of everything that decides the bits of K/V (`startup.kv_store`), so no server reads what another model or
  version wrote.
- HASH is the chain hash of the segment's last block. It covers all tokens before it, and the tenant.
- GROUPS is the bit mask of the KV groups in the file, in hexadecimal.

A file is a header (magic, hash, groups, bytes of the data, CRC-32 of each piece and of the header) and the pieces: for each
pool one block after the other.

Several processes may use one folder: files are written under another name and renamed, and a file may disappear at any time.
"""

import errno
import logging
import os
import re
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

log = logging.getLogger("headrace")

SEGMENT_BLOCKS = 16
MAGIC = b"HEADRKV1"
HEADER = struct.Struct("<8s32sQQ")  # magic, hash, groups, bytes of the data
_FOLDER = re.compile(r"[0-9a-f]{32}")
_FILE = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{1,8})\.kv")
_PARTIAL = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{1,8}\.\d+\.tmp")
ABANDONED_SECONDS = 3600  # age of a partial file whose writer has ended
REFRESH_SECONDS = 30.0  # at least, until the folder is listed again for segments of other processes
PAUSE_SECONDS = 60.0  # after a failed write, until the next one

BlockSizes = Callable[[int], Sequence[int]]  # bit mask of KV groups -> bytes of one block in each pool of these groups


class StoreFolderError(ValueError):
    """A folder that cannot be a K/V store: one line with what to do."""


class DamagedSegmentError(Exception):
    """A file that is not the segment that it should be."""


@dataclass(slots=True)
class SegmentCounts:
    """Counts since the folder was opened, and its contents. bytes_read, bytes_written: of segments."""

    loaded: int = 0
    saved: int = 0
    evicted: int = 0
    damaged: int = 0  # also unreadable ones
    bytes_read: int = 0
    bytes_written: int = 0
    segments: int = 0  # that this process can load
    bytes: int = 0  # of all segments in the folder


@dataclass(slots=True)
class SegmentFolder:
    """The segments under `root`/`bits` that this process has seen, and the size limit of all under `root`.

    `groups_of` may be called by the engine's thread at any time; it looks into an index in memory. The other methods touch the
    disk and belong to the store's threads.
    """

    root: Path
    bits: str
    sizes: BlockSizes
    limit: int  # bytes
    counts: SegmentCounts = field(default_factory=SegmentCounts)
    _index: dict[bytes, int] = field(default_factory=dict)  # hash -> KV groups
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _indexed: float = 0.0  # time of the last `refresh`
    _resume: float = 0.0  # time of the next attempt after a failed write

    @classmethod
    def open(cls, root: Path, bits: str, sizes: BlockSizes, limit: int) -> "SegmentFolder":
        """Create or check the folder and index its segments. Raises StoreFolderError."""
        folder = cls(private_folder(root), bits, sizes, limit)
        private_folder(root / bits)
        folder.refresh()
        return folder

    def groups_of(self, key: bytes) -> int:
        """KV groups of the segment with this hash; 0 if there is none."""
        return self._index.get(key, 0)

    def read(self, key: bytes) -> tuple[int, np.ndarray] | None:
        """The KV groups and the checked data of a segment. None if it cannot be used: its file is deleted then."""
        groups = self.groups_of(key)
        path = self._path(key, groups)
        try:
            data = self._read(path, key, groups)
        except FileNotFoundError:
            self._forget(key)  # evicted by another process
            return None
        except (OSError, DamagedSegmentError) as error:
            log.warning("kv store: %s: %s; it is deleted and computed again", path, error)
            self.counts.damaged += 1
            self._forget(key)
            _remove(path)
            return None
        self.counts.loaded += 1
        self.counts.bytes_read += data.nbytes
        return groups, data

    def _read(self, path: Path, key: bytes, groups: int) -> np.ndarray:
        sizes = self.sizes(groups)
        head, size = header_size(sizes), SEGMENT_BLOCKS * sum(sizes)
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb", buffering=0) as file:
            if (actual := os.fstat(file.fileno()).st_size) != head + size:
                raise DamagedSegmentError(f"has {actual:,} bytes instead of {head + size:,}")
            header = file.read(head)
            data, at = np.empty(size, np.uint8), 0
            while at < size:
                count = file.readinto(data[at:].data)
                if not count:
                    raise DamagedSegmentError(f"ends at byte {head + at:,}")
                at += count
        check_segment(header, data, key, groups, sizes)
        return data

    def write(self, key: bytes, groups: int, data: np.ndarray) -> bool:
        """Save a segment, and delete the least recently used ones beyond the limit. Returns False if it could not be written;
        then nothing is written for a while."""
        if time.monotonic() < self._resume:
            return False
        path, sizes = self._path(key, groups), self.sizes(groups)
        partial = path.with_suffix(f".{os.getpid()}.tmp")
        header = segment_header(key, groups, data, sizes)
        self._evict(len(header) + data.nbytes)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(partial, flags, 0o600), "wb", buffering=0) as file:
                _write_all(file.fileno(), header)
                _write_all(file.fileno(), data.data)
            os.rename(partial, path)
        except OSError as error:
            _remove(partial)
            log.warning("kv store: cannot write %s: %s; next attempt in %d s", path.parent, error.strerror, PAUSE_SECONDS)
            self._resume = time.monotonic() + PAUSE_SECONDS
            return False
        with self._lock:
            before = self._index.get(key, 0)
            self._index[key] = groups
            self.counts.segments = len(self._index)
        if before not in (0, groups):
            _remove(self._path(key, before))
        self.counts.saved += 1
        self.counts.bytes_written += data.nbytes
        self.counts.bytes += len(header) + data.nbytes
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        """Record that a chain's segments (in order) were used. Its first one is the last to be evicted, as no other can be
        used without it."""
        now = time.time_ns()
        for back, key in enumerate(keys):
            try:
                os.utime(self._path(key, self.groups_of(key)), ns=(now, now - back * 1000))
            except OSError:
                self._forget(key)
        if time.monotonic() - self._indexed > REFRESH_SECONDS:
            self.refresh()

    def refresh(self) -> None:
        """Index the segments on disk anew, those of other processes included, and delete abandoned partial files."""
        index = {}
        self._indexed = time.monotonic()
        try:
            for entry in os.scandir(self.root / self.bits):
                if match := _FILE.fullmatch(entry.name):
                    index[bytes.fromhex(match[1])] = int(match[2], 16)
                elif _PARTIAL.fullmatch(entry.name) and time.time() - entry.stat().st_mtime > ABANDONED_SECONDS:
                    _remove(Path(entry.path))
        except OSError as error:
            log.warning("kv store: cannot list %s: %s", self.root / self.bits, error.strerror)
        with self._lock:
            self._index = index
            self.counts.segments = len(index)
        self.counts.bytes = sum(size for _, size, _ in segment_files(self.root))

    def _evict(self, room: int) -> None:
        """Delete the least recently used segments under `root` until `room` bytes fit below the limit."""
        if self.counts.bytes + room <= self.limit:
            return
        files = sorted(segment_files(self.root))
        total = sum(size for _, size, _ in files)
        # A tenth more than needed, so that not every write lists the folder.
        goal = self.limit - room if total + room <= self.limit else self.limit - room - self.limit // 10
        for _, size, path in files:
            if total <= goal:
                break
            if _remove(path):
                self.counts.evicted += 1
            total -= size
            if path.parent.name == self.bits:
                self._forget(bytes.fromhex(path.name[:64]))
        self.counts.bytes = total

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._index.pop(key, None)
            self.counts.segments = len(self._index)

    def _path(self, key: bytes, groups: int) -> Path:
        return self.root / self.bits / f"{key.hex()}.{groups:x}.kv"


def checksum(piece: np.ndarray) -> int:
    """CRC-32 of a piece of a segment."""
    return zlib.crc32(piece.data)


def header_size(sizes: Sequence[int]) -> int:
    """Bytes of a segment's header. sizes: bytes of one block in each pool."""
    return HEADER.size + 4 * (SEGMENT_BLOCKS * len(sizes) + 1)


def segment_header(key: bytes, groups: int, data: np.ndarray, sizes: Sequence[int]) -> bytes:
    """The header of a segment with this data. sizes: bytes of one block in each pool."""
    return _header(key, groups, data.nbytes, [checksum(piece) for piece in _pieces(data, sizes)])


def check_segment(header: bytes, data: np.ndarray, key: bytes, groups: int, sizes: Sequence[int]) -> None:
    """Raise DamagedSegmentError unless header and data are those of the segment with this hash and these KV groups."""
    size = SEGMENT_BLOCKS * sum(sizes)
    if len(header) != header_size(sizes) or data.nbytes != size:
        raise DamagedSegmentError(f"has {len(header) + data.nbytes:,} bytes instead of {header_size(sizes) + size:,}")
    sums = struct.unpack(f"<{SEGMENT_BLOCKS * len(sizes)}I", header[HEADER.size : -4])
    if header != _header(key, groups, size, sums):
        raise DamagedSegmentError("the header is damaged")
    for number, (piece, expected) in enumerate(zip(_pieces(data, sizes), sums, strict=True)):
        if checksum(piece) != expected:
            raise DamagedSegmentError(f"the checksum of block {number % SEGMENT_BLOCKS} differs")


def _header(key: bytes, groups: int, size: int, sums: Sequence[int]) -> bytes:
    front = HEADER.pack(MAGIC, key, groups, size) + struct.pack(f"<{len(sums)}I", *sums)
    return front + struct.pack("<I", zlib.crc32(front))


def private_folder(path: Path) -> Path:
    """Create a folder that only this user can open, or check that it is one. Raises StoreFolderError."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = path.stat()
    except FileExistsError:
        raise StoreFolderError(f"kv_store: {path} is a file; name a folder") from None
    except OSError as error:
        raise StoreFolderError(f"kv_store: cannot create {path}: {error.strerror}") from None
    if state.st_uid != os.geteuid():
        raise StoreFolderError(f"kv_store: {path} belongs to another user (id {state.st_uid}); name a folder of your own")
    if state.st_mode & 0o077:
        raise StoreFolderError(f"kv_store: other users can open {path} (mode {state.st_mode & 0o777:o}); run chmod 700 {path}")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise StoreFolderError(f"kv_store: {path} cannot be written; name another folder")
    return path


def segment_files(root: Path) -> Iterator[tuple[int, int, Path]]:
    """Time of last use (nanoseconds), bytes and path of every segment in a store, of all models. Files that disappear meanwhile
    are left out."""
    for folder in _model_folders(root):
        try:
            entries = list(os.scandir(folder))
        except OSError:
            continue
        for entry in entries:
            if _FILE.fullmatch(entry.name):
                try:
                    state = entry.stat(follow_symlinks=False)
                except OSError:
                    continue
                yield state.st_mtime_ns, state.st_size, Path(entry.path)


def empty(root: Path) -> tuple[int, int]:
    """Delete all segments of a store, and its folders if nothing else is in them. Returns the number of segments and their
    bytes. Raises StoreFolderError if `root` is not a folder or a file cannot be deleted."""
    if not root.is_dir():
        raise StoreFolderError(f"kv_store: {root} is not a folder")
    count = total = 0
    try:
        for _, size, path in list(segment_files(root)):
            path.unlink(missing_ok=True)
            count, total = count + 1, total + size
        for folder in _model_folders(root):
            for entry in list(os.scandir(folder)):
                if _PARTIAL.fullmatch(entry.name):
                    _remove(Path(entry.path))
            _remove_folder(folder)
        _remove_folder(root)
    except OSError as error:
        raise StoreFolderError(f"kv_store: cannot delete {error.filename}: {error.strerror}") from None
    return count, total


def _model_folders(root: Path) -> list[Path]:
    try:
        return [
            Path(entry.path)
            for entry in os.scandir(root)
            if _FOLDER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    except OSError:
        return []


def _pieces(data: np.ndarray, sizes: Sequence[int]) -> Iterator[np.ndarray]:
    """The data of each block in each pool."""
    at = 0
    for size in sizes:
        for _ in range(SEGMENT_BLOCKS):
            yield data[at : at + size]
            at += size


def _write_all(file: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        if not (count := os.write(file, view)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[count:]


def _remove(path: Path) -> bool:
    try:
        path.unlink()
    except OSError:
        return False
    return True


def _remove_folder(path: Path) -> None:
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY):
            raise
