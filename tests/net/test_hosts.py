"""Hosts as network namespaces (make test-net): engines and pipeline stages behind links that go down. Needs root."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace.data.plan import RankLostError
from headrace.llm import LLM
from tests.server.harness import ROOT, Running, in_thread, until
from tests.tiny_files import write_tiny_gguf

pytestmark = pytest.mark.net
SECONDS_DOWN = 5.0
SEEN_WITHIN = 2.5  # seconds until a link that is down is noticed


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Host:
    """A network namespace with one link to this one. address: of the host."""

    def __init__(self, number: int) -> None:
        self.name, self._link = f"headrace{number}", f"hr{number}"
        self.address = f"10.213.{number}.2"
        ip("netns", "add", self.name)
        ip("link", "add", self._link, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        ip("addr", "add", f"10.213.{number}.1/24", "dev", self._link)
        ip("link", "set", self._link, "up")
        ip("-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.name, "link", "set", "eth0", "up")
        ip("-n", self.name, "link", "set", "lo", "up")
        self.processes: list[subprocess.Popen[bytes]] = []

    def run(self, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start a command of headrace on this host."""
        command = ["ip", "netns", "exec", self.name, sys.executable, "-m", "headrace", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        self.processes.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
        return self.processes[-1]

    def down(self) -> None:
        ip("link", "set", self._link, "down")

    def up(self) -> None:
        ip("link", "set", self._link, "up")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        ip("netns", "del", self.name)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    with ExitStack() as closing:
        try:
            made = []
            for number in (1, 2):
                made.append(Host(number))
                closing.callback(made[-1].close)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces can be made here: {error}")
        yield made


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("net") / "tiny.gguf", context=100_000, layers=4)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "link.key"
    path.write_bytes(b"k" * 32)
    path.chmod(0o600)
    return path


def test_a_link_that_is_down_for_five_seconds_loses_no_request(hosts: list[Host], model: Path, key_file: Path) -> None:
    common = ["--key-file", str(key_file), "--threads", "1", "--kv-cache-memory", "64MiB"]
    for host in hosts:
        host.run("engine", str(model), "--listen", f"{host.address}:9100", *common)
    engines = [f"{host.address}:9100" for host in hosts]

    def states() -> list[str]:
        found: list[str] = list(server.health()["replicas"]["tiny"].values())
        return found

    def stream(seed: int) -> str:
        more: dict[str, Any] = {"prompt": f"Mill {seed}", "max_tokens": 600, "temperature": 1.0, "seed": seed}
        chunks = server.openai.completions.create(model="tiny", stream=True, extra_body={"ignore_eos": True}, **more)
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    settings = {"backend": None, "device": None, "threads": None}
    with Running(model, engines=engines, key_file=key_file, route="round", **settings) as server:
        until(lambda: states() == ["ready", "ready"])
        expected = [stream(seed) for seed in range(6)]
        for which in ([hosts[0]], hosts):  # one link, then all: requests wait for one that comes back
            waiting = [in_thread(lambda seed=seed: stream(seed)) for seed in range(6)]  # type: ignore[misc]
            until(lambda: sum(one.generated > 2 for one in list(server.llm.inflight.values())) >= 3)
            for host in which:
                host.down()
            began = time.monotonic()
            until(lambda which=which: sum(state != "ready" for state in states()) == len(which))
            seen = time.monotonic() - began
            print(f"{len(which)} links down: seen after {seen:.2f} s")
            time.sleep(max(0.0, SECONDS_DOWN - seen))
            for host in which:
                host.up()
            assert [one.result() for one in waiting] == expected
            assert seen <= SEEN_WITHIN
            until(lambda: states() == ["ready", "ready"])
        assert server.llm.quarantine.banned == 0
    for host in hosts:
        host.processes[0].terminate()  # of `ip netns exec`, which has become the command
        assert host.processes[0].wait(60) == 0


def test_a_pipeline_over_hosts_gives_the_bits_of_one_process(hosts: list[Host], model: Path, key_file: Path) -> None:
    prompts, settings = ["The mill", "A river " * 40], {"threads": 1, "kv_cache_memory": "64MiB", "seed": 1}
    with LLM(model, **settings) as llm:
        expected = [one.outputs[0].token_ids for one in llm.generate(prompts, max_tokens=40, ignore_eos=True)]
    for host in hosts:
        process = host.run("rank", str(model), "--listen", f"{host.address}:9200", "--key-file", str(key_file))
        assert process.stderr is not None
        assert b"a stage for a pipeline on" in process.stderr.readline()
    addresses = ",".join(f"{host.address}:9200" for host in hosts)
    with LLM(model, pp=3, stage_hosts=addresses, key_file=key_file, **settings) as llm:
        assert [one.outputs[0].token_ids for one in llm.generate(prompts, max_tokens=40, ignore_eos=True)] == expected
        began = time.monotonic()
        llm.generate(["The mill"], max_tokens=40, ignore_eos=True)
        print(f"{(time.monotonic() - began) / 40 * 1000:.2f} ms a token over two links")
        hosts[1].down()
        began = time.monotonic()
        with pytest.raises(RankLostError, match=r"stage [01] \(layers .*\) ended"):
            llm.generate(prompts, max_tokens=10_000, ignore_eos=True)
        seen = time.monotonic() - began
        print(f"a stage's link down: the engine ends after {seen:.2f} s")
        hosts[1].up()
        assert seen <= SEEN_WITHIN + 1.5  # and the end of the process is awaited
