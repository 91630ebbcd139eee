"""A client that disconnects while it is being refused."""

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from headrace.server.http.connection import make_protocol
from tests.server.test_guard import Wire


class Leaving(Wire):
    """A wire whose other end is reset between an answer and its end, or stays."""

    def __init__(self, gone: bool) -> None:
        super().__init__()
        self.gone, self.ended = gone, False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if self.gone:
            raise OSError(107, "Transport endpoint is not connected")
        self.ended = True


@pytest.mark.parametrize("gone", [True, False])
def test_a_disconnect_during_a_refusal_logs_no_error(gone: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def main() -> Leaving:
        config = uvicorn.Config(app, http=make_protocol(), log_config=None)
        config.load()
        made: Any = config.http_protocol_class(config=config, server_state=ServerState(), app_state={})  # type: ignore[call-arg, operator]
        wire = Leaving(gone)
        made.connection_made(wire)
        made.data_received(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100000\r\n\r\na")
        await asyncio.gather(*made.tasks)
        closed = wire.closed
        made.connection_lost(None)
        assert (closed, wire.ended) == (gone, not gone), "who is there is read on from"
        return wire

    assert b"".join(asyncio.run(main()).sent).startswith(b"HTTP/1.1 413")
    assert caplog.records == []
