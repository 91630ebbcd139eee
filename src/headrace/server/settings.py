"""How a server is run: names, key, limits. Plain data, checked when it is made."""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from headrace.server.http.proxies import Proxies
from headrace.stats.confidence import TOKEN_SCORES, TokenScore

MIN_KEY = 8  # characters
NEVER = 1.01  # a threshold that no answer reaches


class SettingsError(ValueError):
    """A server that must not be started so; one line that says what to change."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client may ask for. Beyond it a request is refused with what to change."""

    body: int = 4 << 20  # bytes
    body_seconds: float = 30.0  # for a whole body to arrive
    header: int = 64 << 10  # bytes of a request's head
    header_seconds: float = 10.0  # for a whole head to arrive
    bodies: int = 256 << 20  # bytes of all bodies together that are arriving
    connections: int = 1024  # requests at once
    anonymous: int = 256  # connections of one address on which no request was admitted
    n: int = 16  # answers to one prompt
    prompts: int = 128  # prompts of one /v1/completions request
    choices: int = 128  # prompts times n
    inputs: int = 2048  # texts of one /v1/embeddings request
    file: int = 100 << 20  # bytes of an upload
    files: int = 10_000  # uploads that are kept
    stored: int = 2 << 30  # bytes of all of them together
    batch_lines: int = 50_000
    batches: int = 1_000  # that are kept; those that have ended and whose files are gone make room
    batch_bytes: int = 2 << 30  # of all of them together, requests and answers
    responses: int = 1_000  # that are kept; the oldest make room
    response_bytes: int = 1 << 30  # of all of them together
    deadline: float | None = None  # seconds until a request that names none is ended
    send_seconds: float = 60.0  # that a client may leave what was sent unread
    max_tokens: int | None = None  # None: what the context holds
    logprobs: int = 20
    priority: int = 0  # that a request may name at least; lower ones run before all others
    stop: int = 16
    stop_chars: int = 256


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where and as what a model is served. Raises SettingsError."""

    model_name: str
    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    keys: Path | None = None  # a file of several, with names
    tls_cert: str | None = None
    tls_key: str | None = None
    sampling_defaults: str = "model"  # or neutral: requests without settings get none of the model's own
    grace: float = 30.0  # seconds to finish what is in flight after SIGTERM
    state: Path | None = None  # the folder of files, batches and responses; None: they last as long as the server
    limits: Limits = field(default_factory=Limits)
    open_objects: bool = False  # for requests that do not set it
    proxies: Proxies = field(default_factory=Proxies)  # whose X-Forwarded-For and X-Forwarded-Proto are believed

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
        """Whether keys travel unencrypted to another machine; a trusted proxy is expected to encrypt them."""
        return self.tls_cert is None and not is_loopback(self.host) and not self.proxies.networks

    def address(self, port: int) -> str:
        """A URL of this server that can be opened on this machine."""
        host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{'https' if self.tls_cert else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def check_key(key: str, what: str) -> None:
    """Raises SettingsError for one that could be guessed or not be sent."""
    if len(key) < MIN_KEY or not key.isascii() or any(c.isspace() for c in key):
        raise SettingsError(f"{what} must have {MIN_KEY} or more ASCII characters and no spaces; make a longer one")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


@dataclass(frozen=True, slots=True)
class CascadeSettings:
    """Models that are asked one after the other, under a name of their own. Raises SettingsError.

    What `tiers[i]` says stands where its score is at least `thresholds[i]`; the last one's answer always does. `promise`: what
    is known of the thresholds, for who reads the server's log.
    """

    name: str
    tiers: tuple[str, ...]
    thresholds: tuple[float, ...]
    score: TokenScore = "min"
    promise: str = ""

    def __post_init__(self) -> None:
        who = f"the cascade {self.name!r}"
        if not self.name or len(self.tiers) < 2 or len(set(self.tiers)) < len(self.tiers) or self.name in self.tiers:
            raise SettingsError(f"{who} needs a name of its own and two or more different models as tiers")
        if self.score not in TOKEN_SCORES:
            raise SettingsError(f"{who}: the score is {', '.join(TOKEN_SCORES)}, not {self.score!r}")
        if len(self.thresholds) != len(self.tiers) - 1 or not all(0 <= one <= NEVER for one in self.thresholds):
            raise SettingsError(
                f"{who} needs a threshold from 0 to 1 for each tier but the last ({NEVER}: never sure enough), or calibration"
            )
