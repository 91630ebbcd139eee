"""WAV files to samples at 16 kHz. Reads PCM of 8 to 32 bits and floats; other formats are refused with their name."""

import copy
import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from headrace.audio.mel import RATE

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
NAMES = {2: "ADPCM", 6: "A-law", 7: "µ-law", 0x11: "ADPCM", 0x31: "GSM", 0x55: "MP3", 0xFF: "AAC"}
OTHER = {
    b"fLaC": "FLAC",
    b"OggS": "Ogg",
    b"ID3": "MP3",
    b"\xff\xfb": "MP3",
    b"\x1a\x45\xdf\xa3": "Matroska or WebM",
    b"FORM": "AIFF",
}
LEAST_RATE, MOST_RATE, MOST_CHANNELS = 4_000, 384_000, 8
MOST_SECONDS = 43_200
CHECKED_AT_ONCE = 1 << 20  # samples
UNKNOWN_LENGTH = (0, 0x7FFFFFFF, 0xFFFFFFFF, 0x7FFFFFFF - 36, 0xFFFFFFFF - 36)  # of programs that write to a pipe
ZEROS = 32  # zero crossings of the resampling filter on each side


class AudioError(ValueError):
    """A sound file that cannot be used. The message is one line with the fault and the remedy."""


class UnsupportedError(AudioError):
    """A WAV file whose samples are compressed; PyAV may read it."""


Sound = str | Path | bytes | np.ndarray  # a WAV file, its bytes, or samples
Bytes = bytes | bytearray | memoryview | mmap.mmap


