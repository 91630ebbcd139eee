"""K/V fetched from another replica: fetched equals computed bit for bit, and whatever the other one does, no output changes.

Segments have 2 blocks here, not 16, so that short prompts have some.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.engine.engine import Engine
from headrace.kv import lender, segments, store
from headrace.kv.block_memory import BlockMemory
from headrace.kv.store import KVStore
from headrace.llm import LLM
from headrace.parallel.hosts import link
from headrace.parallel.hosts.address import Address
from headrace.parallel.hosts.link import Link, LinkError, Listener
from headrace.server.engines import kv_peers
from headrace.server.engines.async_llm import AsyncLLM
from headrace.server.engines.kv_peers import Declined, Find, Found, PeerPort, Read, open_peer_port
from headrace.server.engines.messages import PeerLink, PeerStats
from headrace.server.engines.metrics import ModelMetrics, ServerMetrics
from headrace.server.engines.router import ENTRY, ReplicaLoad, Router
from tests.e2e.test_kv_store import GREEDY, POOLS, PROMPT, bytes_of, native
from tests.server.local_engine import LocalEngine, local, started, submit
from tests.server.test_remote_engine import Host
from tests.server.test_replicas import LONG, PARAMS, never, number, text
from tests.server.test_supervision import come
from tests.tiny import finish, tokens_of
from tests.tiny_files import write_tiny_gguf

KEY = b"k" * 32
NAME = {"model_name": "tiny"}
BITS = "0" * 64
SEGMENTS = 2  # full ones of PROMPT
LINK = PeerLink("127.0.0.1", 0, KEY)
NATIVE = [name for name in POOLS if name != "torch"]


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (segments, store, lender, kv_peers):
        monkeypatch.setattr(module, "SEGMENT_BLOCKS", 2)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result depends on time."""
    for name in ("GONE_AFTER", "ANSWERS_WITHIN"):
        monkeypatch.setattr(link, name, 300.0)
    for name in ("FIND_SECONDS", "READ_SECONDS", "HOLD_SECONDS", "PAUSE_SECONDS"):
        monkeypatch.setattr(kv_peers, name, 300.0)


class Replica:
    """An engine with its port."""

    def __init__(self, engine: Engine, bits: str = BITS, key: bytes = KEY) -> None:
        self.engine = engine
        memory = engine.executor.runner.block_memory(engine.blocks.groups)  # type: ignore[attr-defined]
        self.store = engine.scheduler.store = KVStore(None, engine.blocks, memory)
        self.port = PeerPort(PeerLink("127.0.0.1", 0, key), self.store, bits)
        self.port.listen()

    def run(self, peer: "Replica | str" = "", salt: bytes = b"", prompt: list[int] = PROMPT) -> list[list[int]]:
        """The outputs of a request whose K/V a peer should have."""
        request = self.engine.add(prompt, GREEDY, salt=salt)
        kv = request.seqs[0].kv
        kv.peer, kv.peer_tokens = peer if isinstance(peer, str) else str(peer.port.address), len(prompt)
        while self.engine.requests:
            self.engine.step()
            if isinstance(peer, Replica):
                peer.store.release()
        return tokens_of(request)

    def end(self) -> None:
        self.store.close()
        self.engine.check()
        assert self.engine.blocks.used == 0, "blocks are held after the end"


Making = Callable[..., Replica]


@pytest.fixture
def replica() -> Iterator[Making]:
    """Makes replicas, and ends them and checks their blocks after the test."""
    made: list[Replica] = []

    def make(engine: Engine | None = None, **more: Any) -> Replica:
        made.append(Replica(engine or native(), **more))
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.mark.parametrize("pool", NATIVE)
def test_fetched_equals_computed(replica: Making, pool: str) -> None:
    """The bytes of the pools and the output, for each number format of K/V."""
    holder, other = replica(POOLS[pool]()), replica(POOLS[pool]())
    expected = holder.run()
    assert other.run(holder) == expected
    assert (bytes_of(other.engine, PROMPT) == bytes_of(holder.engine, PROMPT)).all()
    counts = other.port.counts
    assert (counts.fetched, counts.failed, holder.port.counts.lent) == (SEGMENTS, 0, SEGMENTS)
    assert counts.bytes_fetched == holder.port.counts.bytes_lent > 0


