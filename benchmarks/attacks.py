"""What attacks cost honest clients: `python -m benchmarks.attacks --streams 4 --pid SERVER --only "lock-out" "headers"`.

Honest clients stream answers from a running server. For each attack there are three phases, repeated `--rounds` times: the
clients alone; next to the attack, which a process of its own repeats as fast as it is answered; and next to a process that
uses the CPU time that the attacker used, and sends nothing. The attack holds if the streams keep 0.9 of the speed that they
have next to that process, and /health answers within 100 ms. With `--pid`, the server's memory and CPU time are measured too.

The machine should be otherwise idle. `--key` is the key of the honest clients, `--attackers-key` that of attacks with a key;
some attacks send none. `--json FILE` writes all figures.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import re
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import urlsplit

TALK = [{"role": "user", "content": "a"}]
MEGABYTE = 1 << 20
REFUSED, ANY = frozenset({400}), frozenset({200, 400, 422, 429, 503})
LEAD = 5.0  # seconds of an attack before it is measured: by then it has used what the server grants in advance
KEPT, HEALTH = 0.9, 0.1  # an attack holds: share of the speed next to the burner, seconds of /health
PERIOD = 0.005  # seconds between two looks of the burner at its clock
LAG = re.compile(r'^headrace:event_loop_lag_seconds_bucket\{le="([^"]+)"\} (\S+)', re.MULTILINE)
TURN = b"TURN"  # becomes the number of the request, in as many digits
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Attack:
    """A request, and the statuses that it may have."""

    path: str
    body: bytes = b""
    statuses: frozenset[int] = REFUSED
    raw: bytes = b""  # sent in place of `body`, chunked by its own bytes
    headers: bytes = b""
    method: str = "POST"
    keyed: bool = True
    clients: int = 0  # connections at once; 0: --attackers


def said(path: str, statuses: frozenset[int] = REFUSED, **fields: Any) -> Attack:
    return Attack(path, json.dumps({"model": "MODEL", "max_tokens": 1, **fields}).encode(), statuses)


def tool(schema: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}}}]


def multiple(of: int) -> dict[str, Any]:
    """A schema that each request has anew, so that no grammar of another one serves for it."""
    return {"type": "integer", "multipleOf": of, "title": TURN.decode()}


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
    websocket = b"Origin: https://evil.example\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    websocket += b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
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
        "long markdown": Attack("/page/render", json.dumps({"text": "a *b* `c` [d](e) " * 5_800}).encode(), ANY),
        "formulas": Attack("/page/render", json.dumps({"text": "$\\frac{a}{b}$ " * 3_000}).encode(), ANY),
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
        "large multiple": replace(said(text, prompt="a", guided_json=multiple(999_983)), clients=3),
        "multiples": replace(said(text, ANY, prompt="a", guided_json=multiple(65_521)), clients=3),
        "lock-out": Attack("/v1/models", statuses=frozenset({200, 401}), method="GET", keyed=False, clients=64),
        "lock-out websocket": Attack(
            "/v1/realtime", statuses=frozenset({400, 403}), headers=websocket, method="GET", keyed=False, clients=64
        ),
        "probes": Attack("/health", statuses=frozenset({200, 503}), method="GET", keyed=False, clients=8),
        "page files": Attack("/page/inter.woff2", statuses=frozenset({200}), method="GET", keyed=False, clients=8),
        "headers": Attack("/live", statuses=frozenset({431}), headers=b"a:\r\n" * 15_000, method="GET", keyed=False),
        "crumbs": Attack(text, statuses=REFUSED, raw=b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n"),
    }  # fmt: skip


def request(host: str, attack: Attack, model: str, key: str) -> bytes:
    """The bytes of an attack's request."""
    body = attack.raw or attack.body.replace(b"MODEL", model.encode())
    lines = [f"{attack.method} {attack.path} HTTP/1.1", f"Host: {host}"]
    if attack.keyed:
        lines.append(f"Authorization: Bearer {key}")
    if attack.method == "POST":
        length = "Transfer-Encoding: chunked" if attack.raw else f"Content-Length: {len(body)}"
        lines += ["Content-Type: application/json", length]
    upgrade = b"upgrade:" in attack.headers.lower()
    lines.append(f"Connection: {'Upgrade' if upgrade else 'close'}")
    return "\r\n".join(lines).encode() + b"\r\n" + attack.headers + b"\r\n" + body


