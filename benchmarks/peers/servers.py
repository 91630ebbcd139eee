"""Servers side by side: tokens/s of streamed answers, in turns, while the other servers are stopped.

`python -m benchmarks.peers.servers "headrace=headrace serve MODEL --port {port}" "NAME=COMMAND" ...`
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from benchmarks.command import run
from headrace.bench.load.client import Target, first_model
from headrace.bench.load.drive import drive
from headrace.bench.load.workload import Lengths, ScheduledRequest, steady
from headrace.bench.machine import BandwidthProbe, machine
from headrace.cli.options import writable
from headrace.cli.output import print_table, status
from headrace.host import cores
from headrace.stats.paired_ratio import ratio

KINDS = ("text", "ids", "chat")
START_SECONDS = 300.0
# Full answers: `ignore_eos` is an extension that Headrace, llama-server and vLLM share.
FIELDS = {"temperature": 0.0, "ignore_eos": True}


@dataclass(slots=True)
class Server:
    """A started server in a process group of its own. rates: tokens/s of each round, by number of streams."""

    name: str
    process: subprocess.Popen[bytes]
    target: Target
    rates: dict[int, list[float]] = field(default_factory=dict)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the server's processes."""
        os.killpg(self.process.pid, number)


def parse_servers(texts: Sequence[str]) -> dict[str, str]:
    """Commands by name. Raises ValueError for a text that is not NAME=COMMAND, or that has no {port}."""
    commands: dict[str, str] = {}
    for text in texts:
        name, equals, command = text.partition("=")
        if not (name and equals and "{port}" in command):
            raise ValueError(f"server {text!r}: give NAME=COMMAND, and {{port}} in the command")
        if name in commands:
            raise ValueError(f"server {name!r} is given twice; name each once")
        commands[name] = command
    if len(commands) < 2:
        raise ValueError(f"{len(commands)} server is given; give two or more to compare them")
    return commands


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def started(name: str, command: str, log: Path, kind: str) -> Iterator[Server]:
    """A server that answers. It is killed at the end. Raises ValueError if it ends, or does not answer in time."""
    with launched(name, command, log) as (process, port):
        yield Server(name, process, _wait(name, process, f"http://127.0.0.1:{port}/v1", kind, log))


