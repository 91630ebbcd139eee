"""What hostile requests cost the others: `python benchmarks/attacks.py --url http://127.0.0.1:8000 [--only crumbs]`.

Honest clients stream answers from a running server; beside them one attack after the other is made in a loop by a process of
its own, and between two attacks there is none. For each: the share of the honest tokens per second that is kept, the largest
lag of the server's event loop (the bucket it fell into), and what /health took. The machine should be otherwise idle; the
attackers need a part of it, too. With --key the honest clients have another key than the attackers (--attackers-key).
"""

import argparse
import asyncio
import contextlib
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from statistics import quantiles
from typing import Any
from urllib.parse import urlsplit

TALK = [{"role": "user", "content": "a"}]
MEGABYTE = 1 << 20
REFUSED, ANY = frozenset({400}), frozenset({200, 400, 422, 429, 503})
LEAD = 5.0  # seconds of an attack before it is measured: by then it has used what a client has in advance
LAG = re.compile(r'^headrace:event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', re.MULTILINE)


@dataclass(frozen=True)
class Attack:
    """A request, and the statuses that it may have. `raw`: what is sent in place of a body that says its length."""

    path: str
    body: bytes = b""
    statuses: frozenset[int] = REFUSED
    raw: bytes = b""


def said(path: str, statuses: frozenset[int] = REFUSED, **fields: Any) -> Attack:
    return Attack(path, json.dumps({"model": "MODEL", "max_tokens": 1, **fields}).encode(), statuses)


def tool(schema: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]


