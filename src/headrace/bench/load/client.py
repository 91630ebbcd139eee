"""One request against an OpenAI server, with the time at which each piece of the answer came.

While a request runs the bytes are only kept with their times; they are read as HTTP and as events once everything has ended, so
that the client takes little of the CPU it shares with what it measures.
"""

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

from headrace.bench.load.workload import Job

HTTP_OK = 200
MESSAGE = 300  # characters of an error that are kept


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how it is asked. `kind`: ids or text (/v1/completions), or chat (/v1/chat/completions)."""

    base: str  # http://host:port/v1
    model: str
    kind: str = "ids"
    key: str | None = None
    timeout: float = 600.0  # seconds for one answer
    extra: dict[str, Any] = field(default_factory=dict)  # fields of every request
    run: str = ""  # prompts differ by run, so that no run finds those of an earlier one in the server's prefix cache

    def address(self) -> tuple[str, int, ssl.SSLContext | None]:
        """Host, port, TLS. Raises ValueError for what is no http address."""
        url = urlsplit(self.base)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{self.base!r} is no address of a server; give one like http://127.0.0.1:8000/v1")
        secure = url.scheme == "https"
        return url.hostname, url.port or (443 if secure else 80), ssl.create_default_context() if secure else None

    def request(self, job: Job) -> tuple[h11.Connection, bytes]:
        """The bytes of a request, and the connection that can read what comes back."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": job.output, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.kind == "chat":
            body["messages"] = [{"role": "user", "content": job.text(self.run)}]
        else:
            body["prompt"] = job.ids(self.run) if self.kind == "ids" else job.text(self.run)
        data = msgspec.json.encode(body | self.extra)
        url = urlsplit(self.base)
        path = url.path.rstrip("/") + ("/chat/completions" if self.kind == "chat" else "/completions")
        headers = {
            "Host": url.netloc,
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Connection": "close",
        }
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        connection = h11.Connection(h11.CLIENT)
        head = connection.send(h11.Request(method="POST", target=path, headers=list(headers.items())))
        sent = connection.send(h11.Data(data=data))
        connection.send(h11.EndOfMessage())
        return connection, (head or b"") + (sent or b"")


@dataclass(slots=True)
class Answer:
    """What came of one request. Times are seconds of `time.perf_counter`; `due` is when it had to be sent."""

    job: Job
    due: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)  # of every event with text
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, as the server reports them
    output_tokens: int = 0
    text: str = ""
    error: str | None = None


class Exchange(asyncio.Protocol):
    """A connection's bytes with their times, until it closes."""

    def __init__(self, data: bytes) -> None:
        self.parts: list[tuple[float, bytes]] = []
        self.sent = 0.0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._data = data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._data)
        self.sent = time.perf_counter()

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.perf_counter(), data))

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Pending:
    """A request that was or will be sent; `read` makes an answer of it once it has ended."""

    def __init__(self, target: Target, job: Job) -> None:
        self._target = target
        self._job = job
        self._connection, self._data = target.request(job)
        self._exchange: Exchange | None = None
        self._error: str | None = None
        self._due = 0.0

    async def run(self, due: float) -> None:
        """Send it, and return when all has come."""
        self._due = due
        host, port, tls = self._target.address()
        loop = asyncio.get_running_loop()
        transport = None
        try:
            async with asyncio.timeout(self._target.timeout):
                make = loop.create_connection(lambda: Exchange(self._data), host, port, ssl=tls)
                transport, self._exchange = await make
                await self._exchange.ended
        except TimeoutError:
            self._error = f"no whole answer within {self._target.timeout:g} s"
        except OSError as error:
            self._error = f"no connection ({error.strerror or error})"
        finally:
            if transport is not None:
                transport.abort()

    @property
    def begun(self) -> bool:
        """Whether anything has come."""
        return self._exchange is not None and bool(self._exchange.parts)

    def read(self) -> Answer:
        answer = Answer(self._job, self._due, error=self._error)
        if self._exchange is not None:
            answer.sent = self._exchange.sent
            reader = _Reader(answer)
            try:
                for at, data in [*self._exchange.parts, (0.0, b"")]:
                    self._connection.receive_data(data)
                    reader.take(self._connection, at)
            except (h11.RemoteProtocolError, msgspec.DecodeError, KeyError, TypeError) as error:
                answer.error = answer.error or f"the answer broke off, or is no answer ({error})"[:MESSAGE]
            if answer.error is None and not reader.whole:
                answer.error = "the answer broke off"
        return answer


class _Reader:
    """From HTTP to events to an answer."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.whole = False  # the last event came
        self._status = 0
        self._rest = b""

    def take(self, connection: h11.Connection, at: float) -> None:
        while True:
            event = connection.next_event()
            if isinstance(event, h11.Response):
                self._status = event.status_code
            elif isinstance(event, h11.Data):
                self._rest += bytes(event.data)
                if self._status == HTTP_OK:
                    self._events(at)
            else:
                if isinstance(event, h11.EndOfMessage) and self._status != HTTP_OK:
                    self.answer.error = f"{self._status}: {self._rest.decode(errors='replace')}"[:MESSAGE]
                return

    def _events(self, at: float) -> None:
        *events, self._rest = self._rest.replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if not event.startswith(b"data:"):
                continue
            data = event.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                self.whole = True
            else:
                self._event(msgspec.json.decode(data), at)

    def _event(self, event: Any, at: float) -> None:
        if "error" in event:
            self.answer.error = str(event["error"])[:MESSAGE]
            return
        for choice in event.get("choices") or []:
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            if text:
                self.answer.times.append(at)
                self.answer.text += text
        if usage := event.get("usage"):
            self.answer.prompt_tokens, self.answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
            self.answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        else:  # until it is counted
            self.answer.output_tokens = len(self.answer.times)