@contextmanager
def launched(name: str, command: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The process and the port of a server that begins. It is killed at the end. Raises ValueError if it cannot start."""
    port = free_port()
    with log.open("wb") as output:
        words = shlex.split(command.replace("{port}", str(port)))
        try:
            process = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        except OSError as error:
            raise ValueError(f"server {name}: cannot start {words[0]}: {error.strerror}") from None
    try:
        yield process, port
    finally:
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                break
        process.wait()


def _wait(name: str, process: subprocess.Popen[bytes], base: str, kind: str, log: Path) -> Target:
    """The target of the server's first model, as soon as a request is answered."""
    end, short = time.monotonic() + START_SECONDS, steady(1, Lengths(1, 1))
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ValueError(f"server {name} ended with code {process.returncode}; {log} says why")
        with suppress(ValueError):
            target = Target(base, first_model(Target(base, "")), kind, extra=dict(FIELDS))
            if drive(target, short, 1).answers[0].error is None:
                return target
        time.sleep(0.2)
    raise ValueError(f"server {name} did not answer within {START_SECONDS:.0f} s; {log} says why")


def rate(server: Server, requests: Sequence[ScheduledRequest]) -> float:
    """Tokens/s of answers that are all streamed at once. Raises ValueError if one fails or is short."""
    run_of = drive(server.target, requests, len(requests))
    for request, answer in zip(requests, run_of.answers, strict=True):
        if answer.error is not None or answer.output_tokens != request.output:
            why = answer.error or f"it has {answer.output_tokens} tokens instead of {request.output}"
            raise ValueError(f"server {server.name}: an answer is incomplete: {why}")
    return sum(request.output for request in requests) / run_of.seconds


def measure(servers: Sequence[Server], lengths: Lengths, streams: int, rounds: int, probe: BandwidthProbe) -> list[float]:
    """Measure every server `rounds` times in turns, after one round to warm up. Returns the bandwidth of each round."""
    bandwidths = []
    for number in range(rounds + 1):
        first = number % len(servers)
        for server in [*servers[first:], *servers[:first]]:
            server.send(signal.SIGCONT)
            found = rate(server, steady(streams, lengths, 1000 * streams + number))
            server.send(signal.SIGSTOP)
            if number:
                server.rates.setdefault(streams, []).append(found)
        bandwidths.append(probe.gb_per_s())
    return bandwidths[1:]


def servers(
    texts: Annotated[
        list[str],
        typer.Argument(metavar="NAME=COMMAND...", help="Servers; {port} stands in each command. Ours first."),
    ],
    streams: Annotated[str, typer.Option(help="Streams at once.")] = "1,4,8,16",
    kind: Annotated[str, typer.Option(help="Form of the prompts: text, ids or chat.")] = "text",
    prompt: Annotated[int, typer.Option("--input", min=1, help="Words of a prompt; ids: tokens.")] = 64,
    answer: Annotated[int, typer.Option("--output", min=1, help="Tokens of an answer.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of every server.")] = 5,
    logs: Annotated[Path, typer.Option(help="Folder for the servers' output.")] = Path("build/servers"),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=writable)] = None,
) -> None:
    """Tokens/s of servers on the same prompts, in turns; while one is measured, the others are stopped."""
    commands = parse_servers(texts)
    if kind not in KINDS:
        raise ValueError(f"--kind is {kind!r}; choose from {', '.join(KINDS)}")
    try:
        counts = [int(count) for count in streams.split(",")]
    except ValueError:
        counts = [0]
    if min(counts) < 1:
        raise ValueError(f"--streams is {streams!r}; give numbers above 0, such as 1,8")
    logs.mkdir(parents=True, exist_ok=True)
    lengths, probe = Lengths(prompt, answer), BandwidthProbe(cores())
    result: dict[str, Any] = {"machine": machine(), "servers": commands, "kind": kind, "input": prompt, "output": answer}
    status().start("starting the servers")
    running: list[Server] = []
    with ExitStack() as stack:
        for name, command in commands.items():
            running.append(stack.enter_context(started(name, command, logs / f"{name}.log", kind)))
            running[-1].send(signal.SIGSTOP)
        result["cells"] = {}
        for count in counts:
            result["cells"][count] = _cell(running, lengths, count, rounds, probe)
            if json_file is not None:
                json_file.write_text(json.dumps(result, indent=1) + "\n")
    print_table(("streams", "server", "tokens/s", "times", "interval", "GB/s"), list(_rows(result["cells"], running[0].name)))


def _cell(running: Sequence[Server], lengths: Lengths, count: int, rounds: int, probe: BandwidthProbe) -> dict[str, Any]:
    status().start(f"{count} streams")
    bandwidths = measure(running, lengths, count, rounds, probe)
    ours = running[0].rates[count]
    return {
        "gb_per_s": median(bandwidths),
        "rates": {server.name: server.rates[count] for server in running},
        "ratios": {server.name: asdict(ratio(ours, server.rates[count])) for server in running[1:]},
    }


def _rows(cells: dict[int, dict[str, Any]], first: str) -> Iterator[tuple[str, ...]]:
    for count, cell in cells.items():
        for name, rates in cell["rates"].items():
            pairs = cell["ratios"].get(name)
            times = ("", "") if name == first else (f"{pairs['median']:.2f}", f"{pairs['low']:.2f} to {pairs['high']:.2f}")
            yield (str(count), name, f"{median(rates):.1f}", *times, f"{cell['gb_per_s']:.1f}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    ours = '"headrace=headrace serve MODEL --port {port}"'
    examples = (
        (f'{ours} "llama=llama-server -m MODEL --port {{port}} -np 16 -c 32768"', "Streams of short prompts."),
        (f'{ours} "before=OTHER/headrace serve MODEL --port {{port}}" --streams 32', "Two builds."),
    )
    return run(servers, "peers.servers", argv, examples)


if __name__ == "__main__":
    sys.exit(main())
