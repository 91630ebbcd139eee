"""Logs a machine can read: one JSON object a line. Prompts and answers are in none of them."""

import asyncio
import json
import logging
import time
from collections import Counter
from contextvars import ContextVar
from typing import Any

REQUESTS = logging.getLogger("headrace.requests")
HTTP_REQUEST = ContextVar("HTTP_REQUEST", default="")  # the x-request-id of the answer that is being made; "" beside HTTP
CLIENTS = 1000  # addresses that a burst counts one by one
DETAIL = 200  # characters of a client's text in a line
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


class BurstLog:
    """Log lines that any client can cause. The first is logged; those of the next `seconds` are counted and logged as one line,
    and so on until a period without any. Belongs to the event loop."""

    def __init__(self, log: logging.Logger, level: int, subject: str, seconds: float = 60.0) -> None:
        self._log, self._level, self._subject, self._seconds = log, level, subject, seconds
        self._counts: Counter[str] | None = None  # by client in this period; None: no period is running

    def add(self, client: str, detail: str) -> None:
        if self._counts is not None:
            self._counts[client if client in self._counts or len(self._counts) < CLIENTS else "others"] += 1
            return
        self._log.log(self._level, "%s from %s: %s", self._subject, client, detail[:DETAIL])
        self._begin()

    def end_period(self) -> None:
        """Log the counted lines as one."""
        counts, self._counts = self._counts, None
        if counts:
            (client, most), *_ = counts.most_common(1)
            line = "%s: %d more in %g s from %d addresses, most of them (%d) from %s"
            self._log.log(self._level, line, self._subject, counts.total(), self._seconds, len(counts), most, client)
            self._begin()

    def _begin(self) -> None:
        self._counts = Counter()
        asyncio.get_running_loop().call_later(self._seconds, self.end_period)


def without_cancelled(record: logging.LogRecord) -> bool:
    """A filter for tracebacks of cancelled requests. A server that ends cancels those still open, and logs their number."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def log_response(method: str, path: str, status: int, seconds: float, principal: str) -> None:
    """One answer over HTTP. What a client wrote is in it as ASCII on one line."""
    if REQUESTS.isEnabledFor(logging.INFO):
        path = ascii(path[:200])[1:-1]
        fields = {"method": method, "path": path, "status": status, "seconds": round(seconds, 4), "principal": principal}
        REQUESTS.info("%s %s: %d (%s)", method, path, status, HTTP_REQUEST.get(), extra=fields)


def log_request(
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