def filled(path: str, first: str, each: str, last: str) -> Attack:
    """Four megabytes of the same."""
    return Attack(path, (first + each * ((4 * MEGABYTE - 100) // len(each)) + last).encode())


def attacks() -> dict[str, Attack]:
    """By name. The server's name for its model is to be put in place of MODEL."""
    chat, text = "/v1/chat/completions", "/v1/completions"
    outward = {"oneOf": [{"const": 1}, {"$dynamicRef": "http://127.0.0.1:9/x"}]}
    unknown = {"model": "MODEL", "prompt": "a"} | {f"x{n}": 1 for n in range(100_000)}
    costly = {f"p{n}": {"type": "string"} for n in range(200)}
    costly["x"] = {"oneOf": [{"enum": [{"q": [a, b]} for b in range(100)]} for a in range(20)]}  # type: ignore[dict-item]
    bomb = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "(a{1,999}){1,999}"}}}
    return {
        "outward tool": said(chat, messages=TALK, tools=tool(outward)),
        "outward form": said(
            chat, messages=TALK, response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": outward}}
        ),
        "costly tool": said(chat, ANY, messages=TALK, tools=tool({"type": "object", "properties": costly})),
        "pattern bomb": said(chat, ANY, messages=TALK, response_format=bomb),
        "hostile code": Attack("/page/render", json.dumps({"text": '```scala\n"' + "\\" * 48 + "\n```"}).encode(), ANY),
        "nested markdown": Attack("/page/render", json.dumps({"text": "> " * 20_000 + "*" * 40_000}).encode(), ANY),
        "zeros": filled(chat, '{"model":"MODEL","messages":[', "0,", "0]}"),
        "numbers": filled(text, '{"model":"MODEL","prompt":[', "1.5,", "0]}"),
        "unknown fields": Attack(text, json.dumps(unknown).encode()),
        "long text": said(text, prompt="The mill stands by the river. " * 50_000),
        "many texts": said(text, ANY, prompt=["The mill grinds. " * 240] * 64),
        "bad words": said(text, prompt="a", bad_words=[[1]] * 300_000),
        "stop tokens": said(text, prompt="a", stop_token_ids=[1] * 300_000),
        "many messages": said(chat, ANY, messages=TALK * 9_999),
        "variables": said(chat, ANY, messages=TALK, chat_template_kwargs={"llm": 1, "self": 1}),
        "nesting": Attack(text, b"[" * 500_000),
        "crumbs": Attack(text, statuses=REFUSED, raw=b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n"),
    }  # fmt: skip


def request(host: str, attack: Attack, model: str, key: str) -> bytes:
    """As it is sent."""
    body = attack.body.replace(b"MODEL", model.encode())
    length = "Transfer-Encoding: chunked" if attack.raw else f"Content-Length: {len(body)}"
    head = f"POST {attack.path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\nConnection: close\r\n"
    return f"{head}Content-Type: application/json\r\n{length}\r\n\r\n".encode() + (attack.raw or body)


async def exchange(host: str, port: int, sent: bytes) -> AsyncIterator[bytes]:
    """The answer, line by line."""
    reader, writer = await asyncio.open_connection(host, port, limit=16 * MEGABYTE)
    try:
        writer.write(sent)
        while line := await reader.readline():
            yield line
    finally:
        writer.transport.abort()  # type: ignore[attr-defined]


async def status(host: str, port: int, sent: bytes) -> int:
    async for line in exchange(host, port, sent):
        return int(line.split()[1])
    return 0


class Honest:
    """Clients that stream, and one that asks for /health every 50 ms."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        url = urlsplit(arguments.url)
        self.host, self.port, self.arguments = url.hostname or "127.0.0.1", url.port or 80, arguments
        self.tokens, self.waits = 0, [0.0]

    async def stream(self) -> None:
        body = {"model": self.arguments.model, "prompt": "The mill", "max_tokens": 64, "stream": True, "ignore_eos": True}
        sent = request(self.host, Attack("/v1/completions", json.dumps(body).encode()), "", self.arguments.key)
        while True:
            async for line in exchange(self.host, self.port, sent):
                self.tokens += line.startswith(b"data: {")
            await asyncio.sleep(0)

    async def look(self) -> None:
        while True:
            began = time.perf_counter()
            await status(self.host, self.port, self._get("/health"))
            self.waits.append(time.perf_counter() - began)
            await asyncio.sleep(0.05)

    async def lags(self) -> dict[str, float]:
        text = b"".join([line async for line in exchange(self.host, self.port, self._get("/metrics"))]).decode()
        return {bound: float(count) for bound, count in LAG.findall(text)}

    def _get(self, path: str) -> bytes:
        key = f"Authorization: Bearer {self.arguments.key}\r\n"
        return f"GET {path} HTTP/1.1\r\nHost: {self.host}\r\n{key}Connection: close\r\n\r\n".encode()

    async def measured(self, seconds: float) -> tuple[float, list[float], str]:
        """Tokens a second, what /health took, and the bound of the largest lag's bucket."""
        before, self.tokens, self.waits = await self.lags(), 0, []
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        speed = self.tokens / (time.perf_counter() - began)
        after = await self.lags()
        new = {bound: after[bound] - before.get(bound, 0) for bound in after}
        largest = next((bound for bound, count in new.items() if count == max(new.values())), "?")
        return speed, self.waits, largest


async def attacked(honest: Honest, name: str, seconds: float) -> str:
    """A row of the table: without, with, without."""
    arguments = honest.arguments
    first, *_ = await honest.measured(seconds)
    command = [sys.executable, __file__, "--url", arguments.url, "--model", arguments.model, "--attack", name]
    process = await asyncio.create_subprocess_exec(*command, "--attackers-key", arguments.attackers_key)
    await asyncio.sleep(LEAD)
    speed, waits, lag = await honest.measured(seconds)
    process.terminate()
    await process.wait()
    await asyncio.sleep(1)
    last, *_ = await honest.measured(seconds)
    kept = speed / max((first + last) / 2, 1e-9)
    p99 = quantiles(waits, n=100)[98] if len(waits) > 1 else float("nan")
    return f"{name:16} {kept:6.2f} {'<= ' + lag:>10} {1000 * p99:9.0f} {1000 * max(waits, default=0):9.0f}"


async def attack_on(arguments: argparse.Namespace) -> None:
    """One attack in a loop, by some at once."""
    url = urlsplit(arguments.url)
    host, port = url.hostname or "127.0.0.1", url.port or 80
    sent = request(host, attacks()[arguments.attack], arguments.model, arguments.attackers_key)

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                await status(host, port, sent)

    await asyncio.gather(*(one() for _ in range(arguments.attackers)))


async def main(arguments: argparse.Namespace) -> None:
    if arguments.attack:
        await attack_on(arguments)
    honest = Honest(arguments)
    tasks = [asyncio.create_task(honest.stream()) for _ in range(arguments.streams)]
    tasks.append(asyncio.create_task(honest.look()))
    print(f"{'attack':16} {'kept':>6} {'lag, s':>10} {'p99, ms':>9} {'most, ms':>9}   (/health)")
    await honest.measured(arguments.seconds)  # until all is warm
    for name in arguments.only or attacks():
        print(await attacked(honest, name, arguments.seconds), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--attackers", type=int, default=2, help="at once")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement; three a row")
    parser.add_argument("--only", nargs="*", help="attacks by name")
    parser.add_argument("--key", default="none")
    parser.add_argument("--attackers-key", default="none")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(parser.parse_args()))
