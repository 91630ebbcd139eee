"""Stages of a pipeline on other hosts (`headrace rank`): bits of one process, lost links and processes, refusals."""

import asyncio
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace import core
from headrace.backends import memory
from headrace.backends.native.offer import of_stage
from headrace.backends.native.weights import packed_sizes
from headrace.data.plan import RankLostError
from headrace.models.registry import describe
from headrace.parallel.hosts.address import Address
from headrace.parallel.hosts.link import LinkError
from headrace.parallel.pipeline import rank as rank_module
from headrace.parallel.pipeline import remote
from headrace.parallel.pipeline.link import Ready, Start
from headrace.parallel.pipeline.rank import RankPort, stage_needs
from headrace.startup.opening import open_files
from headrace.weights.digest import files_digest
from tests.parallel.engines import everything, no_process_is_left, opened
from tests.tiny_files import write_tiny_gguf

__all__ = ["no_process_is_left"]

pytestmark = pytest.mark.skipif(not core.available(), reason=core.reason() or "native")
KEY = b"k" * 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", context=512, layers=5)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "link.key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


class Rank:
    """`headrace rank` in a thread. processes: of the stages that it started."""

    def __init__(self, model: Path, files: str = "", key: bytes = KEY, needs: Callable[[Start], int] = lambda start: 0) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._address: Future[str] = Future()
        self._port = RankPort(model, files or files_digest(model), key, threads=1, needs=needs)
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()
        self.address = self._address.result(60)

    def _main(self) -> None:
        async def main() -> None:
            self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
            await self._port.run(
                Address("127.0.0.1", 0), lambda line: self._address.set_result(line.rpartition(" ")[2]), self._stopped
            )

        asyncio.run(main())

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert all(process.poll() is not None for process in self.processes)


@pytest.fixture
def ranks(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rank]]:
    made: list[Rank] = []
    start = rank_module.start_module

    def started(*arguments: Any, **more: Any) -> "subprocess.Popen[bytes]":
        process = start(*arguments, **more)
        made[-1].processes.append(process)
        return process

    def make(**more: Any) -> Rank:
        made.append(Rank(model, **more))
        return made[-1]

    monkeypatch.setattr(rank_module, "start_module", started)
    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    "settings", [{"pp": 2}, pytest.param({"pp": 3, "stages": "1,3,1"}, marks=pytest.mark.slow)], ids=["two", "three"]
)
def test_stages_on_other_hosts_give_the_bits_of_one_process(
    model: Path, key_file: Path, ranks: Callable[..., Rank], settings: dict[str, Any]
) -> None:
    with opened(model) as llm:
        kv, wanted = llm.engine.executor.kv_bytes(), everything(llm)
    hosts = [ranks() for _ in range(settings["pp"] - 1)]
    addresses = ",".join(host.address for host in hosts)
    for _ in range(2):  # a second engine after the first one
        with opened(model, stage_hosts=addresses, key_file=key_file, **settings) as llm:
            assert llm.engine.executor.kv_bytes() == kv
            assert everything(llm) == wanted


def test_a_stage_that_is_killed_on_its_host_ends_the_engine(model: Path, key_file: Path, ranks: Callable[..., Rank]) -> None:
    host = ranks()
    with opened(model, pp=2, stage_hosts=host.address, key_file=key_file) as llm:
        assert llm.generate("Mill", max_tokens=2)
        os.kill(host.processes[-1].pid, signal.SIGKILL)
        with pytest.raises(RankLostError, match=r"stage 0 \(layers 0 to \d\) ended \(exit code 1\)"):
            llm.generate("Mill", max_tokens=2)
    with opened(model, pp=2, stage_hosts=host.address, key_file=key_file) as llm:
        assert llm.generate("Mill", max_tokens=2)


def refused(model: Path, **settings: Any) -> str:
    with pytest.raises(ValueError, match=" ") as caught, opened(model, **{"pp": 2, **settings}):
        pass
    return str(caught.value)


