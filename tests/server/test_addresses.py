"""The addresses that a server prints when it starts."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.server import serving
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.http.proxies import Proxies
from headrace.server.settings import ServerSettings

KEY = "a-long-enough-key"
HERE = Path(__file__).parent
TLS = {"tls_cert": str(HERE / "tls_cert.pem"), "tls_key": str(HERE / "tls_key.pem")}
UNENCRYPTED = "keys travel unencrypted"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("::1", "http://[::1]:8000"),
        ("192.168.1.5", "http://192.168.1.5:8000"),
    ],
)
def test_the_address_can_be_opened(host: str, url: str) -> None:
    assert ServerSettings("tiny", host=host, key=KEY).address(8000) == url
    assert ServerSettings("tiny", host=host, key=KEY, **TLS).address(8000) == url.replace("http", "https")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", **TLS}, False),
        ({"host": "0.0.0.0", "proxies": Proxies.parse("10.0.0.1")}, False),
        ({"host": "127.0.0.1"}, False),
    ],
)
def test_keys_without_tls_cause_one_warning(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], warned: bool) -> None:
    pages: list[str] = []

    async def run(server: serving.Server, sock: Any, say: Any, page: str) -> None:
        pages.append(page)
        sock.close()
        server.store.close()

    monkeypatch.setattr(serving, "run", run)
    settings = ServerSettings("tiny", port=0, key=KEY, **more)
    lines: list[str] = []
    asyncio.run(serving.serve(serving.single_model(AsyncLLM("no-model"), settings), settings, lines.append))
    assert sum(UNENCRYPTED in line for line in lines) == warned
    assert "://127.0.0.1:" in pages[0]
    assert not any("//0.0.0.0" in line for line in lines)
