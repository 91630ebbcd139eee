"""Engines on other hosts: answers over links, links that end, other versions and files, stopped engines. One event loop."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.data.params import SamplingParams
from headrace.parallel.hosts import link
from headrace.parallel.hosts.address import Address
from headrace.server import engine_port
from headrace.server.engine_port import EnginePort
from headrace.server.engines import remote_engine
from headrace.server.engines.async_llm import AsyncLLM, LoadError
from headrace.server.engines.inflight import EngineDownError
from headrace.server.engines.messages import Abort, Load, Loaded, Submit, encode
from headrace.server.engines.supervision import Event, State
from headrace.weights.digest import files_digest
from tests.server.local_engine import SETTINGS, LocalEngine, local, started, submit
from tests.server.test_replicas import LONG, never, number, text
from tests.server.test_supervision import come
from tests.tiny_files import write_tiny_gguf

KEY = b"k" * 32
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, seed=3)
MIXED = [PARAMS.replace(seed=seed) for seed in range(4)] + [PARAMS.replace(temperature=0), PARAMS.replace(n=2)]
PROMPTS = [f"{LONG} {place}" for place in range(len(MIXED))]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result depends on time."""
    for name in ("GONE_AFTER", "ANSWERS_WITHIN"):
        monkeypatch.setattr(link, name, 300.0)
    monkeypatch.setattr(engine_port, "JOINS_WITHIN", 300.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("remote") / "tiny.gguf", context=2048)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "link.key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return path


class Host:
    """An engine with its port, and a proxy in front of it whose connections a test can cut."""

    def __init__(self, model: Path, engine: type[LocalEngine], key: bytes = KEY) -> None:
        self.said: list[str] = []
        self.engine = engine
        self.port = EnginePort(str(model), SETTINGS, key, stuck_after=3600.0, grace=300.0)
        self.port.replica.link = engine  # type: ignore[assignment]
        self.port.replica.supervision.pauses = (0.0,)
        self.stopped = asyncio.Event()
        self.reachable = True
        self._pipes: set[asyncio.StreamWriter] = set()

    async def start(self) -> str:
        """Returns the address for fronts."""
        self.running = asyncio.create_task(self.port.run(Address("127.0.0.1", 0), self.said.append, self.stopped))
        await come(lambda: self.said or self.running.done())
        self._behind = int(self.said[0].partition(";")[0].rpartition(":")[2])
        self._proxy = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        return f"127.0.0.1:{self._proxy.sockets[0].getsockname()[1]}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind, to_engine = await asyncio.open_connection("127.0.0.1", self._behind if self.reachable else 1)
        except OSError:
            writer.close()
            return
        ends = {writer, to_engine}
        self._pipes |= ends
        await asyncio.gather(self._copy(reader, to_engine), self._copy(behind, writer))
        self._pipes -= ends

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
        target.close()

    def cut(self) -> None:
        """Close all connections."""
        for writer in self._pipes:
            writer.close()

    async def close(self) -> None:
        self._proxy.close()
        self.stopped.set()
        self.cut()
        await self.running


Work = Callable[[AsyncLLM, list[Host]], Awaitable[Any]]


