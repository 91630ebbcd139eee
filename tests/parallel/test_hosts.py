"""Links between hosts: addresses, key files, proofs, authentication of frames. Both ends in the test's event loop."""

import asyncio
import os
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.parallel.hosts import link
from headrace.parallel.hosts.address import Address, listening_address, read_key
from headrace.parallel.hosts.link import CODE, HELLO, LENGTH, Link, LinkError, Listener, WrongKeyError

KEY = b"k" * 32
OTHER = "is not a Headrace process, or one of another version"
LOCAL = Address("127.0.0.1", 0)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No result depends on time."""
    monkeypatch.setattr(link, "GONE_AFTER", 300.0)
    monkeypatch.setattr(link, "ANSWERS_WITHIN", 300.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10.0.0.2:9100", ("10.0.0.2", 9100)), ("[fe80::1]:80", ("fe80::1", 80)), (" engine-1:1 ", ("engine-1", 1))],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == expected
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize("text", ["", "host", ":9100", "host:", "host:0", "host:65536", "host:x", "fe80::1:80", "host:٣"])
def test_invalid_addresses_are_one_line(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address; write HOST:PORT, such as"):
        Address.parse(text)


def test_a_port_alone_is_one_of_this_machine() -> None:
    assert listening_address("9100") == Address("127.0.0.1", 9100)
    assert listening_address("10.0.0.2:9100") == Address("10.0.0.2", 9100)


@pytest.mark.parametrize("text", ["0.0.0.0:9100", "[::]:9100", ":9100", "*:9100"])
def test_no_engine_listens_on_every_network(text: str) -> None:
    with pytest.raises(ValueError, match="give the address of the private network"):
        listening_address(text)


def key_file(folder: Path, content: bytes = KEY + b"\n", mode: int = 0o600) -> Path:
    path = folder / "link.key"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_a_key_is_read_without_its_line_end(tmp_path: Path) -> None:
    assert read_key(key_file(tmp_path)) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = key_file(tmp_path, mode=mode)
    with pytest.raises(ValueError, match=rf"other users can read .*\(mode {mode:o}\); run chmod 600 "):
        read_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_key_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = key_file(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    with pytest.raises(ValueError, match="belongs to another user"):
        read_key(path)


@pytest.mark.parametrize("content", [b"", b"short\n", b"x" * 5000])
def test_a_key_of_a_wrong_length_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ValueError, match=r"a key has 32 to 4096 bytes; make a key: \(umask 077; head"):
        read_key(key_file(tmp_path, content))


def test_a_missing_key_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No such file or directory; make a key: "):
        read_key(tmp_path / "link.key")
    with pytest.raises(ValueError, match="is not a file"):
        read_key(Path("/dev/null"))


# -- links ---------------------------------------------------------------------------------------------------------------


def with_listener(work: Callable[[Address, list[Any], list[str]], Awaitable[Any]], key: bytes = KEY) -> Any:
    """Run `work` with the address of a listener that echoes frames, what it received, and why it refused connections."""

    async def main() -> Any:
        received: list[Any] = []
        refused: list[str] = []

        async def echo(end: Link) -> None:
            try:
                while True:
                    data = await end.receive()
                    received.append(data)
                    end.send(data)
            except LinkError as error:
                received.append(str(error))

        listener = Listener(key, echo, lambda peer, why: refused.append(why))
        try:
            return await work(await listener.start(LOCAL), received, refused)
        finally:
            await listener.close()

    return asyncio.run(main())


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.001)


def test_frames_arrive_in_order_and_whole() -> None:
    frames = [b"a", b"bc" * 200_000, b"\0"]

    async def work(address: Address, received: list[Any], refused: list[str]) -> None:
        end = await Link.connect(address, KEY)
        for data in frames:
            end.send(data)
            end.send(b"")  # a heartbeat
        assert [await end.receive() for _ in frames] == frames
        end.close()
        await until(lambda: len(received) == 4)
        assert received == [*frames, "closed the connection"]
        assert refused == []

    with_listener(work)


def test_ends_with_different_keys_refuse_each_other() -> None:
    async def work(address: Address, received: list[Any], refused: list[str]) -> None:
        with pytest.raises(WrongKeyError, match="has another key; give both ends the same key file"):
            await Link.connect(address, b"o" * 32)
        await until(lambda: refused)
        assert refused == ["did not prove that it has the key"]
        assert received == []

    with_listener(work)


async def raw(address: Address, first: bytes) -> bytes:
    """Send bytes as an end without the key would, and return the answer up to the end of the connection."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(first)
    if len(first) < HELLO:
        writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (
            b"GET / HTTP/1.1\r\nHost: engine\r\nAccept: everything\r\n\r\n",
            "is not a Headrace process, or one of another version",
        ),
        (b"\xff" * 1000, "is not a Headrace process, or one of another version"),
        (link.PROTOCOL + b"c" * 32 + b"\0" * 32, "has another key; give both ends the same key file"),
        (b"head", "closed the connection"),
    ],
    ids=["http", "noise", "no key", "cut"],
)
def test_other_bytes_end_a_connection_before_anything_is_read(first: bytes, why: str) -> None:
    async def work(address: Address, received: list[Any], refused: list[str]) -> None:
        answer = await raw(address, first)
        assert len(answer) in (0, HELLO + link.PROOF)  # no more than the proof, which needs no secret of the other end
        await until(lambda: refused)
        assert refused == [why]
        assert received == []

    with_listener(work)


