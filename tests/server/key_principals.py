"""Principals for tests: their key file, their clients, and requests with their keys."""

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import openai

from headrace.server.access.principals import PRINCIPAL, Principal
from tests.server.harness import PATIENCE, Running

ALICE, BOB, SCRAPER = "alice-has-this-key", "bob-has-another-one", "who-looks-at-figures"
FILE = f"""
[alice]
key = "{ALICE}"
[bob]
sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}"
[figures]
key = "{SCRAPER}"
operator = true
"""


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def client(server: Running, key: str) -> openai.OpenAI:
    plain = httpx.Client(timeout=PATIENCE, trust_env=False)
    return openai.OpenAI(base_url=f"{server.base}/v1", api_key=key, max_retries=0, http_client=plain)


def http(server: Running, key: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.base, headers=headers, timeout=PATIENCE, trust_env=False)


def several(name: str) -> Principal:
    return Principal(name, alone=False)


@contextlib.contextmanager
def as_(who: Principal) -> Iterator[None]:
    token = PRINCIPAL.set(who)
    try:
        yield
    finally:
        PRINCIPAL.reset(token)