def test_other_files_keys_and_second_engines_are_refused(
    model: Path, key_file: Path, ranks: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    link: dict[str, Any] = {"key_file": key_file}
    reason = refused(model, stage_hosts=ranks(files="other").address, **link)
    assert "has other files of the model tiny.gguf than the engine; copy the same files to both hosts" in reason
    assert "has another key; give both ends the same key file" in refused(
        model, stage_hosts=ranks(key=b"o" * 32).address, **link
    )
    host = ranks()
    with opened(model, pp=2, stage_hosts=host.address, **link) as llm:
        assert "runs a stage for the engine 127.0.0.1:" in refused(model, stage_hosts=host.address, **link)
        assert llm.generate("Mill", max_tokens=2)
    monkeypatch.setattr(rank_module, "__version__", "9.0")
    assert "runs Headrace 9.0 and the engine" in refused(model, stage_hosts=host.address, **link)


def test_each_host_checks_the_memory_of_its_own_stage(
    model: Path, key_file: Path, ranks: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    link: dict[str, Any] = {"key_file": key_file, "kv_cache_memory": 1 << 20}
    opened_files = open_files(model)

    needs = stage_needs(opened_files.config, opened_files.source)
    full = ranks(needs=lambda start: needs(start) + (1 << 50))
    reason = refused(model, stage_hosts=full.address, stages="4,1", **link)
    assert "needs 1048576.00 GiB for weights and K/V of layers 0 to 3 and" in reason
    assert reason.endswith("are free; give it fewer layers (stages)")
    config = opened_files.config
    held = [
        sum(s.nbytes for s in packed_sizes(describe(config), opened_files.source) if of_stage(s.path, layers, config))
        for layers in (range(4), range(4, 5), range(5))
    ]
    assert held[0] + held[1] == held[2], "the parts of an untied model are the model"
    needed: list[int] = []
    monkeypatch.setattr(memory, "check_weights_fit", lambda need, *_, **__: needed.append(need))
    with opened(model, pp=2, stages="4,1", kv_cache_memory=1 << 20):
        pass
    with opened(model, pp=2, stages="4,1", stage_hosts=ranks(needs=needs).address, **link) as llm:
        assert llm.generate("Mill", max_tokens=2)
    assert needed == [held[2], held[1]]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"stage_hosts": "a:1"}, "stage_hosts needs key_file"),
        ({"stage_hosts": "a:1,b:1"}, "pp=2 needs 1 addresses, one for each stage but the last"),
        ({"stage_hosts": "a"}, "is not an address"),
        ({"stage_hosts": "a:1", "pp": 1}, "pp=1 needs 0 addresses"),
    ],
)
def test_contradicting_settings_are_one_line(model: Path, settings: dict[str, Any], reason: str) -> None:
    assert reason in refused(model, **settings)


def test_rows_of_a_wrong_size_are_refused() -> None:
    class Slots:
        def of(self, step: int, rows: int) -> Any:
            raise ValueError("a step of 9 rows, and a slot has 2")

    pipe = remote.RowPipe(None, Slots(), 4)  # type: ignore[arg-type]
    with pytest.raises(LinkError, match="sent 4 bytes for 1 rows of 4 numbers"):
        pipe.send(remote.Rows(Ready(0, 1), b"1234"))
    with pytest.raises(LinkError, match="sent a step of 9 rows, and a slot has 2"):
        pipe.send(remote.Rows(Ready(0, 9), b"1234" * 36))
    with pytest.raises(LinkError, match="sent an invalid message"):
        remote.decode(b"\xff garbage")
    with pytest.raises(LinkError, match="sent an invalid message"):
        remote.decode(msgspec.msgpack.encode({"type": "Rows", "ready": {}, "data": b""}))


def test_times_of_another_clock_end_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote.time, "monotonic", lambda: 100.0)
    assert remote.on_this_clock([(5.0, 6.0), (6.5, 8.0)]) == [(97.0, 98.0), (98.5, 100.0)]
    assert remote.on_this_clock([]) == []