def test_only_the_missing_segments_are_fetched(replica: Making) -> None:
    holder, other = replica(), replica()
    expected = holder.run()
    other.run(prompt=PROMPT[:40])
    assert other.run(holder) == expected
    assert other.port.counts.fetched == 1
    assert other.run(holder) == expected, "all of it is in memory now"
    assert other.port.counts.fetched == 1


def test_a_peer_without_the_prefix(replica: Making, caplog: pytest.LogCaptureFixture) -> None:
    """It answers that it has none, which is no fault."""
    holder, other = replica(), replica()
    expected = native_text()
    assert other.run(holder) == expected
    assert other.port.counts.stats() == PeerStats()
    assert not caplog.records


def native_text() -> list[list[int]]:
    engine = native()
    request = engine.add(PROMPT, GREEDY)
    finish(engine)
    return tokens_of(request)


def flipped(replica: Making, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, int]:
    """Whether the output stays equal if data is damaged after the holder has computed the checksums, and the failed fetches."""
    holder, other = replica(), replica()
    expected = holder.run()
    header = kv_peers.segment_header

    def damaging(key: bytes, groups: int, data: np.ndarray, sizes: list[int]) -> bytes:
        result = header(key, groups, data, sizes)
        data ^= 0x80
        return result

    monkeypatch.setattr(kv_peers, "segment_header", damaging)
    return other.run(holder) == expected, other.port.counts.failed


