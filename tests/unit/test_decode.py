"""Sound files of other formats: decoded in a confined process, split, cut, damaged, hostile."""

import contextlib
import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from headrace.audio import decode, formats
from headrace.audio.decode import Int16Samples, LocalDecoder, Question, open_sound, samples_of
from headrace.audio.wav import AudioError
from headrace.confined.process import OverrunError
from tests.tiny_whisper import RATE

av: Any = pytest.importorskip("av", reason="PyAV is not installed (extra `audio`)")
SECONDS = 2.0
KINDS = {
    "mp3": ("mp3", "libmp3lame", 44_100),
    "m4a": ("mp4", "aac", 44_100),
    "ogg": ("ogg", "libopus", 48_000),
    "webm": ("webm", "libopus", 48_000),
    "flac": ("flac", "flac", 44_100),
    "aac": ("adts", "aac", 44_100),
    "aiff": ("aiff", "pcm_s16be", 22_050),
    "A-law in WAV": ("wav", "pcm_alaw", 8_000),
}


def tones(rate: int, seconds: float = SECONDS) -> np.ndarray:
    """Two channels: 440 Hz, and 880 Hz at half of the loudness."""
    at = np.arange(int(rate * seconds)) / rate
    return np.stack([0.4 * np.sin(2 * np.pi * 440 * at), 0.2 * np.sin(2 * np.pi * 880 * at)]).astype(np.float32)


def encoded(kind: str, samples: np.ndarray | None = None, layout: str = "stereo") -> bytes:
    container, codec, rate = KINDS[kind]
    file = io.BytesIO()
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(tones(rate) if samples is None else samples, format="fltp", layout=layout)
        frame.rate, frame.time_base = rate, Fraction(1, rate)
        context = stream.codec_context
        resampler = av.AudioResampler(format=context.format, layout=layout, rate=rate, frame_size=context.frame_size or 1024)
        for part in [*resampler.resample(frame), *resampler.resample(None), None]:
            out.mux(stream.encode(part))
    return file.getvalue()


