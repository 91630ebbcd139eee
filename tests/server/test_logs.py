"""The log is bounded under any traffic, and each line names the event and the address."""

import asyncio
import logging

import pytest

from headrace.server.logs import CLIENTS, BurstLog, without_cancelled
from headrace.server.storage.store import StorageError, Store
from tests.server.harness import Running
from tests.server.test_lock_out import WEBSOCKET, exchange

LOG = logging.getLogger("headrace.server")


def test_a_burst_is_logged_as_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        burst = BurstLog(LOG, logging.WARNING, "bad requests", 60.0)
        for number in range(5000):
            burst.add("1.1.1.1" if number % 2 else f"2.2.2.{number}", "x" * 10_000)
        burst.end_period()
        burst.add("3.3.3.3", "counted: the burst may go on")
        burst.end_period()
        burst.end_period()  # nothing has come
        burst.add("4.4.4.4", "logged at once")

    asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "bad requests from 2.2.2.0: " + "x" * 200
    assert lines[1] == f"bad requests: 4999 more in 60 s from {CLIENTS + 1} addresses, most of them (2500) from 1.1.1.1"
    assert lines[2:] == [
        "bad requests: 1 more in 60 s from 1 addresses, most of them (1) from 3.3.3.3",
        "bad requests from 4.4.4.4: logged at once",
    ]


def test_invalid_http_is_logged_once_with_its_address(caplog: pytest.LogCaptureFixture) -> None:
    """And a WebSocket not at all: uvicorn would advise to install packages."""
    with Running("no-model", begin=False) as server:
        for _ in range(50):
            assert exchange(server, b"no http\r\n\r\n").startswith(b"HTTP/1.1 400")
            assert exchange(server, WEBSOCKET).startswith(b"HTTP/1.1 403")
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == ["requests that are not valid HTTP from 127.0.0.1: illegal request line"]


def test_refused_requests_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "headrace.requests")
    with Running("no-model", begin=False, key="a-long-enough-key") as server:
        for _ in range(50):
            assert exchange(server, b"GET /v1/x HTTP/1.1\r\nHost: x\r\n\r\n").startswith(b"HTTP/1.1 401")
    lines = [record.getMessage() for record in caplog.records if record.name == "headrace.requests"]
    assert lines == ["refused from 127.0.0.1: 401, GET /v1/x"]


def test_a_full_writer_is_logged_with_its_cause(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("headrace.server.storage.store.TIMEOUT_SECONDS", -1.0)

    async def main() -> None:
        store = Store()
        try:
            with pytest.raises(StorageError, match="cannot be used now"):
                await store.run(lambda db: None)
        finally:
            store.close()

    asyncio.run(main())
    (line,) = [record.getMessage() for record in caplog.records]
    assert "the transactions before it took more than -1 s" in line


def test_cancelled_requests_leave_no_traceback() -> None:
    def record(error: BaseException) -> logging.LogRecord:
        return LOG.makeRecord("uvicorn.error", logging.ERROR, "", 1, "", (), (type(error), error, None))

    assert not without_cancelled(record(asyncio.CancelledError()))
    assert without_cancelled(record(ValueError()))
    assert without_cancelled(LOG.makeRecord("uvicorn.error", logging.ERROR, "", 1, "", (), None))
    with Running("no-model", begin=False):
        assert without_cancelled in logging.getLogger("uvicorn.error").filters
