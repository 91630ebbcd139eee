"""Second turn of a chat over HTTP: `headrace serve` and llama-server in turns, with the prompt tokens that each computes.

usage: python -m benchmarks.peers.second_turn FILE.gguf [--llama-server PATH] [--first 2000] [--new 200] [--rounds 5]

The first request has `--first` tokens and gets `--answer` ones; the second has both and `--new` more. Any llama-server of
llama.cpp's source goes (`-np 1`); without --llama-server only Headrace is measured. The file is one of
`headrace bench synthetic`, whose first 256 tokens are bytes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.peers.servers import free_port

LETTERS = list(range(65, 91))  # ids of A to Z in a file of `bench synthetic`
READY = 300.0  # seconds to load
ANSWER = 280.0  # seconds of a request


@dataclass(frozen=True, slots=True)
class Turns:
    """Seconds of both turns, and the prompt tokens of the second: all, and computed."""

    first: float
    second: float
    tokens: int
    computed: int


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. turns: measures a chat by a seed."""

    name: str
    address: str
    turns: Callable[[str, list[int], int, list[int]], Turns]


def post(address: str, path: str, body: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds and answer of a request. Raises OSError."""
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=ANSWER) as reply:
        answer = json.load(reply)
    return time.perf_counter() - start, answer


def headrace_turns(address: str, first: list[int], answer: int, new: list[int]) -> Turns:
    with urllib.request.urlopen(address + "/v1/models", timeout=ANSWER) as reply:
        model = json.load(reply)["data"][0]["id"]
    # Letters alone: their bytes are the ids of the answer. A salt: the server tells how much it found.
    fixed = {"model": model, "temperature": 0, "ignore_eos": True, "cache_salt": "second turn", "allowed_token_ids": LETTERS}
    one, reply = post(address, "/v1/completions", {**fixed, "prompt": first, "max_tokens": answer})
    text = reply["choices"][0]["text"]  # may begin with the end of a character that the prompt began
    prompt = first + [byte for byte in text.encode() if byte in LETTERS] + new
    two, reply = post(address, "/v1/completions", {**fixed, "prompt": prompt, "max_tokens": 1})
    cached = (reply["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Turns(one, two, len(prompt), len(prompt) - cached)


def llama_turns(address: str, first: list[int], answer: int, new: list[int]) -> Turns:
    fixed = {"temperature": 0, "ignore_eos": True, "cache_prompt": True, "return_tokens": True}
    one, reply = post(address, "/completion", {**fixed, "prompt": first, "n_predict": answer})
    prompt = first + reply["tokens"] + new
    two, reply = post(address, "/completion", {**fixed, "prompt": prompt, "n_predict": 1})
    return Turns(one, two, len(prompt), reply["timings"]["prompt_n"])


def tokens(seed: int, count: int) -> list[int]:
    return [(seed * 7919 + i * 31 + (i * i) % 97 * (seed + 3)) % 250 + 3 for i in range(count)]


def start(stack: ExitStack, name: str, command: Sequence[str], port: int, turns: Any) -> Server:
    """Start a server and wait until it is healthy. Raises ValueError with the last line of its output."""
    log = (Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log").open("w+")
    stack.callback(log.close)
    try:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    except OSError as error:
        raise ValueError(f"{command[0]}: cannot be started ({error.strerror}); give the path of a llama-server") from None
    stack.callback(process.wait)
    stack.callback(process.terminate)
    address, end = f"http://127.0.0.1:{port}", time.monotonic() + READY
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(address + "/health", timeout=5):
            return Server(name, address, turns)
        time.sleep(0.2)
    log.seek(0)
    raise ValueError(f"{name} does not start: {(log.read().strip().splitlines() or ['no message'])[-1]}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.second_turn", description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="a GGUF file, for example of `headrace bench synthetic`")
    parser.add_argument("--llama-server", type=Path)
    for name, default in (("first", 2000), ("answer", 16), ("new", 200), ("rounds", 5), ("threads", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(argv)
    room, threads = str(given.first + given.answer + given.new + 64), str(given.threads)
    found: dict[str, list[Turns]] = {}
    try:
        with ExitStack() as stack:
            port = free_port()
            ours = [sys.executable, "-m", "headrace", "serve", str(given.file), "--port", str(port)]
            ours += ["--threads", threads, "--max-model-len", room]
            servers = [start(stack, "headrace", ours, port, headrace_turns)]
            if given.llama_server is not None:
                port = free_port()
                theirs = [str(given.llama_server), "-m", str(given.file), "--port", str(port)]
                theirs += ["-t", threads, "-c", room, "-np", "1"]
                servers.append(start(stack, "llama-server", theirs, port, llama_turns))
            for seed in range(given.rounds):
                for server in servers:
                    turns = server.turns(
                        server.address, tokens(seed + 1, given.first), given.answer, tokens(seed + 50, given.new)
                    )
                    found.setdefault(server.name, []).append(turns)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    for name, chats in found.items():
        first, second = (median(getattr(chat, turn) for chat in chats) for turn in ("first", "second"))
        computed = sorted({chat.computed for chat in chats})
        print(
            f"{name}: first turn {first:.2f} s, second {second:.2f} s, "
            f"{', '.join(map(str, computed))} of {chats[0].tokens:,} prompt tokens computed"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
