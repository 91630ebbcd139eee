"""Addresses of links between hosts, and the file with their key."""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

LOOPBACK = "127.0.0.1"
WILDCARDS = ("", "*", "0.0.0.0", "::")
KEY_BYTES = 32  # least length of a key
MOST_KEY = 4096  # bytes of a key file


@dataclass(frozen=True, slots=True)
class Address:
    """Host name or address, and TCP port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, host: str = "") -> "Address":
        """Read "10.0.0.2:9100", "[fe80::1]:9100", or "9100" if `host` stands for a missing one. Raises ValueError."""
        name, colon, port = text.strip().rpartition(":")
        bracketed = name.startswith("[") and name.endswith("]")
        name = name[1:-1] if bracketed else name
        name = name if colon else host
        right = name and (bracketed or ":" not in name) and port.isascii() and port.isdigit()
        if not right or not 0 < int(port) < 1 << 16:
            raise ValueError(f"{text!r} is not an address; write HOST:PORT, such as 10.0.0.2:9100")
        return cls(name, int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listening_address(text: str) -> Address:
    """The address that a process listens on; a port alone is one of the loopback address. Raises ValueError."""
    name = text.strip().rpartition(":")[0].strip("[]")
    if ":" in text and name in WILDCARDS:
        raise ValueError(
            f"{text}: listens on every network of this machine; give the address of the private network, such as 10.0.0.2:9100"
        )
    return Address.parse(text, LOOPBACK)


def read_key(path: Path) -> bytes:
    """The key of a file that only its owner, this user, can read. Raises ValueError, one line with what to do."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ValueError(f"{path} is not a file; {_making(path)}")
            if state.st_uid != os.geteuid():
                raise ValueError(f"{path} belongs to another user (id {state.st_uid}); give a key file of your own")
            if state.st_mode & 0o077:
                raise ValueError(f"other users can read {path} (mode {state.st_mode & 0o777:o}); run chmod 600 {path}")
            key = file.read(MOST_KEY + 1).strip()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; {_making(path)}") from None
    if not KEY_BYTES <= len(key) <= MOST_KEY:
        raise ValueError(f"{path}: a key has {KEY_BYTES} to {MOST_KEY} bytes; {_making(path)}")
    return key


def _making(path: Path) -> str:
    return f"make a key: (umask 077; head -c 32 /dev/urandom | base64 > {path})"