def with_hosts(tiny: Path, key_file: Path, work: Work, count: int = 2, loses: Any = never, **more: Any) -> Any:
    """Run `work` with a front of `count` engines, and check that nothing is left in it or in them."""

    async def main() -> Any:
        hosts = [Host(tiny, local(loses)) for _ in range(count)]
        addresses = [await host.start() for host in hosts]
        llm = AsyncLLM(tiny, stuck_after=3600.0, engines=addresses, key_file=key_file, **more)
        for engine in llm.replicas.engines:
            engine.replica.supervision.pauses = (0.0, 0.001)
            engine.replica.most_starts = 1_000_000
        await llm.start()
        await come(lambda: all(engine.up for engine in llm.replicas.engines))
        try:
            result = await work(llm, hosts)
            assert not llm.inflight
            assert llm.queue.requests == 0
            await come(lambda: all(engine.up for engine in llm.replicas.engines))
            assert await llm.check() == ""
            return result
        finally:
            await llm.close()
            await come(lambda: not any(host.port._fronts for host in hosts))
            for host in hosts:
                assert not any(engine.loop._open for engine in host.engine.made[-1:])
                await host.close()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[dict[int, list[int]]]:
    """The answers of one local engine."""

    async def main() -> list[dict[int, list[int]]]:
        llm = await started(tiny, local(never))
        try:
            return [await text(submit(llm, prompt, each)) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        finally:
            await llm.close()

    return asyncio.run(main())


async def all_texts(llm: AsyncLLM) -> list[dict[int, list[int]]]:
    requests = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
    return list(await asyncio.gather(*map(text, requests)))


def test_engines_of_two_hosts_give_the_answers_of_a_local_one(tiny: Path, key_file: Path, expected: list[Any]) -> None:
    async def work(llm: AsyncLLM, hosts: list[Host]) -> None:
        assert await all_texts(llm) == expected
        assert all(host.engine.made[0].submitted for host in hosts)
        assert len({engine.bits for engine in llm.replicas.engines}) == 1
        assert llm.replicas.engines[0].bits
        names = [engine.name for engine in llm.replicas.engines]
        assert all(name.startswith("127.0.0.1:") for name in names)
        assert list(llm.replicas.states().values()) == ["ready", "ready"]
        assert llm.memory == 0
        assert llm.pid is None

    with_hosts(tiny, key_file, work, route="round")


@pytest.mark.parametrize(("count", "cuts"), [(1, 3), (2, 1)])
def test_a_link_that_is_cut_loses_no_request(tiny: Path, key_file: Path, expected: list[Any], count: int, cuts: int) -> None:
    """With one engine the requests wait for the next link, with two they go on in the other engine."""

    async def work(llm: AsyncLLM, hosts: list[Host]) -> None:
        requests = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        texts = asyncio.gather(*map(text, requests))
        for _ in range(cuts):
            before = sum(request.generated for request in requests)
            await come(lambda before=before: sum(request.generated for request in requests) > before + 5)
            hosts[0].cut()
            await come(lambda: not llm.replicas.engines[0].up)
            await come(lambda: llm.replicas.engines[0].up)
        assert await texts == expected
        assert sum(request.replays for request in requests) > 0
        assert llm.replicas.engines[0].replica.supervision.ends[Event.CUT] >= cuts
        assert llm.quarantine.banned == 0
        assert all(len(host.engine.made) == 1 for host in hosts)  # the model stays loaded

    with_hosts(tiny, key_file, work, count=count, route="round")


def test_while_a_host_cannot_be_reached_its_requests_wait(tiny: Path, key_file: Path, expected: list[Any]) -> None:
    async def work(llm: AsyncLLM, hosts: list[Host]) -> None:
        requests = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        texts = asyncio.gather(*map(text, requests))
        await come(lambda: any(request.generated > 3 for request in requests))
        hosts[0].reachable = False
        hosts[0].cut()
        await come(lambda: llm.replica.supervision.failed_starts > 20)
        assert llm.state is State.DEAD
        assert "trying to connect" in llm.detail
        with pytest.raises(EngineDownError, match="trying to connect"):
            submit(llm, "Mill", PARAMS)
        hosts[0].reachable = True
        assert await texts == expected

    with_hosts(tiny, key_file, work, count=1)


def test_a_crash_of_the_process_counts_as_one_of_its_requests(tiny: Path, key_file: Path, expected: list[Any]) -> None:
    def loses(engine: LocalEngine, message: Any) -> bool:
        return engine.number == 0 and engine.steps == 5

    async def work(llm: AsyncLLM, hosts: list[Host]) -> None:
        requests = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        assert await asyncio.gather(*map(text, requests)) == expected
        assert llm.replica.supervision.ends[Event.GONE] == 1
        assert llm.replica.supervision.ends[Event.CUT] == 0
        assert len(hosts[0].engine.made) == 2

    with_hosts(tiny, key_file, work, count=1, loses=loses)


def test_an_engine_that_its_operator_stops_gets_no_new_requests(tiny: Path, key_file: Path, expected: list[Any]) -> None:
    async def work(llm: AsyncLLM, hosts: list[Host]) -> None:
        first = submit(llm, PROMPTS[0], MIXED[0])
        place = number(llm, first)
        engine, host = llm.replicas.engines[place], hosts[place]
        await come(lambda: first.generated)
        host.stopped.set()
        await come(lambda: engine.resting)
        others = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS[1:], MIXED[1:], strict=True)]
        assert {number(llm, request) for request in others} == {1 - place}
        assert await asyncio.gather(*map(text, [first, *others])) == expected
        assert first.replays == 0  # it ended in the engine that was stopped
        await host.running
        await come(lambda: not engine.up)
        assert "was stopped by its operator" in engine.replica.supervision.detail or not engine.up
        again = Host(tiny, local(never))
        await again.start()
        host._behind, host.running = again._behind, again.running
        host.stopped, host.port, host.engine = again.stopped, again.port, again.engine
        await come(lambda: engine.up)
        again._proxy.close()

    with_hosts(tiny, key_file, work, route="round")


def test_two_fronts_share_an_engine(tiny: Path, key_file: Path, expected: list[Any]) -> None:
    async def work(llm: AsyncLLM, hosts: list[Host]) -> None:
        other = AsyncLLM(tiny, stuck_after=3600.0, engines=[llm.replicas.remote[0].address.__str__()], key_file=key_file)
        await other.start()
        try:
            # Equal ids in both fronts.
            other._run, other._ids = llm._run, iter(range(100))  # type: ignore[assignment]
            assert await asyncio.gather(all_texts(llm), all_texts(other)) == [expected, expected]
            assert await asyncio.gather(llm.check(), other.check()) == ["", ""]
        finally:
            await other.close()

    with_hosts(tiny, key_file, work, count=1)