async def exchange(host: str, port: int, sent: bytes, source: str = "") -> AsyncIterator[bytes]:
    """The answer, line by line. `source`: the address to connect from."""
    local = (source, 0) if source else None
    reader, writer = await asyncio.open_connection(host, port, limit=16 * MEGABYTE, local_addr=local)
    try:
        writer.write(sent)
        while line := await reader.readline():
            yield line
    finally:
        writer.transport.abort()


async def status(host: str, port: int, sent: bytes, source: str = "") -> int:
    async for line in exchange(host, port, sent, source):
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

    async def measure(self, seconds: float, pid: int = 0) -> "Phase":
        """One phase. `pid`: a process whose CPU time is measured too."""
        before, self.tokens, self.waits = await self.lags(), 0, []
        web, used = web_seconds(self.arguments.pid), cpu_seconds(pid)
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        took = time.perf_counter() - began
        tokens, waits = self.tokens, self.waits
        phase = Phase(tokens / took, (cpu_seconds(pid) - used) / took, (web_seconds(self.arguments.pid) - web) / took)
        phase.memory = memory(self.arguments.pid)
        phase.health = sorted(waits)
        after = await self.lags()
        new = {bound: after[bound] - before.get(bound, 0) for bound in after}
        phase.lag = next((bound for bound, count in new.items() if count == max(new.values())), "?")
        return phase


@dataclass
class Phase:
    """The figures of some seconds."""

    speed: float  # tokens/s of all streams
    cpu: float  # of the attacker or burner, in processors
    web: float  # of the server without its engines
    memory: float = 0.0  # MiB of the server and its processes
    health: list[float] = field(default_factory=list)  # seconds of each answer
    lag: str = "?"  # upper bound of the event loop's largest lag, seconds


@dataclass
class Row:
    """All phases of one attack."""

    name: str
    alone: list[Phase] = field(default_factory=list)
    attacked: list[Phase] = field(default_factory=list)
    burned: list[Phase] = field(default_factory=list)

    @property
    def kept(self) -> float:
        """Speed next to the attack, by the speed next to the burner."""
        return median(one.speed for one in self.attacked) / max(median(one.speed for one in self.burned), 1e-9)

    @property
    def waits(self) -> list[float]:
        return [wait for one in self.attacked for wait in one.health]

    @property
    def holds(self) -> bool:
        return self.kept >= KEPT and max(self.waits, default=0.0) <= HEALTH

    def line(self) -> str:
        alone = median(one.speed for one in self.alone)
        waits = self.waits
        p99 = quantiles(waits, n=100)[98] if len(waits) > 1 else float("nan")
        cells = [f"{self.name:18}", f"{self.kept:5.2f}"]
        cells.append(f"{median(one.speed for one in self.attacked) / max(alone, 1e-9):8.2f}")
        cells += [f"{median(one.cpu for one in self.attacked):8.2f}", f"{median(one.cpu for one in self.burned):6.2f}"]
        cells += [f"{median(one.web for one in self.alone):4.2f} -> {median(one.web for one in self.attacked):4.2f}"]
        cells += [f"{'<= ' + self.attacked[-1].lag:>8}", f"{1000 * p99:7.0f}", f"{1000 * max(waits, default=0):8.0f}"]
        cells += [f"{max(one.memory for one in self.attacked) - self.alone[0].memory:+8.0f}", "yes" if self.holds else "NO"]
        return " ".join(cells)


