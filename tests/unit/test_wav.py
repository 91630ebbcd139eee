"""WAV files: number formats, channels, rates, and damaged files."""

import contextlib
import io
import struct
import wave

import numpy as np
import pytest

from headrace.audio.decode import samples_of
from headrace.audio.wav import AudioError, at_rate, resample, wav_samples

RATE = 16_000


def tone(rate: int = RATE, seconds: float = 0.5, hertz: float = 440.0) -> np.ndarray:
    return 0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)


def wav(data: bytes, *, kind: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16, size: int | None = None) -> bytes:
    width = bits // 8 * channels
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * width, width, bits)
    chunk = b"data" + struct.pack("<I", len(data) if size is None else size) + data
    return b"RIFF" + struct.pack("<I", 28 + len(data)) + b"WAVEfmt " + struct.pack("<I", 16) + head + chunk


def encoded(values: np.ndarray, kind: int, bits: int) -> bytes:
    if kind == 3:
        return values.astype(f"<f{bits // 8}").tobytes()
    if bits == 8:
        return (np.round(values * 127) + 128).astype(np.uint8).tobytes()
    whole = np.round(values * (2 ** (bits - 1) - 1)).astype("<i4")
    return (
        b"".join(number.tobytes()[: bits // 8] for number in whole) if bits == 24 else whole.astype(f"<i{bits // 8}").tobytes()
    )


@pytest.mark.parametrize(("kind", "bits"), [(1, 8), (1, 16), (1, 24), (1, 32), (3, 32), (3, 64)])
def test_number_formats(kind: int, bits: int) -> None:
    samples = wav_samples(wav(encoded(tone(), kind, bits), kind=kind, bits=bits))
    assert samples.dtype == np.float32
    assert np.abs(samples - tone()).max() < 2.0 ** (2 - bits if kind == 1 and bits < 24 else -20)


def test_files_of_the_wave_module_and_of_pipes() -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((2, 2, RATE, 0, "NONE", ""))
        out.writeframes(np.stack([tone() * 32767, -tone() * 32767 / 2], 1).astype("<i2").tobytes())
    assert np.abs(samples_of(file.getvalue())[:] - tone() / 4).max() < 1e-4
    piped = wav(encoded(tone(), 1, 16), size=0xFFFFFFFF)
    assert np.array_equal(wav_samples(piped), wav_samples(wav(encoded(tone(), 1, 16))))


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_resampling_keeps_tones_below_the_band_and_removes_those_above(rate: int) -> None:
    inner = slice(1000, -1000)
    made = resample(tone(rate, hertz=440.0), rate)
    assert abs(len(made) - RATE // 2) <= 1
    assert np.abs(made - tone()[: len(made)])[inner].max() < 2e-3
    if rate > 20_000:
        assert np.abs(resample(tone(rate, hertz=rate * 0.45), rate))[inner].max() < 2e-3


def test_arrays() -> None:
    whole = (tone() * 32767).astype(np.int16)
    assert np.array_equal(samples_of(whole)[:], whole.astype(np.float32) / 32768)
    assert len(samples_of(tone(8_000), 8_000)) == RATE // 2
    with pytest.raises(AudioError, match="mixed to one channel"):
        at_rate(np.zeros((4, 2)), RATE)
    with pytest.raises(AudioError, match="NaN"):
        at_rate(np.array([0.0, np.nan]), RATE)


GOOD = wav(encoded(tone(), 1, 16))
REFUSED = {
    "is empty": b"",
    "is not a WAV file": b"hello" * 20,
    "is a FLAC file": b"fLaC" + bytes(60),
    "is a MP4 file": bytes(4) + b"ftypM4A " + bytes(60),
    "is cut": GOOD[:5000],
    "has no sound": GOOD[:36],
    "has no samples": wav(b""),
    "0 channels": wav(bytes(8), channels=0),
    "9 channels": wav(bytes(36), channels=9),
    "500000 samples": wav(bytes(8), rate=500_000),
    "A-law": wav(bytes(8), kind=6, bits=8),
    "samples of 12 bits": wav(bytes(24), bits=12),
    "at most 43,200 s": wav(bytes(4_000 * 43_201), rate=4_000, bits=8),
    "NaN": wav(np.array([np.nan], "<f4").tobytes(), kind=3, bits=32),
}


@pytest.mark.parametrize("message", REFUSED)
def test_files_that_are_refused(message: str) -> None:
    with pytest.raises(AudioError, match=message):
        wav_samples(REFUSED[message])


def test_damaged_headers_raise_one_error() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(GOOD[:1000])
        for at in rng.integers(0, 44, 3):
            broken[at] = rng.integers(256)
        with contextlib.suppress(AudioError):
            assert np.isfinite(wav_samples(bytes(broken))).all()
