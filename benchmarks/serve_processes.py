"""One process against two: the engine in a thread of the web process, or in a process of its own.

    python -m benchmarks.serve_processes MODEL [--streams 32] [--tokens 64] [--rounds 4]

Both servers run at once and are asked in turns, by a client in a third process that streams answers over raw sockets. Printed:
tokens a second, the time of the first token, and the web side's own CPU for a token where it has a process to itself.
"""

import argparse
import asyncio
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.engine_client import EngineConnection
from headrace.server.engines.engine_process import Channel
from headrace.server.engines.engine_process import serve as run_engine
from headrace.server.engines.messages import Load
from headrace.server.serving import serve, single_model
from headrace.server.settings import ServerSettings

KINDS = ("two", "one")
PROMPT = "The mill stands by the river and the wheel turns slowly while the miller counts sacks of flour number"


class InThread(EngineConnection):
    """The engine in a thread, over the same messages."""

    @classmethod
    async def start(cls, load: Load) -> "InThread":
        ours, theirs = socket.socketpair()
        threading.Thread(target=run_engine, args=(Channel(theirs),), daemon=True).start()
        reader, writer = await asyncio.open_connection(sock=ours)
        engine = cls(reader, writer, None)  # type: ignore[arg-type]
        engine.send(load)
        return engine

    async def _ended_within(self, seconds: float) -> bool:
        return True


def run_server(kind: str, model: str, port: int, streams: int) -> None:
    llm = AsyncLLM(model, max_num_seqs=streams)
    if kind == "one":
        llm.replica.link = InThread
    asyncio.run(serve(single_model(llm, ServerSettings("model", port=port)), ServerSettings("model", port=port), print))


async def stream(port: int, number: int, tokens: int) -> tuple[float, int]:
    """(Seconds until the first token, events) of one streamed answer."""
    body = {"model": "model", "prompt": f"{PROMPT} {number}", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    data = json.dumps({**body, "temperature": 0.7, "seed": number}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    start, first, events = time.perf_counter(), 0.0, 0
    writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + data)
    while part := await reader.read(1 << 16):
        found = part.count(b"data: {")
        if found and not events:
            first = time.perf_counter() - start
        events += found
    writer.close()
    return first, events


async def ask(port: int, streams: int, tokens: int) -> tuple[float, float]:
    """(Tokens a second, median seconds until the first token) of so many streams at once."""
    start = time.perf_counter()
    found = await asyncio.gather(*(stream(port, number, tokens) for number in range(streams)))
    seconds = time.perf_counter() - start
    assert all(events > 1 for _, events in found)
    return streams * tokens / seconds, statistics.median(first for first, _ in found)


def cpu(pid: int) -> float:
    """Seconds of CPU a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--serve", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        run_server(args.serve, args.model, args.port, args.streams)
        return
    servers: dict[str, tuple[Any, int]] = {}
    for kind in KINDS:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, __file__, args.model, "--serve", kind, "--port", str(port), "--streams", str(args.streams)]
        servers[kind] = (subprocess.Popen(command, stdout=subprocess.PIPE, text=True), port)
    try:
        for process, port in servers.values():
            assert any(line.startswith("ready") for line in process.stdout)
            asyncio.run(ask(port, args.streams, 4))
        measure(args, servers)
    finally:
        for process, _ in servers.values():
            process.kill()


def measure(args: argparse.Namespace, servers: dict[str, tuple[Any, int]]) -> None:
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    firsts: dict[str, list[float]] = {kind: [] for kind in KINDS}
    used = cpu(servers["two"][0].pid)
    for _ in range(args.rounds):
        for kind in KINDS:
            speed, first = asyncio.run(ask(servers[kind][1], args.streams, args.tokens))
            speeds[kind].append(speed)
            firsts[kind].append(first)
    used = cpu(servers["two"][0].pid) - used
    for kind in KINDS:
        first = statistics.median(firsts[kind]) * 1e3
        print(f"{kind}: {statistics.median(speeds[kind]):.0f} tokens/s, first token {first:.0f} ms", speeds[kind])
    ratios = [two / one for two, one in zip(speeds["two"], speeds["one"], strict=True)]
    tokens = args.rounds * args.streams * args.tokens
    print(f"two / one: {statistics.median(ratios):.3f}; web CPU of two: {used / tokens * 1e6:.0f} us a token")


if __name__ == "__main__":
    main()
