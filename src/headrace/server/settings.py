"""Settings of a server and of its cascades: plain data, checked when it is created."""

import enum
import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.data.settings import Limits
from headrace.server.http.proxies import Proxies
from headrace.stats.confidence import TOKEN_SCORES, TokenScore

MIN_KEY = 8  # characters
NEVER = 1.01  # a threshold above every score


class Mode(enum.StrEnum):
    """When a model of a server is in memory."""

    PINNED = "pinned"  # from the start, and it makes room for no other
    ON_DEMAND = "on demand"  # loaded for its first request, unloaded to make room
    OFF = "off"  # not served


class SettingsError(ValueError):
    """Settings with which a server must not start; one line with what to change."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Address, keys and defaults of one server. Raises SettingsError."""

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    keys: Path | None = None  # file of several keys with names
    tls_cert: str | None = None
    tls_key: str | None = None
    sampling_defaults: str = "model"  # or "neutral": requests without settings get none of the model's own
    grace: float = 30.0  # seconds to finish open requests after SIGTERM
    state: Path | None = None  # folder of files, batches and responses; None: they end with the server
    limits: Limits = field(default_factory=Limits)
    open_objects: bool = False  # for requests that do not set it
    adapters_from: Path | None = None  # folder whose adapters operators may load while the server runs
    proxies: Proxies = field(default_factory=Proxies)  # trusted for X-Forwarded-For and X-Forwarded-Proto

    def __post_init__(self) -> None:
        if self.key is not None:
            check_key(self.key, "the API key")
        if self.key is not None and self.keys is not None:
            raise SettingsError("--keys holds all keys; leave --api-key-file and HEADRACE_API_KEY out")
        if self.key is None and self.keys is None and not is_loopback(self.host):
            raise SettingsError(
                f"--host {self.host} can be reached from other machines, so a key is needed: "
                "set HEADRACE_API_KEY or give --api-key-file or --keys"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise SettingsError("TLS needs both --tls-cert and --tls-key")
        if self.limits.bodies < self.limits.body:
            raise SettingsError(
                f"--limit-bodies {self.limits.bodies} is less than --limit-body {self.limits.body}, so a body of that size "
                "would never arrive; raise it"
            )

    @property
    def unencrypted(self) -> bool:
        """Whether keys travel unencrypted to other machines. A trusted proxy is expected to encrypt them."""
        return self.tls_cert is None and not is_loopback(self.host) and not self.proxies.networks

    def address(self, port: int) -> str:
        """URL of this server for a browser on this machine."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{'https' if self.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def check_key(key: str, what: str) -> None:
    """Raises SettingsError for a key that could be guessed, or that no header can hold. `what` names the key."""
    if len(key) < MIN_KEY or not key.isascii() or any(c.isspace() for c in key):
        raise SettingsError(f"{what} must have {MIN_KEY} or more ASCII characters and no spaces; make a longer one")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the address or host name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(frozen=True, slots=True)
class CascadeSettings:
    """A cascade: models that answer one after the other until one is confident, under a name of its own. Raises SettingsError.

    The answer of `tiers[i]` is returned if its score is at least `thresholds[i]`; that of the last tier always is. `promise`:
    what the calibration guarantees, for the log.
    """

    name: str
    tiers: tuple[str, ...]
    thresholds: tuple[float, ...]
    score: TokenScore = "min"
    promise: str = ""

    def __post_init__(self) -> None:
        who = f"the cascade {self.name!r}"
        if not self.name or len(self.tiers) < 2 or len(set(self.tiers)) < len(self.tiers) or self.name in self.tiers:
            raise SettingsError(f"{who} needs a unique name and two or more different models as tiers")
        if self.score not in TOKEN_SCORES:
            raise SettingsError(f"{who}: the score is {', '.join(TOKEN_SCORES)}, not {self.score!r}")
        if len(self.thresholds) != len(self.tiers) - 1 or not all(0 <= one <= NEVER for one in self.thresholds):
            raise SettingsError(
                f"{who} needs a threshold from 0 to 1 for each tier but the last ({NEVER}: never sure enough), or calibration"
            )
