"""Logs a machine can read: one JSON object a line. Prompts and answers are in none of them."""

import json
import logging
import time
from contextvars import ContextVar
from typing import Any

REQUESTS = logging.getLogger("headrace.requests")
HTTP_REQUEST = ContextVar("HTTP_REQUEST", default="")  # the x-request-id of the answer that is being made; "" beside HTTP
OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Time, level, logger, message, and what a record carries besides."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if http_request := HTTP_REQUEST.get():
            line["http_request"] = http_request
        line |= {name: value for name, value in vars(record).items() if name not in OWN}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def use_json() -> None:
    """Write what Headrace logs as JSON lines."""
    for handler in logging.getLogger("headrace").handlers:
        handler.setFormatter(JsonLines())


def answered(method: str, path: str, status: int, seconds: float, principal: str) -> None:
    """One answer over HTTP. What a client wrote is in it as ASCII on one line."""
    if REQUESTS.isEnabledFor(logging.INFO):
        path = ascii(path[:200])[1:-1]
        fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4), "principal": principal}
        REQUESTS.info("%s %s: %d (%s)", method, path, status, HTTP_REQUEST.get(), extra=fields)


def request_ended(
    model: str,
    request_id: str,
    http_request: str,
    principal: str,
    reason: str,
    prompt: int,
    generated: int,
    cached: int,
    seconds: float,
) -> None:
    """One request, in numbers. `http_request` is what its client knows it by, `principal` who that is."""
    if REQUESTS.isEnabledFor(logging.INFO):
        fields = {
            "model": model, "request_id": request_id, "http_request": http_request, "principal": principal,
            "finish_reason": reason, "prompt_tokens": prompt, "generated_tokens": generated, "cached_tokens": cached,
            "seconds": round(seconds, 4),
        }  # fmt: skip
        REQUESTS.info("%s: %s after %d tokens, %.3f s", request_id, reason, generated, seconds, extra=fields)