def test_damage_is_noticed(replica: Making, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert flipped(replica, monkeypatch) == (True, 1)
    (record,) = caplog.records
    assert "the checksum of block 0 differs; computing instead" in record.getMessage()


def test_control_damage_without_checksum(replica: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the CRC the same damage changes the output, so the test above can fail."""
    monkeypatch.setattr(segments, "checksum", lambda piece: 0)
    assert flipped(replica, monkeypatch) == (False, 0)


def test_tenants_do_not_share(replica: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant never gets what another one computed. Control: without the salt in the root of the chain it does."""
    holder, other = replica(), replica()
    expected = holder.run(salt=b"one")
    assert other.run(holder, salt=b"two") == expected
    assert other.port.counts.fetched == 0
    assert other.run(holder, salt=b"one") == expected
    assert other.port.counts.fetched == SEGMENTS

    original = Engine._sequence
    monkeypatch.setattr(Engine, "_sequence", lambda self, request, root: original(self, request, b""))
    holder, other = replica(), replica()
    holder.run(salt=b"one")
    other.run(holder, salt=b"two")
    assert other.port.counts.fetched == SEGMENTS


def test_other_bits_are_declined(replica: Making, caplog: pytest.LogCaptureFixture) -> None:
    """Two different models never share K/V. Control: equal digests would."""
    holder, other, same = replica(), replica(bits="1" * 64), replica()
    expected = holder.run()
    assert other.run(holder) == expected
    assert (other.port.counts.fetched, other.port.counts.failed, holder.port.counts.lent) == (0, 1, 0)
    assert "other files of the model" in caplog.text
    assert same.run(holder) == expected
    assert same.port.counts.fetched == SEGMENTS


def test_lent_blocks_are_bounded(replica: Making) -> None:
    """At most a quarter of the blocks is held for peers."""
    holder, other = replica(native(blocks=12)), replica()
    expected = holder.run()
    assert other.run(holder) == expected
    assert other.port.counts.fetched == 1


def test_blocks_of_an_ended_fetch_come_back(replica: Making) -> None:
    """A link that ends before the engine has held its blocks, and one that ends after."""
    holder = replica()
    holder.run()
    hashes = chain_of(holder)

    async def fetch(served: bool) -> None:
        link = await Link.connect(holder.port.address, KEY)
        link.send(msgspec.msgpack.encode(Find(BITS, hashes, 1)))
        await come(lambda: bool(holder.store.lender._asked))
        if served:
            holder.store.release()
            assert b"Found" in await link.receive()
            assert list(holder.store.held)
        link.close()
        holder.store.release()
        await come(lambda: not holder.port._listener._tasks)

    for served in (False, True):
        asyncio.run(fetch(served))
        holder.store.release()
        assert not list(holder.store.held)


def chain_of(replica: Replica) -> list[bytes]:
    """Hashes of the full blocks of PROMPT."""
    seq = replica.engine.add(PROMPT, GREEDY).seqs[0]
    hashes = [replica.engine.blocks.hash(seq, at) for at in range(2 * SEGMENTS)]
    finish(replica.engine)
    return hashes


@pytest.mark.parametrize("message", [Read(0), Find(BITS, [b"x" * 32], 1 << 40), Find(BITS, [b"x" * 32], -1), b"\xc1garbage"])
def test_invalid_requests(replica: Making, message: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The link ends, with one line in the log; nothing is held."""
    holder = replica()

    async def ask() -> None:
        link = await Link.connect(holder.port.address, KEY)
        link.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))
        await come(lambda: bool(caplog.records))
        link.close()
        await come(lambda: not holder.port._listener._tasks)

    asyncio.run(ask())
    assert len(caplog.records) == 1
    assert not list(holder.store.held)


# -- peers with faults -------------------------------------------------------------------------------------------------
async def garbage(link: Link) -> None:
    await link.receive()
    link.send(b"\xc1garbage")
    await link.flush()
    await link.receive()


async def ended(link: Link) -> None:
    await link.receive()


async def silent(link: Link) -> None:
    await link.receive()
    await link.receive()


async def too_many(link: Link) -> None:
    await answer(link, Found(99))


async def oversized(link: Link) -> None:
    await answer(link, Found(SEGMENTS))
    link.send(bytes(1 << 20))
    await link.flush()
    await link.receive()


async def other_segment(link: Link) -> None:
    await answer(link, Found(SEGMENTS))
    link.send(bytes(100))
    await link.flush()
    await link.receive()


async def silent_later(link: Link) -> None:
    await answer(link, Found(SEGMENTS))
    while True:
        await link.receive()


async def declined(link: Link) -> None:
    await answer(link, Declined("lends nothing: test"))


async def answer(link: Link, message: Found | Declined) -> None:
    await link.receive()
    link.send(msgspec.msgpack.encode(message))
    await link.flush()
    await link.receive()


FAULTS: dict[str, tuple[Callable[[Link], Awaitable[None]], str]] = {
    "garbage": (garbage, "sent an invalid message"),
    "ended": (ended, "closed the connection"),
    "silent": (silent, "sent no answer within"),
    "too many": (too_many, "found 99 of 2 segments"),
    "oversized": (oversized, "announced a frame of 1,048,576 bytes"),
    "other segment": (other_segment, "has 100 bytes instead of"),
    "silent later": (silent_later, "sent no segment within"),
    "declined": (declined, "lends nothing: test"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_peer(
    replica: Making, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request computes, one line is logged, and the peer is left alone for a while."""
    for name in ("FIND_SECONDS", "READ_SECONDS") if fault.startswith("silent") else ():
        monkeypatch.setattr(kv_peers, name, 0.1)
    serve, why = FAULTS[fault]
    other, expected = replica(), native_text()
    loop = other.port._loop

    async def take(link: Link) -> None:
        with contextlib.suppress(LinkError):  # the other end closes it
            await serve(link)

    listener = Listener(KEY, take)
    address = str(asyncio.run_coroutine_threadsafe(listener.start(Address("127.0.0.1", 0)), loop).result())
    try:
        assert other.run(address) == expected
        assert other.run(address, salt=b"another prefix") == expected
    finally:
        asyncio.run_coroutine_threadsafe(listener.close(), loop).result()
    (record,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
    assert why in record.getMessage()
    assert record.getMessage().endswith("computing instead")
    assert (other.port.counts.fetched, other.port.counts.failed) == (0, 1)


def test_unreachable_and_foreign_peers(replica: Making, caplog: pytest.LogCaptureFixture) -> None:
    """No process at the address, one with another key, no address at all, and the replica itself."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{unused.getsockname()[1]}"
        holder, expected = replica(key=b"z" * 32), native_text()
        for peer in (nobody, holder, "nonsense"):
            other = replica()
            assert other.run(peer) == expected
            assert other.port.counts.failed == 1
    assert "cannot be reached" in caplog.text
    assert "has another key" in caplog.text
    assert "is not an address" in caplog.text
    other = replica()
    assert other.run(str(other.port.address)) == expected
    assert other.port.counts.stats() == PeerStats()


def test_other_requests_go_on(replica: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a segment is on its way, a running request gets its tokens, and the waiting one has no step."""
    holder, other = replica(), replica()
    expected = holder.run()
    arrives, read = threading.Event(), BlockMemory.read

    def slow(self: BlockMemory, groups: int, blocks: list[int]) -> np.ndarray:
        arrives.wait(60)
        return read(self, groups, blocks)

    monkeypatch.setattr(BlockMemory, "read", slow)
    running, waiting = other.engine.add([5, 6, 7], GREEDY), other.engine.add(PROMPT, GREEDY)
    waiting.seqs[0].kv.peer, waiting.seqs[0].kv.peer_tokens = str(holder.port.address), len(PROMPT)
    while running.id in other.engine.requests:
        other.engine.step()
        holder.store.release()
    assert waiting.metrics.first_token is None
    arrives.set()
    while other.engine.busy:  # as long as it takes: the segments come from another thread
        other.engine.step()
        other.engine.check()
        holder.store.release()
    assert tokens_of(waiting) == expected
    assert other.port.counts.fetched == SEGMENTS


# -- the router and the front ------------------------------------------------------------------------------------------
def test_the_router_names_the_holder() -> None:
    """A request that leaves a busy replica gets its name; without peers, or at the holder itself, it gets none."""
    chain, tokens = [bytes([at]) * 32 for at in range(8)], 8 * ENTRY
    idle, busy = ReplicaLoad(), ReplicaLoad(queued=400)
    for peers in (False, True):
        router = Router(peers=peers)
        first = router.pick(chain, tokens, {"a": idle, "b": busy})
        assert first is not None
        assert (first.replica, first.holder) == ("a", "")
        again = router.pick(chain, tokens, {"a": idle, "b": idle})
        assert again is not None
        assert (again.replica, again.hit, again.holder) == ("a", tokens, "")
        # Fetching costs less than the wait at the holder; computing costs more.
        moved = router.pick(chain, tokens, {"a": busy, "b": idle})
        assert moved is not None
        assert (moved.replica, moved.holder, moved.held) == (("b", "a", tokens) if peers else ("a", "", 0))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("peers") / "tiny.gguf", context=2048)


async def twice(llm: AsyncLLM) -> list[Any]:
    """The answers and the replicas of two equal requests, one after the other, and the counts of both replicas."""
    figures = ServerMetrics()
    llm.replicas.observe(ModelMetrics(figures, "tiny"))
    found: list[Any] = []
    for _ in range(2):
        request = submit(llm, LONG, PARAMS)
        found.append((await text(request), number(llm, request)))
    return [*found, figures.registry.get_sample_value("headrace:kv_peer_segments_fetched_total", NAME)]


def fetched(engines: list[LocalEngine]) -> tuple[int, int]:
    """Segments that the engines have fetched and lent."""
    ports = [engine.llm.engine.scheduler.store.peers for engine in engines]  # type: ignore[union-attr]
    return sum(port.counts.fetched for port in ports), sum(port.counts.lent for port in ports)  # type: ignore[union-attr]


@pytest.mark.parametrize("peers", [True, False])
def test_replicas_of_one_host(tiny: Path, peers: bool) -> None:
    """The second request is sent to the other replica, which fetches the prefix. Off by default."""

    async def main() -> None:
        engines = local(never)
        llm = await started(tiny, engines, replicas=2, route="round", **({"kv_peers": True} if peers else {}))
        await come(lambda: all(engine.up for engine in llm.replicas.engines))
        try:
            (one, first), (two, second), shown = await twice(llm)
            assert one == two
            assert {first, second} == {0, 1}
            if peers:
                count, lent = fetched(engines.made)
                assert shown == count == lent > 0
                assert sum(made.submitted[0].peer_tokens > 0 for made in engines.made) == 1
            else:
                assert all(made.llm.engine.scheduler.store is None for made in engines.made)
            assert await llm.check() == ""
        finally:
            await llm.close()

    asyncio.run(main())


def test_engines_on_other_hosts(tiny: Path, tmp_path: Path) -> None:
    """Each engine has a port on the host of --listen, with the key of the links. The digest is one of contents: the files have
    two paths."""
    key = tmp_path / "link.key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(tiny.read_bytes())
    other = write_tiny_gguf(tmp_path / "other.gguf", context=2048, seed=9)

    async def main() -> None:
        hosts = [Host(path, local(never), KEY) for path in (tiny, copy)]
        for host in hosts:
            host.port._peer_port = 0
        llm = AsyncLLM(
            tiny, stuck_after=3600.0, engines=[await host.start() for host in hosts], key_file=key, route="round", kv_peers=True
        )
        await llm.start()
        await come(lambda: all(engine.up for engine in llm.replicas.engines))
        try:
            (one, first), (two, second), shown = await twice(llm)
            assert one == two
            assert {first, second} == {0, 1}
            engines = [host.engine.made[0] for host in hosts]
            count, lent = fetched(engines)
            assert shown == count == lent > 0
        finally:
            await llm.close()
            for host in hosts:
                await host.close()

    asyncio.run(main())
    digests = set()
    for path in (tiny, copy, other):
        with LLM(path, threads=1, kv_cache_memory="4MiB") as llm:
            port = open_peer_port(LINK, llm, kv_peers_bits(llm))
            assert port is not None
            digests.add(port._bits)
    assert len(digests) == 2, "equal files have one digest, other files another one"


def kv_peers_bits(llm: LLM) -> str:
    from headrace.startup.bits import portable_bits
    from headrace.weights.digest import files_digest

    return portable_bits(files_digest(llm.opened.path), llm.settings, "native bfloat16")


def test_refusals(tiny: Path) -> None:
    with pytest.raises(ValueError, match="kv_peers: there is one replica"):
        AsyncLLM(tiny, kv_peers=True)
    with LLM(tiny, threads=1, kv_cache_memory="4MiB", enable_prefix_caching=False) as llm:
        assert llm.engine.scheduler.store is None
        with pytest.raises(ValueError, match="kv_peers keeps the prefix cache"):
            open_peer_port(LINK, llm, BITS)
    with LLM(tiny, threads=1, kv_cache_memory="4MiB") as llm:
        with pytest.raises(ValueError, match="kv_peers needs the native back end"):
            open_peer_port(LINK, llm, "")
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(ValueError, match="kv_peers: cannot listen on .*; use another --kv-peer-port"):
                open_peer_port(PeerLink("127.0.0.1", taken.getsockname()[1], KEY), llm, BITS)
