"""`headrace engine` and `serve --engines` by the command line: refusals in one line, processes that are killed or stopped."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.app import main
from tests.server.harness import ROOT, Running, in_thread, until

KEY = b"k" * 32


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "link.key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--quantize", "int8"], "--quantize: engines on other hosts have settings of their own; give it to headrace engine"),
        (["--max-num-seqs", "4"], "--max-num-seqs: engines on other hosts have settings of their own"),
        (["--idle-unload", "10m"], "leave --model-memory, --models-dir and --idle-unload out"),
        (["--replicas", "2"], "engines on other hosts take the place of replicas"),
    ],
)
def test_serve_refuses_what_belongs_to_the_engines(
    tiny: Path, key_file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    engines = ["--engines", "127.0.0.1:9100", "--key-file", str(key_file)]
    assert main(["serve", str(tiny), *engines, *arguments]) == 1
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("listen", "mode", "reason"),
    [
        ("0.0.0.0:9100", 0o600, "give the address of the private network"),
        ("nowhere", 0o600, "is not an address"),
        ("9100", 0o644, "other users can read"),
    ],
)
def test_an_engine_refuses_open_addresses_and_open_keys(
    tiny: Path, key_file: Path, capsys: pytest.CaptureFixture[str], listen: str, mode: int, reason: str
) -> None:
    key_file.chmod(mode)
    assert main(["engine", str(tiny), "--key-file", str(key_file), "--listen", listen]) == 1
    error = capsys.readouterr().err
    assert reason in error
    assert len(error.splitlines()) == 1


class Engine:
    """A process of `headrace engine`."""

    def __init__(self, model: Path, key_file: Path, port: int) -> None:
        self._command = [sys.executable, "-m", "headrace", "engine", str(model), "--key-file", str(key_file)]
        self._command += ["--listen", str(port), "--threads", "1", "--backend", "native", "--grace", "0"]
        self.start()

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self.process = subprocess.Popen(self._command, stderr=subprocess.DEVNULL, env=environment)

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        self.process.send_signal(number)
        return self.process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports: list[int] = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture
def engines(endless: Path, key_file: Path) -> Iterator[tuple[list[Engine], list[str]]]:
    ports = free_ports(2)
    running = [Engine(endless, key_file, port) for port in ports]
    try:
        yield running, [f"127.0.0.1:{port}" for port in ports]
    finally:
        for one in running:
            one.end()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text()


@pytest.mark.slow
def test_killed_and_stopped_engines_lose_no_request(
    endless: Path, key_file: Path, engines: tuple[list[Engine], list[str]]
) -> None:
    """-9 of an engine's process tree, -9 of the process with the model alone, and 5 s of SIGSTOP, each under streams."""
    running, addresses = engines

    def ready() -> bool:
        return list(server.health()["replicas"]["tiny"].values()) == ["ready", "ready"]

    def stream(seed: int) -> str:
        more = {"prompt": f"Mill {seed}", "max_tokens": 300, "temperature": 1.0, "seed": seed}
        chunks = server.openai.completions.create(model="tiny", stream=True, extra_body={"ignore_eos": True}, **more)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    def kill_host() -> None:
        left = running[0].children()
        running[0].end()
        until(lambda: all(map(gone, left)))  # the process with the model ends with it
        running[0].start()

    def kill_engine() -> None:
        os.kill(running[1].children()[0], signal.SIGKILL)

    def stop_host() -> None:
        running[1].process.send_signal(signal.SIGSTOP)
        until(lambda: not ready())  # the link is gone after 2 s
        running[1].process.send_signal(signal.SIGCONT)

    settings = {"backend": None, "device": None, "threads": None}
    with Running(endless, engines=addresses, key_file=key_file, route="round", **settings) as server:
        until(ready)
        expected = [stream(seed) for seed in range(6)]
        for event in (kill_host, kill_engine, stop_host):
            waiting = [in_thread(lambda seed=seed: stream(seed)) for seed in range(6)]  # type: ignore[misc]
            until(lambda: sum(one.generated > 2 for one in list(server.llm.inflight.values())) >= 3)
            event()
            assert [one.result() for one in waiting] == expected, event.__name__
            until(ready)
        assert server.llm.quarantine.banned == 0
    left = [pid for one in running for pid in one.children()]
    assert [one.end(signal.SIGTERM) for one in running] == [0, 0]
    assert all(map(gone, left))