def test_engines_come_and_go_under_requests(tiny: Path, key_file: Path, expected: list[Any]) -> None:
    async def work(llm: AsyncLLM, hosts: list[Host]) -> None:
        (first,) = [str(one.address) for one in llm.replicas.remote]
        other = Host(tiny, local(never))
        second = await other.start()
        requests = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        await come(lambda: any(request.generated for request in requests))
        llm.use_engines([first, second])
        await come(lambda: all(engine.up for engine in llm.replicas.engines))
        more = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        assert {request.engine.name for request in more if request.engine is not None} == {first, second}
        await come(lambda: any(request.generated for request in more))
        llm.use_engines([second])
        assert [engine.name for engine in llm.replicas.engines] == [second]
        last = [submit(llm, prompt, each) for prompt, each in zip(PROMPTS, MIXED, strict=True)]
        for batch in (requests, more, last):
            assert await asyncio.gather(*map(text, batch)) == expected
        await come(lambda: not llm.replicas._leaving)
        llm.use_engines([])  # the directory is unknown for a moment
        assert [engine.name for engine in llm.replicas.engines] == [second]
        llm.use_engines([first])
        await come(lambda: llm.replicas.engines[0].up)
        await come(lambda: not other.port._fronts)
        await other.close()

    with_hosts(tiny, key_file, work, count=1, route="round")


def refused(tiny: Path, key_file: Path, key: bytes = KEY) -> str:
    """The reason for which a front of this engine cannot start."""

    async def main() -> str:
        host = Host(tiny, local(never), key)
        llm = AsyncLLM(tiny, engines=[await host.start()], key_file=key_file)
        try:
            with pytest.raises(LoadError) as caught:
                await llm.start()
        finally:
            await llm.close()
            await host.close()
        return str(caught.value)

    return asyncio.run(main())


def test_a_front_with_another_key_is_refused(tiny: Path, key_file: Path) -> None:
    assert refused(tiny, key_file, b"o" * 32).endswith("has another key; give both ends the same key file")


def test_a_front_of_another_version_is_refused(tiny: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_engine, "__version__", "9.0")
    assert "and the front 9.0; install the same version on both hosts" in refused(tiny, key_file)


def test_a_front_with_other_files_is_refused(tiny: Path, key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.server.engines.async_llm.files_digest", lambda path: "other")
    reason = refused(tiny, key_file)
    assert "has other files of the model" in reason
    assert reason.endswith("copy the same files to both hosts")


@pytest.mark.parametrize(
    "message",
    [Abort("1"), Submit("1", [1], PARAMS), Load("model", {}, 30, 1.0), None],
    ids=lambda message: type(message).__name__,
)
def test_an_engine_ends_a_link_that_begins_with_something_else(tiny: Path, key_file: Path, message: Any) -> None:
    async def work(llm: AsyncLLM, hosts: list[Host]) -> None:
        end = await link.Link.connect(Address("127.0.0.1", hosts[0]._behind), KEY)
        end.send(b"\xff garbage" if message is None else encode(message))
        with pytest.raises(link.LinkError, match="closed the connection"):
            await end.receive()
        end.close()
        assert len(hosts[0].port._fronts) == 1
        assert (await text(submit(llm, "Mill", PARAMS)))[0]

    with_hosts(tiny, key_file, work, count=1)


def test_contradicting_arguments_are_one_line(tiny: Path, key_file: Path) -> None:
    for more, reason in (
        ({"engines": ["a:1"]}, "engines needs key_file"),
        ({"key_file": key_file}, "key_file is the key of links to engines"),
        ({"engines": ["a:1", "a:1"], "key_file": key_file}, "an address is given twice"),
        ({"engines": ["a"], "key_file": key_file}, "is not an address"),
        ({"engines": ["a:1"], "key_file": key_file, "replicas": 2}, "take the place of replicas"),
    ):
        with pytest.raises(ValueError, match=reason):
            AsyncLLM(tiny, **more)  # type: ignore[arg-type]


def test_the_digest_of_files_is_that_of_their_contents(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
    (other / "README.md").write_text("not read")
    assert files_digest(one) == files_digest(other)
    assert files_digest(one / "config.json") == files_digest(other / "config.json")
    (other / "model.safetensors").write_bytes(b"weightS")
    assert files_digest(one) != files_digest(other)
    (other / "model.safetensors").write_bytes(b"weights")
    (other / "extra.json").write_text("")
    assert files_digest(one) != files_digest(other)


def test_loaded_tells_the_sizes_of_the_engine(tiny: Path, key_file: Path) -> None:
    async def work(llm: AsyncLLM, hosts: list[Host]) -> Loaded | None:
        return llm.loaded

    found = with_hosts(tiny, key_file, work, count=1)
    assert found is not None
    assert (found.max_model_len, found.vocab_size > 0) == (2048, True)
