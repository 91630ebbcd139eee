"""Client addresses behind reverse proxies: X-Forwarded-For and X-Forwarded-Proto, from trusted proxies only."""

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Proxies:
    """Networks of the trusted proxies. Any client can send these headers, so those of other peers are ignored."""

    networks: tuple[Network, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Proxies":
        """Parse addresses or networks, separated by commas. Raises ValueError."""
        networks = []
        for one in filter(None, map(str.strip, text.split(","))):
            try:
                networks.append(ipaddress.ip_network(one))
            except ValueError:
                raise ValueError(
                    f"--trusted-proxy {one}: must be an IP address or a network, as in 127.0.0.1,10.0.0.0/8"
                ) from None
        return cls(tuple(networks))

    def trust(self, peer: str) -> bool:
        return bool(self.networks) and self._has(parse_address(peer))

    def client(self, peer: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the address of the client. Behind a trusted peer it is the rightmost address in X-Forwarded-For that is not a
        trusted proxy's: each proxy appends the address of its peer, so the client can choose all addresses further left."""
        if not self.trust(peer):
            return peer
        address = parse_address(peer)
        hops = b",".join(value for name, value in headers if name == b"x-forwarded-for").decode("latin-1").split(",")
        for hop in reversed(hops):
            hop_address = parse_address(hop)
            if hop_address is None:
                break
            address = hop_address
            if not self._has(hop_address):
                break
        return str(address)

    def scheme(self, peer: str, headers: dict[bytes, bytes], scheme: str) -> str:
        """Return the scheme of a request: a trusted peer's X-Forwarded-Proto, otherwise `scheme`."""
        if not self.trust(peer):
            return scheme
        given = headers.get(b"x-forwarded-proto", b"").rpartition(b",")[2].strip().lower()
        return given.decode() if given in (b"http", b"https") else scheme

    def _has(self, address: Address | None) -> bool:
        return address is not None and any(address in network for network in self.networks)


def parse_address(text: str) -> Address | None:
    """Parse an IP address, also with a port ("10.0.0.1:80", "[::1]:80"). IPv4 inside IPv6 becomes IPv4. None if invalid."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def client_group(address: str) -> str:
    """Return the group in which limits count an address: the /64 network of an IPv6 address, as one client has all of it."""
    parsed = parse_address(address) if ":" in address else None
    return f"{int(parsed) >> 64:x}/64" if isinstance(parsed, ipaddress.IPv6Address) else address
