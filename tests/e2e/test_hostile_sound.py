"""Hostile sound files sent to a running server: one error each, nothing read from disk or network, other requests unchanged."""

import contextlib
import errno
import io
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.server.serving import ModelSpec, open_models
from headrace.server.settings import Limits, Mode, ServerSettings
from tests.server.harness import ENGINE, PATIENCE, Running, in_thread, until
from tests.tiny_files import write_tiny_gguf
from tests.tiny_whisper import write_folder
from tests.unit.test_decode import RATE, encoded

av: Any = pytest.importorskip("av", reason="PyAV is not installed (extra `audio`)")

LIMITS = Limits(body_seconds=PATIENCE, header_seconds=PATIENCE, send_seconds=PATIENCE, audio_bytes=4 << 20, audio_seconds=40)
FORM = {"model": "ear", "temperature": "0.3", "language": "en", "response_format": "verbose_json"}
CHAT = {
    "model": "mouth",
    "prompt": "The mill",
    "max_tokens": 48,
    "temperature": 0.8,
    "seed": 3,
    "logprobs": 2,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model of texts and a speech model."""
    folder, settings = tmp_path_factory.mktemp("models"), ServerSettings("mouth", port=0, limits=LIMITS)
    small = {**ENGINE, "kv_cache_memory": "1MiB"}
    chosen = [
        ModelSpec("mouth", str(write_tiny_gguf(folder / "mouth.gguf")), {**small, "max_model_len": 64}, mode=Mode.PINNED),
        ModelSpec("ear", str(write_folder(folder / "ear")), small, mode=Mode.PINNED),
    ]
    with Running.of(open_models(chosen, settings, 1 << 40, []), settings) as running:
        until(lambda: running.health()["status"] == "ready")
        yield running


def transcribe(server: Running, data: bytes) -> Any:
    return server.http.post("/v1/audio/transcriptions", files={"file": ("a", data)}, data=FORM)


def tone() -> bytes:
    """A QuickTime file of one second of sound."""
    file = io.BytesIO()
    with av.open(file, "w", format="mov") as out:
        stream = out.add_stream("pcm_s16le", rate=RATE, layout="mono")
        samples = (np.sin(np.arange(RATE) / 5) * 9000).astype(np.int16)[None]
        frame = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
        frame.rate = RATE
        out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


def with_reference(data: bytes, path: Path) -> bytes:
    """A QuickTime file whose track is in another file: its data reference is an alias of a path."""
    absolute = str(path).encode()
    record = bytes(2) + absolute.ljust(len(absolute) + len(absolute) % 2, b"\0")
    name = path.name.encode()[:60]
    alias = bytes(10) + b"\x04disk".ljust(28, b"\0") + bytes(12) + bytes([len(name)]) + name.ljust(63, b"\0")
    alias += bytes(16) + b"\xff\xff\xff\xff" + bytes(16)
    alias += b"\0\x02" + len(absolute).to_bytes(2, "big") + record[2:] + b"\xff\xff\0\0"
    entry = (12 + len(alias)).to_bytes(4, "big") + b"alis" + bytes(4) + alias
    at = data.index(b"dref") - 4
    old = data[at + 16 : at + 28]
    assert old[4:8] == b"url "
    made = bytearray(data[: at + 16] + entry + data[at + 28 :])
    for box in (b"moov", b"trak", b"mdia", b"minf", b"dinf", b"dref"):
        start = (data.rindex(box, 0, at) if box != b"dref" else at + 4) - 4
        size = int.from_bytes(made[start : start + 4], "big") + len(entry) - len(old)
        made[start : start + 4] = size.to_bytes(4, "big")
    return bytes(made)


def bomb(seconds: int) -> bytes:
    """Silence in Opus: 8 bytes for 20 ms."""
    return encoded("ogg", np.zeros((1, 48_000 * seconds), np.float32), "mono")


class Watcher:
    """Notices readers of a named pipe, and connections to a port."""

    def __init__(self, folder: Path) -> None:
        self.pipe, self.seen = folder / "secret.mov", 0
        os.mkfifo(self.pipe)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.setblocking(False)
        self.port = self.listener.getsockname()[1]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ends.wait(0.002):
            self._look()

    def _look(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self.listener.accept()[0].close()
            self.seen += 1
        try:
            os.close(os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK))
            self.seen += 1
        except OSError as error:
            if error.errno != errno.ENXIO:  # no reader
                raise

    def __enter__(self) -> "Watcher":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._look()
        self.listener.close()


def hostile(watcher: Watcher) -> dict[str, tuple[bytes, str]]:
    """Files by name, each with a part of its error."""
    mov, silence = tone(), bomb(600)
    assert len(silence) < 200_000
    url = f"http://127.0.0.1:{watcher.port}/a.mp3"
    return {
        "ten minutes in 150 kB": (silence, "more than 40 s of sound; at most 40 s are read"),
        "a track in another file": (with_reference(mov, watcher.pipe), "no samples|cannot be decoded"),
        "half a QuickTime file": (mov[: len(mov) // 2], "cut or damaged"),
        "half an Ogg file": (silence[: len(silence) // 2], "more than 40 s|is cut|cut or damaged"),
        "a playlist": (f"#EXTM3U\n#EXTINF:10,\n{watcher.pipe}\n{url}\n".encode(), "unknown format"),
        "a concatenation": (f"ffconcat version 1.0\nfile {watcher.pipe}\nfile {url}\n".encode(), "unknown format"),
        "an MPEG DASH manifest": (f'<?xml version="1.0"?><MPD><BaseURL>{url}</BaseURL></MPD>'.encode(), "unknown format"),
        "a header alone": (mov[:40], "cut or damaged"),
        "an announced length of 4 GiB": (
            b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x01\0\x01\0\x80>\0\0\0}\0\0\x02\0\x10\0data\xff\xff\xff\xf0",
            "sound",
        ),
    }


def test_the_reference_is_followed_by_a_decoder_that_may(tmp_path: Path) -> None:
    """The control of the file: with `enable_drefs` FFmpeg reads the other file, whose samples are in no other place."""
    path, other = tmp_path / "a.mov", tmp_path / "other.mov"
    data = tone()
    other.write_bytes(data)
    at = data.index(b"mdat")
    path.write_bytes(with_reference(data[: at + 4] + bytes(2 * RATE) + data[at + 4 + 2 * RATE :], other))

    def loudest(**options: str) -> int:
        with av.open(str(path), options=options) as container:
            return max((int(np.abs(frame.to_ndarray()).max()) for frame in container.decode(audio=0)), default=-1)

    assert loudest(enable_drefs="1", use_absolute_path="1") > 8000
    assert loudest() == -1


def test_the_watcher_notices_a_reader_and_a_connection(tmp_path: Path) -> None:
    with Watcher(tmp_path) as watcher:
        reader = os.open(watcher.pipe, os.O_RDONLY | os.O_NONBLOCK)
        until(lambda: watcher.seen > 0)
        os.close(reader)
    other = tmp_path / "other"
    other.mkdir()
    with Watcher(other) as watcher:
        socket.create_connection(("127.0.0.1", watcher.port)).close()
        until(lambda: watcher.seen > 0)


def test_hostile_files_get_an_error_and_disturb_nobody(server: Running, tmp_path: Path) -> None:
    sound = encoded("flac")
    chat, heard = server.post("/v1/completions", CHAT).json()["choices"], transcribe(server, sound).json()
    assert heard["segments"]
    with Watcher(tmp_path) as watcher:
        for name, (data, message) in hostile(watcher).items():
            others = [in_thread(lambda: server.post("/v1/completions", CHAT).json()["choices"])]
            others += [in_thread(lambda: transcribe(server, sound).json())]
            begun = time.monotonic()
            answer = transcribe(server, data)
            assert answer.status_code == 400, (name, answer.text)
            error = answer.json()["error"]
            assert error["param"] == "file", name
            assert "\n" not in error["message"]
            assert any(part in error["message"] for part in message.split("|")), (name, error["message"])
            assert time.monotonic() - begun < PATIENCE
            assert [one.result() for one in others] == [chat, heard], name
    assert not watcher.seen
    assert server.health()["status"] == "ready"
    assert transcribe(server, sound).json() == heard