class WavSamples:
    """Samples of a WAV file, decoded and resampled for each part that is read: the file may be mapped and longer than memory.

    data: the bytes of the file. name: of the file, in errors. most_seconds: longer files are refused. partial: a file that is
    cut counts up to there. Raises AudioError.
    """

    def __init__(
        self, data: Bytes, name: str = "the sound", most_seconds: int = MOST_SECONDS, *, partial: bool = False
    ) -> None:
        chunks = _chunks(memoryview(data), name, partial)
        self.rate, self.channels, self._kind, self._width = _layout(chunks[b"fmt "], name)
        step = self._width * self.channels
        self._data = chunks[b"data"][: len(chunks[b"data"]) // step * step]
        self._channel: int | None = None  # the only one that is read; None: all are mixed
        self.count = len(self._data) // step  # samples in the file
        check_length(self.count, self.rate, name, most_seconds)
        if self._kind == FLOAT:
            for start in range(0, self.count, CHECKED_AT_ONCE):
                _check_finite(self._values(start, min(start + CHECKED_AT_ONCE, self.count)), name)

    def __len__(self) -> int:
        return resampled_count(self.count, self.rate)

    def __getitem__(self, part: slice, /) -> np.ndarray:
        start, end, _ = part.indices(len(self))
        if self.rate == RATE:
            return self._mixed(start, end)
        return resample_part(self._mixed, self.count, self.rate, start, max(start, end))

    def one_channel(self, channel: int) -> "WavSamples":
        """The samples of one channel."""
        other = copy.copy(self)
        other._channel = channel
        return other

    def _mixed(self, start: int, end: int) -> np.ndarray:
        """Samples of the file at its own rate, one channel."""
        values = self._values(start, end)
        if self.channels == 1:
            return values
        if self._channel is not None:
            return values.reshape(-1, self.channels)[:, self._channel]
        mixed: np.ndarray = values.reshape(-1, self.channels).mean(axis=1, dtype=np.float32)
        return mixed

    def _values(self, start: int, end: int) -> np.ndarray:
        """Interleaved samples of all channels, float32 in [-1, 1]."""
        step = self._width * self.channels
        raw = np.frombuffer(self._data[start * step : max(start, end) * step], np.uint8)
        width = self._width
        if self._kind == FLOAT:
            return raw.view(f"<f{width}").astype(np.float32)
        if width == 1:
            return (raw.astype(np.float32) - 128) / 128
        if width == 3:  # the three bytes become the upper ones of an int32
            raw = np.concatenate([np.zeros((len(raw) // 3, 1), np.uint8), raw.reshape(-1, 3)], axis=1).reshape(-1)
            width = 4
        return (raw.view(f"<i{width}") / float(1 << (8 * width - 1))).astype(np.float32)


def wav_samples(data: bytes, name: str = "the sound") -> np.ndarray:
    """All samples of a WAV file's bytes. name: of the file, in errors. Raises AudioError."""
    return WavSamples(data, name)[:]


def at_rate(samples: np.ndarray, rate: int, name: str = "the sound") -> np.ndarray:
    """Samples [n] of `rate` a second (int16, or floats in [-1, 1]) at 16 kHz, float32. Raises AudioError."""
    check_length(1, rate, name)
    if samples.ndim != 1 or samples.dtype not in (np.int16, np.float32, np.float64):
        raise AudioError(f"{name}: samples must be a vector of int16, float32 or float64, mixed to one channel")
    check_length(len(samples), rate, name)
    if samples.dtype == np.int16:
        samples = samples.astype(np.float32) / np.float32(32768)
    _check_finite(samples, name)
    return samples.astype(np.float32) if rate == RATE else resample(samples, rate)


def check_length(count: int, rate: int, name: str, most_seconds: int = MOST_SECONDS) -> None:
    """Raise AudioError for a rate or a number of samples that is not supported."""
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise AudioError(f"{name} has {rate} samples a second; {LEAST_RATE} to {MOST_RATE} are supported")
    if not count:
        raise AudioError(f"{name} has no samples")
    if count > most_seconds * rate:
        raise AudioError(f"{name} has {count / rate:,.0f} s of sound; at most {most_seconds:,} s are read, cut it")


def _check_finite(samples: np.ndarray, name: str) -> None:
    if not np.isfinite(samples).all():
        raise AudioError(f"{name} has samples that are NaN or infinite; the file is damaged")


def is_wav(data: Bytes) -> bool:
    """Whether the first bytes are those of a WAV file."""
    return bytes(data[:4]) in (b"RIFF", b"RF64") and bytes(data[8:12]) == b"WAVE"


def _chunks(data: memoryview, name: str, partial: bool) -> dict[bytes, memoryview]:
    """The chunks "fmt " and "data"."""
    if not is_wav(data):
        head = bytes(data[:12])
        kind = next((kind for magic, kind in OTHER.items() if head.startswith(magic)), "MP4" if head[4:8] == b"ftyp" else "")
        problem = f"is a {kind} file" if kind else "is not a WAV file" if data else "is empty"
        raise AudioError(f"{name}: {problem}; convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.wav")
    found_chunks: dict[bytes, memoryview] = {}
    at = 12
    while at + 8 <= len(data) and b"data" not in found_chunks:
        tag, size = bytes(data[at : at + 4]), struct.unpack_from("<I", data, at + 4)[0]
        at += 8
        if tag == b"data" and size in UNKNOWN_LENGTH:
            size = len(data) - at
        if size > len(data) - at and partial and tag == b"data":
            size = len(data) - at
        if size > len(data) - at:
            raise AudioError(f"{name} is cut: its header announces {size:,} bytes of sound, and {len(data) - at:,} are there")
        if tag in (b"fmt ", b"data"):
            found_chunks[tag] = data[at : at + size]
        at += size + size % 2
    for tag, what in ((b"fmt ", "header"), (b"data", "sound")):
        if tag not in found_chunks:
            raise AudioError(f"{name} has no {what}; the file is damaged")
    return found_chunks


def _layout(head: memoryview, name: str) -> tuple[int, int, int, int]:
    """Rate, channels, kind (PCM or FLOAT) and bytes of a sample."""
    if len(head) < 16:
        raise AudioError(f"{name} has a header of {len(head)} bytes, and 16 are needed; the file is damaged")
    kind, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", head)
    if kind == EXTENSIBLE and len(head) >= 26:
        kind = struct.unpack_from("<H", head, 24)[0]
    if not 1 <= channels <= MOST_CHANNELS:
        raise AudioError(f"{name} has {channels} channels; 1 to {MOST_CHANNELS} are supported")
    width = bits // 8
    if kind not in (PCM, FLOAT) or bits % 8 or width not in ((1, 2, 3, 4) if kind == PCM else (4, 8)):
        what = NAMES.get(kind, f"format {kind}") if kind not in (PCM, FLOAT) else f"samples of {bits} bits"
        raise UnsupportedError(f"{name} has {what}, which is not supported; convert it: ffmpeg -i IN -ar 16000 -ac 1 OUT.wav")
    return rate, channels, kind, width


def resampled_count(count: int, rate: int) -> int:
    """Samples at 16 kHz of `count` samples at `rate`."""
    common = math.gcd(rate, RATE)
    return -(-count * (RATE // common) // (rate // common))


def resample(samples: np.ndarray, rate: int) -> np.ndarray:
    """All samples of an array at 16 kHz, [n] float32."""
    return resample_part(lambda start, end: samples[start:end], len(samples), rate, 0, resampled_count(len(samples), rate))


def resample_part(read: Callable[[int, int], np.ndarray], count: int, rate: int, start: int, end: int) -> np.ndarray:
    """Samples [start, end) at 16 kHz by a windowed sinc below half of the smaller rate, float32.

    read: returns samples [a, b) of the `count` samples at `rate`. Silence lies around them.
    """
    common = math.gcd(rate, RATE)
    up, down = RATE // common, rate // common
    cut = min(1.0, RATE / rate)  # share of the input's band that is kept
    half = math.ceil(ZEROS / cut)
    # Groups of `up` outputs, which `down` inputs become.
    first, last = start // up, -(-end // up)
    low, high = first * down - half, last * down + half + 1
    inside = read(max(low, 0), min(high, count)).astype(np.float64)
    padded = np.concatenate([np.zeros(max(-low, 0)), inside, np.zeros(max(high - max(count, low), 0))])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    out = np.zeros((last - first) * up, np.float64)
    for phase in range(up):
        at, offset = divmod(phase * down, up)
        distance = np.arange(-half + 1, half + 1) - offset / up
        taper = np.cos(np.pi * distance / (2 * half)) ** 2
        out[phase::up] = windows[at + 1 :: down][: last - first] @ (cut * np.sinc(cut * distance) * taper)
    return out[start - first * up : end - first * up].astype(np.float32)
