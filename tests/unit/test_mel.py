"""Log-mel rows against the feature extractor of transformers, and rows that depend on their samples alone."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

import tests
from headrace.audio import mel
from headrace.audio.mel import HOP, RATE, LogMel

SECONDS = 4


def sound(seconds: float = SECONDS) -> np.ndarray:
    """Tones that rise over noise, with a pause."""
    rng, time = np.random.default_rng(0), np.arange(int(seconds * RATE)) / RATE
    tones = 0.3 * np.sin(2 * np.pi * (200 + 400 * time) * time) + 0.1 * rng.standard_normal(len(time))
    tones[RATE : RATE + RATE // 2] = 0
    return tones.astype(np.float32)


def expected(samples: np.ndarray, bins: int) -> np.ndarray:
    extractor = WhisperFeatureExtractor(feature_size=bins)
    rows: np.ndarray = extractor(samples, sampling_rate=RATE, return_tensors="np").input_features[0].T
    return rows[: len(samples) // HOP]


@pytest.mark.parametrize("bins", [80, 128])
def test_rows_equal_those_of_transformers(bins: int) -> None:
    samples = sound()
    rows = LogMel(samples, bins).window(0, len(samples) // HOP)
    assert rows.shape == (SECONDS * 100, bins)
    assert np.abs(rows - expected(samples, bins)).max() < 2e-5


def _symmetric() -> np.ndarray:
    return np.hanning(mel.WINDOW)


def _htk(bins: int) -> np.ndarray:
    """Triangles on HTK's mel scale."""
    edges = 700 * (10 ** (np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), bins + 2) / 2595) - 1)
    at, steps = np.arange(mel.WINDOW // 2 + 1) * RATE / mel.WINDOW, np.diff(edges)
    up, down = (at - edges[:-2, None]) / steps[:-1, None], (edges[2:, None] - at) / steps[1:, None]
    triangles: np.ndarray = np.maximum(0, np.minimum(up, down)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return triangles


@pytest.fixture(autouse=True)
def no_kept_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that change the filters keep no sums of them."""
    monkeypatch.setattr(mel, "_sums", mel._sums.__wrapped__)


@pytest.mark.parametrize(
    ("name", "slip"),
    [("_hann", _symmetric), ("filters", _htk), ("RANGE", 7.0), ("FLOOR", 1e-3)],
    ids=["symmetric-window", "htk-filters", "range", "floor"],
)
def test_slips_are_caught(monkeypatch: pytest.MonkeyPatch, name: str, slip: Callable[[], np.ndarray] | float) -> None:
    monkeypatch.setattr(mel, name, slip)
    samples = sound()
    assert np.abs(LogMel(samples, 80).window(0, len(samples) // HOP) - expected(samples, 80)).max() > 1e-3


def test_rows_after_the_sound_are_no_rows_of_silence() -> None:
    """Two controls: rows of padded sound, as transformers computes them, and one row more at the end."""
    samples = sound()
    rows = LogMel(samples, 80).window(0, 3000)
    count = len(samples) // HOP
    assert not rows[count:].any()
    padded = LogMel(np.pad(samples, (0, 30 * RATE - len(samples))), 80).window(0, 3000)
    assert np.abs(padded[:count] - rows[:count]).max() < 1e-6
    assert np.abs(padded[count + 3 :]).min() > 0.1
    kept = LogMel(samples, 80)
    kept.count += 1
    assert np.abs(kept.window(0, count + 1)[count] - rows[count]).max() > 0.1


BITS = Path(tests.__file__).parent / "native" / "bits.txt"
PROGRAM = """
import numpy as np
from headrace.audio.mel import LogMel
from tests.unit.test_mel import bits_of
for bins in (80, 128):
    print("mel", bins, bits_of(bins))
"""
LEVELS = {"all": "", "without AVX-512": "X86_V4 AVX512_ICL AVX512_SPR", "baseline": "X86_V3 X86_V4 AVX512_ICL AVX512_SPR"}


def bits_of(bins: int, slip: float = 0.0) -> str:
    """FNV-1a hash of 1 s of rows, in the format of bits.txt."""
    values = np.random.default_rng(3).integers(-128, 129, RATE) / 256 * np.linspace(0, 1, RATE)
    value = 0xCBF29CE484222325
    for byte in LogMel((values + slip).astype(np.float32), bins).window(0, 101).tobytes():
        value = (value ^ byte) * 0x100000001B3 & (1 << 64) - 1
    return f"{value:016x}"


@pytest.mark.parametrize("level", LEVELS)
def test_rows_have_the_same_bits_with_every_instruction_set(level: str) -> None:
    """Of numpy, in a process of its own each, next to the bits that are recorded."""
    recorded = [line for line in BITS.read_text().splitlines() if line.startswith("mel ")]
    assert len(recorded) == 2
    environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": LEVELS[level]}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    run = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    assert run.stdout.splitlines() == recorded, run.stderr
    assert bits_of(80, 1e-4) not in run.stdout


def test_a_window_has_the_bits_of_the_whole_file() -> None:
    samples = sound()
    file = LogMel(samples, 80)
    whole = file.window(0, file.count)
    for start, rows in ((0, 1), (1, 7), (150, 100), (file.count - 3, 3)):
        assert np.array_equal(file.window(start, rows), whole[start : start + rows])
    beyond = file.window(file.count - 3, 10)
    assert np.array_equal(beyond[:3], whole[-3:])
    assert not beyond[3:].any()


def test_blocks_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = sound()
    rows = LogMel(samples, 80).window(0, 400)
    for block in (7, 1000):
        monkeypatch.setattr(mel, "BLOCK", block)
        assert np.array_equal(LogMel(samples, 80).window(0, 400), rows)


def test_the_rows_of_a_short_file_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, int]] = []
    logs = LogMel._logs
    monkeypatch.setattr(LogMel, "_logs", lambda self, start, end: (computed.append((start, end)), logs(self, start, end))[1])
    samples = sound()
    file = LogMel(samples, 80)
    kept = np.concatenate([file.window(0, 150), file.window(150, file.count - 150)])
    assert computed == [(0, file.count)]
    assert np.array_equal(file.window(0, file.count), kept)  # computed again, with the same bits
    assert len(computed) == 2
    several = LogMel(np.tile(samples, 8), 80)
    first = several.window(0, 3000)
    several.window(3000, 100)
    assert computed[2:] == [(0, 3000), (3000, 3200)]
    monkeypatch.setattr(mel, "KEPT_ROWS", 3199)
    longer = LogMel(np.tile(samples, 8), 80)
    assert np.array_equal(longer.window(0, 3000), first)
    assert computed[4:] == [(0, 3000), (3000, 3200), (0, 3000)]


def test_a_file_of_a_few_samples_has_rows() -> None:
    for count in (0, 1, 159, 160, 161, 400):
        file = LogMel(sound()[:count], 80)
        assert file.count == count // HOP
        assert np.isfinite(file.window(0, 5)).all()