HEADER = "attack              kept  of alone attacker burner web CPU      lag, s p99, ms most, ms mem, MiB holds"


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that have ended; 0 if there is none."""
    if not pid:
        return 0.0
    with contextlib.suppress(OSError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15])) / TICKS
    return 0.0


def processes(pid: int) -> list[int]:
    """The children of a process, which are engines and confined processes."""
    found: list[int] = []
    if pid:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def is_engine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def web_seconds(pid: int) -> float:
    """CPU time of a server without its engines, so with its confined processes."""
    return cpu_seconds(pid) + sum(cpu_seconds(one) for one in processes(pid) if not is_engine(one))


def memory(pid: int) -> float:
    """MiB of resident memory of a server and all its processes."""
    total = 0
    for one in [pid, *processes(pid)] if pid else []:
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total / MEGABYTE


@contextlib.asynccontextmanager
async def beside(arguments: argparse.Namespace, *options: str) -> AsyncIterator[int]:
    """Another process of this file, which ends with the block; its id."""
    command = [sys.executable, __file__, "--url", arguments.url, "--model", arguments.model]
    command += ["--attackers", str(arguments.attackers)]
    command += ["--attackers-key", arguments.attackers_key, "--attackers-address", arguments.attackers_address]
    process = await asyncio.create_subprocess_exec(*command, *options)
    try:
        yield process.pid
    finally:
        process.kill()
        await process.wait()


async def attacked(honest: Honest, name: str) -> Row:
    """A row of the table."""
    arguments = honest.arguments
    row = Row(name)
    for _ in range(arguments.rounds):
        row.alone.append(await honest.measure(arguments.seconds))
        async with beside(arguments, "--attack", name) as pid:
            await asyncio.sleep(arguments.lead)
            row.attacked.append(await honest.measure(arguments.seconds, pid))
        await asyncio.sleep(1)
        async with beside(arguments, "--burn", str(row.attacked[-1].cpu)) as pid:
            await asyncio.sleep(1)
            row.burned.append(await honest.measure(arguments.seconds, pid))
    return row


def burn(share: float) -> None:
    """Use a part of a processor, without end."""
    began = time.perf_counter()
    while True:
        if time.process_time() >= share * (time.perf_counter() - began):
            time.sleep(PERIOD)


async def attack_on(arguments: argparse.Namespace) -> None:
    """One attack in a loop, from several connections at once."""
    url = urlsplit(arguments.url)
    host, port = url.hostname or "127.0.0.1", url.port or 80
    attack = attacks()[arguments.attack]
    sent = request(f"{host}:{port}", attack, arguments.model, arguments.attackers_key)

    turns = itertools.count()

    async def one() -> None:
        while True:
            turn = f"{next(turns) % 10_000:04}".encode()
            with contextlib.suppress(OSError, ValueError):
                await status(host, port, sent.replace(TURN, turn), arguments.attackers_address)

    await asyncio.gather(*(one() for _ in range(attack.clients or arguments.attackers)))


async def main(arguments: argparse.Namespace) -> None:
    if arguments.attack:
        await attack_on(arguments)
    honest = Honest(arguments)
    tasks = [asyncio.create_task(honest.stream()) for _ in range(arguments.streams)]
    tasks.append(asyncio.create_task(honest.look()))
    await honest.measure(arguments.seconds)  # until the server is warm
    print(HEADER)
    rows = []
    for name in arguments.only or attacks():
        rows.append(await attacked(honest, name))
        print(rows[-1].line(), flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    if arguments.json:
        kept = [{**asdict(row), "kept": row.kept, "holds": row.holds} for row in rows]
        arguments.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--attackers", type=int, default=2, help="connections at once of attacks without a number of their own")
    parser.add_argument("--attackers-address", default="", help="to connect from (default: that of the honest clients)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase")
    parser.add_argument("--lead", type=float, default=LEAD, help="seconds of an attack before it is measured")
    parser.add_argument("--rounds", type=int, default=2, help="repetitions of the three phases")
    parser.add_argument("--only", nargs="*", help="attacks by name (default: all)")
    parser.add_argument("--pid", type=int, default=0, help="process id of the server")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--key", default="none")
    parser.add_argument("--attackers-key", default="none")
    parser.add_argument("--attack", help=argparse.SUPPRESS)
    parser.add_argument("--burn", type=float, default=-1.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        if given.burn >= 0:
            burn(given.burn)
        asyncio.run(main(given))
