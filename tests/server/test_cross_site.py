"""Requests from other sites' pages: a server without a key refuses them, and no server reads a form as JSON."""

import asyncio
from typing import Any

import pytest

from headrace.server.settings import ServerSettings
from tests.server.harness import Running
from tests.server.test_guard import call

FORM = "application/x-www-form-urlencoded"
KEY = "a-long-enough-key"
EVIL = {"origin": "https://evil.example"}
OTHER_SITES: list[dict[str, str]] = [
    EVIL,
    {"origin": "null"},
    {"origin": "http://localhost:3000"},
    {"origin": "http://localhost.evil.example"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"},
    {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
    {"sec-fetch-site": "cross-site"},
]
OWN_PAGE: list[dict[str, str]] = [
    {},
    {"origin": "http://localhost", "sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"},
    {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
    {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"},  # a link
]
BROWSER = [
    {"origin": "http://localhost"},
    {"sec-fetch-site": "same-origin"},
    {"referer": "http://localhost/"},
    {"user-agent": "Mozilla/5.0 (X11; Linux x86_64; rv:60.0) Gecko/20100101 Firefox/60.0"},
]


def status(method: str = "GET", headers: dict[str, str] | None = None, **more: Any) -> int:
    return asyncio.run(call(method, headers, **more))[0]


@pytest.mark.parametrize("headers", OTHER_SITES)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/", "/v1/chat/completions", "/v1/batches/x/cancel"])
def test_without_a_key_other_sites_are_refused(headers: dict[str, str], path: str) -> None:
    for method in ("GET", "POST", "OPTIONS"):
        assert status(method, headers, path=path) == 403


@pytest.mark.parametrize("headers", OWN_PAGE)
def test_the_own_page_and_links_to_it_are_served(headers: dict[str, str]) -> None:
    assert status("GET", headers, path="/") == status("GET", headers) == 200


def test_with_a_key_the_key_decides() -> None:
    """A page of another site does not have the key, and a proxy in front of the server may change the Host."""
    settings = ServerSettings("tiny", key=KEY)
    assert status("POST", EVIL, settings=settings) == 401
    assert status("POST", EVIL | {"authorization": f"Bearer {KEY}"}, settings=settings) == 200


@pytest.mark.parametrize("key", [None, KEY])
def test_websockets_are_refused(key: str | None) -> None:
    settings = ServerSettings("tiny", key=key)
    upgrade = {"connection": "Upgrade", "upgrade": "WebSocket", "authorization": f"Bearer {KEY}"}
    code, body = asyncio.run(call("GET", upgrade, settings, "/v1/realtime"))
    assert (code, "no_websockets" in body) == (400, True)
    assert status("GET", upgrade | {"upgrade": "h2c"}, settings=settings) == 200  # which clients offer and do without


@pytest.mark.parametrize("size", [{"content-length": "2"}, {"transfer-encoding": "chunked"}])
@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/xml", FORM, ""])
def test_a_body_that_is_not_json_by_name_is_refused(kind: str, size: dict[str, str]) -> None:
    """From browsers each, and from all clients those that are neither a form nor nameless."""
    for browser in BROWSER:
        assert status("POST", {"content-type": kind, **size, **browser}) == 415
    assert status("POST", {"content-type": kind, **size}) == (200 if kind in (FORM, "") else 415)


def test_curl_needs_no_header(server: Running) -> None:
    """`curl -d` names its body a form. The form itself is no request."""
    data = b'{"model": "tiny", "prompt": "a", "max_tokens": 1}'
    for headers in ({"Content-Type": FORM}, {}):
        answer = server.http.post("/v1/completions", content=data, headers={"User-Agent": "curl/8.5.0", **headers})
        assert answer.status_code == 200
    answer = server.http.post("/v1/completions", content=b"model=tiny&prompt=a", headers={"Content-Type": FORM})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
