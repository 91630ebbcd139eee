"""One request to an OpenAI server, with the arrival time of each piece of the answer; queries for its models and cache hits.

During a load the client only stores bytes with their times. It parses HTTP and events after the last answer, so that it uses
little of the CPU that it shares with the measured server.
"""

import asyncio
import http.client
import json
import re
import ssl
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import h11
import msgspec

from headrace.bench.load.workload import ScheduledRequest

HTTP_OK = 200
# Characters of an error message that are kept.
MESSAGE = 300
TIMEOUT = 30.0
# Metric of Headrace and of vLLM.
HITS = re.compile(rb"^\w+:prefix_cache_hits(?:_total)?(?:\{[^\n]*\})? ([0-9.e+]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the form of the requests.

    `base`: address like http://host:port/v1. `kind`: ids or text (/v1/completions), or chat (/v1/chat/completions).
    `timeout`: seconds for one answer. `extra`: fields of every request. `run`: prompts differ between runs, so that no run hits
    the prefix cache of an earlier one.
    """

    base: str
    model: str
    kind: str = "ids"
    key: str | None = None
    timeout: float = 600.0
    extra: dict[str, Any] = field(default_factory=dict)
    run: str = ""

    def address(self) -> tuple[str, int, ssl.SSLContext | None]:
        """Host, port, TLS context. Raises ValueError if `base` is no http address."""
        url = urlsplit(self.base)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"{self.base!r} is not the address of a server; give one like http://127.0.0.1:8000/v1")
        secure = url.scheme == "https"
        return url.hostname, url.port or (443 if secure else 80), ssl.create_default_context() if secure else None

    def encode(self, request: ScheduledRequest) -> tuple[h11.Connection, bytes]:
        """Bytes of a request, and the HTTP parser for its response."""
        body: dict[str, Any] = {"model": self.model, "max_tokens": request.output, "stream": True}
        body["stream_options"] = {"include_usage": True}
        if self.kind == "chat":
            body["messages"] = [{"role": "user", "content": request.text(self.run)}]
        else:
            body["prompt"] = request.ids(self.run) if self.kind == "ids" else request.text(self.run)
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
class TimedAnswer:
    """Answer or error of one request. Times are seconds of `time.perf_counter`.

    `due`: scheduled send time; `sent`: actual one; `times`: arrivals of the events with text. `cached_tokens`: prompt tokens
    from the prefix cache, as the server reports them.
    """

    request: ScheduledRequest
    due: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    text: str = ""
    error: str | None = None


class TimedConnection(asyncio.Protocol):
    """Connection that stores received bytes with their arrival times until it closes."""

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


class PendingRequest:
    """A request that was or will be sent; `read` makes an answer of it once it has ended."""

    def __init__(self, target: Target, request: ScheduledRequest) -> None:
        self._target = target
        self._job = request
        self._connection, self._data = target.encode(request)
        self._exchange: TimedConnection | None = None
        self._error: str | None = None
        self._due = 0.0

    async def run(self, due: float) -> None:
        """Send the request; returns when the connection has closed, failed or timed out."""
        self._due = due
        host, port, tls = self._target.address()
        loop = asyncio.get_running_loop()
        transport = None
        try:
            async with asyncio.timeout(self._target.timeout):
                connecting = loop.create_connection(lambda: TimedConnection(self._data), host, port, ssl=tls)
                transport, self._exchange = await connecting
                await self._exchange.ended
        except TimeoutError:
            self._error = f"no complete answer within {self._target.timeout:g} s"
        except OSError as error:
            self._error = f"no connection ({error.strerror or error})"
        finally:
            if transport is not None:
                transport.abort()

    @property
    def begun(self) -> bool:
        """Whether the first bytes have arrived."""
        return self._exchange is not None and bool(self._exchange.parts)

    def read(self) -> TimedAnswer:
        answer = TimedAnswer(self._job, self._due, error=self._error)
        if self._exchange is not None:
            answer.sent = self._exchange.sent
            reader = _AnswerReader(answer)
            try:
                for at, data in [*self._exchange.parts, (0.0, b"")]:
                    self._connection.receive_data(data)
                    reader.take(self._connection, at)
            except (h11.RemoteProtocolError, msgspec.DecodeError, KeyError, TypeError) as error:
                answer.error = answer.error or f"the answer ended early or is invalid ({error})"[:MESSAGE]
            if answer.error is None and not reader.complete:
                answer.error = "the answer ended early"
        return answer


class _AnswerReader:
    """Parses HTTP into server-sent events and these into a TimedAnswer."""

    def __init__(self, answer: TimedAnswer) -> None:
        self.answer = answer
        self.complete = False
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
                self.complete = True
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
        else:
            # Until the usage event arrives.
            self.answer.output_tokens = len(self.answer.times)


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