def loudest(samples: np.ndarray) -> float:
    """Frequency of the loudest tone, in hertz."""
    inner = samples[RATE // 2 : RATE // 2 + RATE]
    return float(np.abs(np.fft.rfft(inner)).argmax())


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {kind: encoded(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_formats_are_decoded_mixed_and_split(files: dict[str, bytes], kind: str) -> None:
    (mixed,) = open_sound(files[kind])
    assert len(mixed) == pytest.approx(SECONDS * RATE, abs=0.06 * RATE)
    assert loudest(mixed[:]) == 440
    first, second = open_sound(files[kind], split=True)
    assert (loudest(first[:]), loudest(second[:])) == (440, 880)
    assert np.abs(second[RATE // 2 : RATE]).max() == pytest.approx(0.2, abs=0.03)


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_file_is_refused_and_partly_used_on_demand(files: dict[str, bytes], kind: str) -> None:
    half = files[kind][: len(files[kind]) // 2]
    with pytest.raises(AudioError, match=r"the sound .*(is cut|cut or damaged)"):
        open_sound(half)
    if kind != "m4a":  # its index is at its end
        (part,) = open_sound(half, partial=True)
        assert SECONDS / 4 < len(part) / RATE < SECONDS * 0.75


def video() -> bytes:
    """A WebM file with a stream of pictures alone."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as out:
        stream = out.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 32
        for _ in range(3):
            frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n/etc/passwd\nhttp://127.0.0.1:9/a.mp3\n"
REFUSED = {
    "has no sound": video,
    "unknown format; send wav": lambda: PLAYLIST,
    "has an unknown format": lambda: b"ffconcat version 1.0\nfile /etc/passwd\n",
    "is empty": lambda: b"",
    "cannot be decoded as MP4": lambda: b"\0\0\0\x18ftypM4A " + bytes(40),
    "cannot be decoded as Ogg": lambda: b"OggS" + bytes(40),
    "NaN": lambda: caf(np.full(1000, np.nan, ">f4")),
    "500,?000 samples": lambda: caf(np.zeros(1000, ">f4"), 500_000),
    "9 channels": lambda: caf(np.zeros(9000, ">f4"), channels=9),
}


def caf(values: np.ndarray, rate: int = RATE, channels: int = 1) -> bytes:
    """A Core Audio file of float32 samples."""
    data = bytes(4) + values.astype(">f4").tobytes()
    form = struct.pack(">d4sIIIII", rate, b"lpcm", 1, 4 * channels, 1, channels, 32)
    head = b"caff" + struct.pack(">HH", 1, 0) + b"desc" + struct.pack(">q", len(form)) + form
    return head + b"data" + struct.pack(">q", len(data)) + data


@pytest.mark.parametrize("message", REFUSED)
def test_files_that_are_refused(message: str) -> None:
    with pytest.raises(AudioError, match=message):
        open_sound(REFUSED[message]())


def test_the_length_is_counted_while_decoding(files: dict[str, bytes]) -> None:
    silence = encoded("ogg", np.zeros((1, 48_000 * 90), np.float32), "mono")
    assert len(silence) < 30_000
    answer = decode.decode(decode.encoded(Question(silence, 60)))
    assert "more than 60 s of sound; at most 60 s are read" in answer["error"]
    assert "at most 1 s" in decode.decode(decode.encoded(Question(files["A-law in WAV"], 1)))["error"]


def test_only_demuxers_and_decoders_of_sound_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def opened(file: Any, **options: Any) -> Any:
        asked.append(options)
        raise ValueError("stop")

    monkeypatch.setattr(formats, "av", type("av", (), {"open": staticmethod(opened)}))
    with pytest.raises(AudioError):
        formats.OtherSamples(b"fLaC" + bytes(60), 10)
    (options,) = asked
    assert options["format"] == "flac"
    assert options["options"]["protocol_whitelist"] == ""
    assert not {"h264", "png", "mjpeg"} & set(options["options"]["codec_whitelist"].split(","))
    monkeypatch.setattr(formats, "av", None)
    with pytest.raises(AudioError, match=r"install headrace\[audio\]"):
        formats.OtherSamples(b"fLaC" + bytes(60), 10)


def test_a_decoder_that_ends_costs_its_file_alone(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = LocalDecoder()
    (whole,) = decoder.decode(Question(files["flac"], 60))
    assert decoder._process is not None
    decoder._process.kill()
    with pytest.raises(AudioError, match="its decoder ended|CPU time"):
        decoder.decode(Question(files["flac"], 60))
    (again,) = decoder.decode(Question(files["flac"], 60))
    assert np.array_equal(whole, again)
    decoder._process.end()
    monkeypatch.setattr(decode, "MOST_BYTES", 10)
    with pytest.raises(AudioError, match="at most 10 are read"):
        decoder.decode(Question(files["flac"], 60))
    assert "CPU time" in str(decode.overrun(OverrunError(-27), 60))


def test_long_files_come_in_pieces(files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "PIECE_SECONDS", 1)
    question = decode.encoded(Question(files["flac"], 60))
    (whole,) = decode.read_answer(decode.decode(question))
    pieces = [decode.read_answer(decode.begin(question))]
    while more := decode.read_answer(decode.more(None)):
        pieces.append(more)
    assert len(pieces) == 2
    assert np.array_equal(np.concatenate([piece[0] for piece in pieces]), whole)


def test_int16_samples_are_read_by_parts() -> None:
    values = np.arange(-5, 5, dtype=np.int16)
    samples = samples_of(values)
    assert isinstance(samples, Int16Samples)
    assert len(samples) == 10
    assert np.array_equal(samples[2:4], values[2:4].astype(np.float32) / 32768)
    with pytest.raises(AudioError, match="no samples"):
        samples_of(np.zeros(0, np.int16))


def damaged(rng: np.random.Generator, data: bytes) -> Iterator[bytes]:
    for _ in range(10):
        broken = bytearray(data)
        for at in rng.integers(0, len(broken), 20):
            broken[at] = rng.integers(256)
        yield bytes(broken[: rng.integers(10, len(broken))])


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_files_raise_one_error_or_decode(files: dict[str, bytes], kind: str) -> None:
    for broken in damaged(np.random.default_rng(1), files[kind]):
        with contextlib.suppress(AudioError):
            (made,) = open_sound(broken, partial=True)
            assert np.isfinite(made[:]).all()
