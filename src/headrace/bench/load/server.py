"""What a server tells of itself: its models, and how many prompt tokens its prefix cache had."""

import http.client
import json
import re
from urllib.parse import urlsplit

from headrace.bench.load.client import HTTP_OK, Target

PATIENCE = 30.0  # seconds
HITS = re.compile(rb"^\w+:prefix_cache_hits(?:_total)?(?:\{[^\n]*\})? ([0-9.e+]+)$", re.MULTILINE)  # of Headrace and vLLM


def first_model(target: Target) -> str:
    """The first name of /v1/models. Raises ValueError."""
    try:
        status, data = _get(target, urlsplit(target.base).path + "/models")
        if status != HTTP_OK:
            raise ValueError(f"{target.base} does not list its models (status {status}); give --model")
        return str(json.loads(data)["data"][0]["id"])
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"{target.base} cannot be reached ({error}); is the server running?") from None
    except (KeyError, IndexError, TypeError, json.JSONDecodeError):
        raise ValueError(f"{target.base} does not list its models; give --model") from None


def cached_so_far(target: Target) -> float | None:
    """Prompt tokens that the server's prefix cache had so far, of all clients; None if its /metrics does not tell."""
    try:
        status, data = _get(target, "/metrics")
    except (OSError, http.client.HTTPException):
        return None
    found = HITS.findall(data) if status == HTTP_OK else []
    return sum(map(float, found)) if found else None


def _get(target: Target, path: str) -> tuple[int, bytes]:
    """Status and body of a GET. Raises OSError, HTTPException."""
    host, port, tls = target.address()
    connection = (
        http.client.HTTPConnection(host, port, timeout=PATIENCE)
        if tls is None
        else http.client.HTTPSConnection(host, port, timeout=PATIENCE, context=tls)
    )
    headers = {"Authorization": f"Bearer {target.key}"} if target.key is not None else {}
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
