"""Addresses of clients behind reverse proxies: only trusted proxies are believed."""

import asyncio
from typing import Any

import pytest

from headrace.confined.pool import CLIENT
from headrace.server.access.keys import KeyRing
from headrace.server.http.guard import Guard
from headrace.server.http.proxies import Proxies
from headrace.server.settings import ServerSettings

PROXIES = Proxies.parse("10.0.0.1, 192.168.0.0/16,fd00::/8")


def client(peer: str, *forwarded: str, proxies: Proxies = PROXIES) -> str:
    return proxies.client(peer, [(b"x-forwarded-for", one.encode("latin-1")) for one in forwarded])


@pytest.mark.parametrize("peer", ["10.0.0.2", "127.0.0.1", "fe80::1", "", "not an address"])
def test_other_peers_cannot_choose_their_address(peer: str) -> None:
    assert client(peer, "1.1.1.1") == peer
    assert client("10.0.0.1", "1.1.1.1", proxies=Proxies()) == "10.0.0.1"


@pytest.mark.parametrize(
    ("forwarded", "found"),
    [
        (["1.1.1.1"], "1.1.1.1"),
        (["6.6.6.6, 1.1.1.1"], "1.1.1.1"),  # the client sent the first one
        (["6.6.6.6", "1.1.1.1"], "1.1.1.1"),
        (["6.6.6.6, 1.1.1.1, 192.168.3.4"], "1.1.1.1"),  # two proxies
        (["10.0.0.1, 192.168.3.4"], "10.0.0.1"),  # a client that is a proxy
        (["1.1.1.1:4711"], "1.1.1.1"),
        (["[2001:db8::1]:4711"], "2001:db8::1"),
        (["::ffff:1.1.1.1"], "1.1.1.1"),
        (["1.1.1.1, unknown"], "10.0.0.1"),  # left of what no address is, nothing is believed
        (["1.1.1.1, \xff, 192.168.3.4"], "192.168.3.4"),
        ([""], "10.0.0.1"),
        ([], "10.0.0.1"),
    ],
)
def test_a_trusted_proxy_names_the_client(forwarded: list[str], found: str) -> None:
    assert client("10.0.0.1", *forwarded) == found


@pytest.mark.parametrize(
    ("peer", "given", "scheme"),
    [
        ("10.0.0.1", b"https", "https"),
        ("10.0.0.1", b"http, https", "https"),
        ("10.0.0.1", b"gopher", "http"),
        ("10.0.0.1", b"", "http"),
        ("10.0.0.2", b"https", "http"),
    ],
)
def test_a_trusted_proxy_names_the_scheme(peer: str, given: bytes, scheme: str) -> None:
    assert PROXIES.scheme(peer, {b"x-forwarded-proto": given}, "http") == scheme


@pytest.mark.parametrize("text", ["localhost", "10.0.0.1/8", "10.0.0.0/33", "10.0.0.1 10.0.0.2", "*"])
def test_an_invalid_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--trusted-proxy .*must be an IP address or a network"):
        Proxies.parse(text)


def test_the_guard_identifies_clients_by_their_address() -> None:
    """What the turns in confined processes, and the bound on bodies, go by."""
    settings = ServerSettings("tiny", key="a-long-enough-key", proxies=PROXIES)
    seen: list[tuple[str, str]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((CLIENT.get(), scope["scheme"]))

    async def send_request(peer: str) -> None:
        headers = [(b"authorization", b"Bearer a-long-enough-key"), (b"x-forwarded-for", b"1.1.1.1")]
        headers.append((b"x-forwarded-proto", b"https"))
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/v1/models",
            "headers": headers,
            "client": (peer, 1),
            "scheme": "http",
        }
        guard = Guard(app, settings, KeyRing(settings), lambda status, principal: None)
        await guard(scope, asyncio.Event().wait, asyncio.Event().wait)  # type: ignore[arg-type]

    asyncio.run(send_request("10.0.0.1"))
    asyncio.run(send_request("10.0.0.2"))
    assert seen == [("1.1.1.1", "https"), ("10.0.0.2", "http")]
