"""Log lines of the server, also as JSON lines. They never contain prompts or answers."""

import asyncio
import json
import logging
import time
from collections import Counter
from contextvars import ContextVar
from typing import Any

REQUESTS = logging.getLogger("headrace.requests")
HTTP_REQUEST = ContextVar("HTTP_REQUEST", default="")  # x-request-id of the current response; "" outside of HTTP
CLIENTS = 1000  # addresses that a BurstLog counts separately
DETAIL = 200  # characters of a client's text in a line
OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """Formats a record as one JSON object: time, level, logger, message and the record's extra fields."""

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
    """Switch Headrace's loggers to JSON lines."""
    for handler in logging.getLogger("headrace").handlers:
        handler.setFormatter(JsonLines())


class BurstLog:
    """Log of events that any client can cause. It logs the first event, counts those of the next `seconds`, logs the counts as
    one line, and so on until a period without events. Owned by the event loop."""

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
        """Log the counted events as one line."""
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
    """Logging filter without tracebacks of cancelled requests: a server that ends cancels the open ones and logs their
    number."""
    return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


def log_response(method: str, path: str, status: int, seconds: float, principal: str) -> None:
    """Log one HTTP response. Text of the client is written as ASCII on one line."""
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
    """Log the counts of one ended request. `http_request`: its x-request-id; `principal`: the name of its key's owner."""
    if REQUESTS.isEnabledFor(logging.INFO):
        fields = {
            "model": model, "request_id": request_id, "http_request": http_request, "principal": principal,
            "finish_reason": reason, "prompt_tokens": prompt, "generated_tokens": generated, "cached_tokens": cached,
            "seconds": round(seconds, 4),
        }  # fmt: skip
        REQUESTS.info("%s: %s after %d tokens, %.3f s", request_id, reason, generated, seconds, extra=fields)