def test_an_end_that_repeats_the_proof_of_the_other_one_is_refused() -> None:
    """Reflection: the proofs of the two ends differ, so a proof cannot be sent back."""

    async def work(address: Address, received: list[Any], refused: list[str]) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(link.hello())
        answer = await reader.readexactly(HELLO + link.PROOF)
        writer.write(answer[HELLO:])
        assert await reader.read() == b""
        writer.close()
        await until(lambda: refused)
        assert refused == ["has another key; give both ends the same key file"]

    with_listener(work)


Change = Callable[[bytes], bytes]


def sent_after_proof(change: Change) -> list[Any]:
    """What the listener receives from an end with the key whose frames `change` alters."""

    async def work(address: Address, received: list[Any], refused: list[str]) -> list[Any]:
        end = await Link.connect(address, KEY)
        write = end._writer.write
        end._writer.write = lambda data: write(change(bytes(data)))  # type: ignore[method-assign]
        end.send(b"frame")
        await until(lambda: received and isinstance(received[-1], str))
        end.close()
        return received

    found: list[Any] = with_listener(work)
    return found


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda frame: frame[:-1] + b"x", ["sent a frame whose authentication code is wrong"]),
        (lambda frame: frame + frame, [b"frame", "sent a frame whose authentication code is wrong"]),
        (
            lambda frame: LENGTH.pack(link.MOST_FRAME + 1) + frame[LENGTH.size :],
            ["announced a frame of 268,435,457 bytes; 268,435,456 is the most"],
        ),
        (lambda frame: frame[: LENGTH.size] + b"\0" * CODE + frame[-5:], ["sent a frame whose authentication code is wrong"]),
    ],
    ids=["changed", "repeated", "oversized", "without code"],
)
def test_changed_repeated_and_oversized_frames_end_the_link(change: Change, expected: list[Any]) -> None:
    assert sent_after_proof(change) == expected


def test_the_control_codes_without_numbers_accept_a_repeated_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "NUMBER", type("Uncounted", (), {"pack": staticmethod(lambda number, length: b"")}))

    async def work(address: Address, received: list[Any], refused: list[str]) -> list[Any]:
        end = await Link.connect(address, KEY)
        write = end._writer.write
        end._writer.write = lambda data: write(bytes(data) * 2)  # type: ignore[method-assign]
        end.send(b"frame")
        await until(lambda: len(received) == 2)
        end.close()
        return received

    assert with_listener(work)[:2] == [b"frame", b"frame"]


def test_a_silent_end_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(address: Address, received: list[Any], refused: list[str]) -> None:
        end = await Link.connect(address, KEY)
        monkeypatch.setattr(link, "GONE_AFTER", 0.01)
        monkeypatch.setattr(link, "BEAT", 3600.0)
        with pytest.raises(LinkError, match=r"gave no sign of life for 0\.01 s"):
            await end.receive()
        end.close()

    monkeypatch.setattr(link, "BEAT", 3600.0)
    with_listener(work)


def test_heartbeats_keep_an_idle_link(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[bytes] = []

    async def work(address: Address, received: list[Any], refused: list[str]) -> None:
        end = await Link.connect(address, KEY)
        code = end._received.next
        end._received.next = lambda data: beats.append(data) or code(data)  # type: ignore[method-assign,func-returns-value]
        waiting = asyncio.create_task(end.receive())
        await until(lambda: len(beats) > 3)
        assert not waiting.done()
        waiting.cancel()
        end.close()

    monkeypatch.setattr(link, "BEAT", 0.001)
    with_listener(work)
    assert set(beats) == {b""}


def test_connections_without_proof_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MOST_UNPROVED", 2)

    async def work(address: Address, received: list[Any], refused: list[str]) -> None:
        ends = [await asyncio.open_connection(address.host, address.port) for _ in range(3)]
        await until(lambda: refused)
        assert refused == ["2 connections have not proved yet that they have the key"]
        for _, writer in ends:
            writer.close()
        await until(lambda: len(refused) == 3)
        end = await Link.connect(address, KEY)
        end.send(b"a")
        assert await end.receive() == b"a"
        end.close()

    with_listener(work)


def test_nothing_listens_there() -> None:
    async def work(address: Address, received: list[Any], refused: list[str]) -> Address:
        return address

    address = with_listener(work)
    with pytest.raises(LinkError, match="cannot be reached"):
        asyncio.run(Link.connect(address, KEY))


def test_an_address_in_use_is_one_line() -> None:
    async def work(address: Address, received: list[Any], refused: list[str]) -> None:
        with pytest.raises(ValueError, match=r"cannot listen on 127\.0\.0\.1:\d+ \(.*\); use another --listen"):
            await Listener(KEY, None).start(address)  # type: ignore[arg-type]

    with_listener(work)
