"""API keys: one key, or a file of several keys and their owners, which is read again when it changes."""

import asyncio
import hashlib
import hmac
import logging
import os
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import msgspec

from headrace.server.access.principals import Principal, QuotaMeter
from headrace.server.settings import ServerSettings, SettingsError, check_key

log = logging.getLogger("headrace.server")

LARGEST = 1 << 20  # bytes of a key file
MOST = 1000  # principals; each is a label of metrics
LOOK = 1.0  # seconds between two checks of the key file
NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
HASH = re.compile(r"[0-9a-f]{64}")

Count = Annotated[int, msgspec.Meta(ge=1, le=2**53)]


class KeyFileEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One principal in a key file."""

    key: str | list[str] = []
    sha256: str | list[str] = []  # hashes, in place of keys
    salt: str | None = None  # principals with the same salt share cached prefixes; "": with all that have none
    operator: bool = False
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    requests: Count | None = None
    tokens: Count | None = None
    bytes: Count | None = None
    window: Annotated[float, msgspec.Meta(gt=0, le=31 * 86400)] = 60.0
    models: list[str] = []  # names of the models that the key may use; none: all


class KeyRing:
    """Principals by the SHA-256 of their keys; the keys themselves are not kept. Raises SettingsError."""

    def __init__(self, settings: ServerSettings) -> None:
        self._path = settings.keys
        self._seen: tuple[int, ...] = ()
        self._owners: list[tuple[bytes, Principal]] = []
        self._names: dict[str, Principal] = {}
        if self._path is not None:
            self._seen = _stamp(self._path)
            self._replace(read_key_file(self._path))
        else:
            one = Principal()
            self._names = {one.name: one}
            self._owners = [(_hash(settings.key), one)] if settings.key is not None else []

    @property
    def needed(self) -> bool:
        """Whether requests need a key."""
        return bool(self._owners)

    @property
    def several(self) -> bool:
        return self._path is not None

    def of(self, given: str | bytes) -> Principal | None:
        """Return the owner of a key. The key is compared with all known ones, each in constant time."""
        digest, owner = _hash(given), None
        for known, principal in self._owners:
            if hmac.compare_digest(digest, known):
                owner = principal
        return owner

    def named(self, name: str) -> Principal | None:
        """Return the principal of this name; None if the key file has none."""
        return self._names.get(name)

    def unknown_models(self, names: Collection[str]) -> list[str]:
        """Return the models of the key file that are not in `names`."""
        return sorted({model for one in self._names.values() for model in one.models} - set(names))

    async def watch(self) -> None:
        """Read the key file again whenever it changes, until cancelled. The old keys stay valid while the file is invalid."""
        while self._path is not None:
            await asyncio.sleep(LOOK)
            await asyncio.to_thread(self._reload, self._path)

    def _reload(self, path: Path) -> None:
        try:
            stamp = _stamp(path)
            if stamp == self._seen:
                return
            self._seen = stamp
            self._replace(read_key_file(path))
            log.warning("%s has changed: its %d names have their keys from now on", path, len(self._names))
        except SettingsError as error:
            log.error("%s; the keys that were read before stay", error)

    def _replace(self, owners: list[tuple[bytes, Principal]]) -> None:
        names = {principal.name: principal for _, principal in owners}
        for name, principal in names.items():
            before = self._names[name].meters if name in self._names else {}
            for unit, meter in principal.meters.items():
                if unit in before:
                    meter.take_over(before[unit])
        self._owners, self._names = owners, names


def read_key_file(path: Path) -> list[tuple[bytes, Principal]]:
    """Return hash and owner of each key in a file. Raises SettingsError, whose message repeats only names from the file."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & (stat.S_IROTH | stat.S_IWOTH):
                raise SettingsError(f"{path} is accessible to all users of this machine; run chmod o-rw {path}")
            data = file.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise SettingsError(f"{path} has more than {LARGEST} bytes; it holds keys and nothing else")
        entries = {name: _entry(name, value) for name, value in tomllib.loads(data.decode()).items()}
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not UTF-8 text") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise SettingsError(f"{path}: {error}") from None
    if not 0 < len(entries) <= MOST:
        raise SettingsError(f"{path} names {len(entries)}; it may name 1 to {MOST}, each in a table of its own")
    salts = Counter(entry.salt for entry in entries.values())
    try:
        owners = [
            (digest, principal)
            for name, entry in entries.items()
            for principal in [_principal(name, entry, salts, alone=len(entries) == 1)]
            for digest in _digests(name, entry)
        ]
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from None
    if len({digest for digest, _ in owners}) < len(owners):
        raise SettingsError(f"{path}: one key is there twice; give each name its own")
    return owners


def _entry(name: str, value: Any) -> KeyFileEntry:
    if not NAME.fullmatch(name):
        raise msgspec.ValidationError(
            f"the name {name[:64]!r} has other characters than letters, digits and . _ @ -, or over 64"
        )
    try:
        return msgspec.convert(value, KeyFileEntry)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"{name}: {error}") from None


def _principal(name: str, entry: KeyFileEntry, salts: Counter[str | None], *, alone: bool) -> Principal:
    given = {"requests": entry.requests, "tokens": entry.tokens, "bytes": entry.bytes}
    return Principal(
        name,
        b"" if entry.salt == "" else _hash(f"name {name}" if entry.salt is None else f"salt {entry.salt}"),
        private=not entry.salt or salts[entry.salt] == 1,
        alone=alone,
        operator=entry.operator,
        priority=entry.priority,
        models=frozenset(entry.models),
        meters={unit: QuotaMeter(most, entry.window) for unit, most in given.items() if most is not None},
    )


def _digests(name: str, entry: KeyFileEntry) -> list[bytes]:
    keys = [entry.key] if isinstance(entry.key, str) else entry.key
    hashes = [entry.sha256] if isinstance(entry.sha256, str) else entry.sha256
    if not keys and not hashes:
        raise SettingsError(f"{name} has no key; give one")
    for key in keys:
        check_key(key, f"the key of {name}")
    if not all(HASH.fullmatch(one) for one in hashes):
        raise SettingsError(f"the sha256 of {name} must be 64 hexadecimal digits in lower case")
    return [*map(_hash, keys), *map(bytes.fromhex, hashes)]


def _hash(text: str | bytes) -> bytes:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).digest()


def _stamp(path: Path) -> tuple[int, ...]:
    """Return values that change when a file does. Raises SettingsError."""
    try:
        status = path.stat()
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from None
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
