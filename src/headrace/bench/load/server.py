"""Queries to a server: its models, and the hits of its prefix cache."""

import http.client
import json
import re
from urllib.parse import urlsplit

from headrace.bench.load.client import HTTP_OK, Target

TIMEOUT = 30.0
# Metric of Headrace and of vLLM.
HITS = re.compile(rb"^\w+:prefix_cache_hits(?:_total)?(?:\{[^\n]*\})? ([0-9.e+]+)$", re.MULTILINE)


def first_model(target: Target) -> str:
    """Name of the first model of /v1/models. Raises ValueError."""
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
    """Prompt tokens that the server has taken from its prefix cache for all clients; None if /metrics lacks the counter."""
    try:
        status, data = _get(target, "/metrics")
    except (OSError, http.client.HTTPException):
        return None
    counters = HITS.findall(data) if status == HTTP_OK else []
    return sum(map(float, counters)) if counters else None


def _get(target: Target, path: str) -> tuple[int, bytes]:
    """Status and body of a GET. Raises OSError, HTTPException."""
    host, port, tls = target.address()
    connection = (
        http.client.HTTPConnection(host, port, timeout=TIMEOUT)
        if tls is None
        else http.client.HTTPSConnection(host, port, timeout=TIMEOUT, context=tls)
    )
    headers = {"Authorization": f"Bearer {target.key}"} if target.key is not None else {}
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()
