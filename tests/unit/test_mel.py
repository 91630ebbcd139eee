"""Log-mel rows against the feature extractor of transformers, and rows that depend on their samples alone."""

from collections.abc import Callable

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

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


@pytest.mark.parametrize(("name", "slip"), [("_hann", _symmetric), ("RANGE", 7.0), ("FLOOR", 1e-3)])
def test_slips_are_caught(monkeypatch: pytest.MonkeyPatch, name: str, slip: Callable[[], np.ndarray] | float) -> None:
    monkeypatch.setattr(mel, name, slip)
    samples = sound()
    assert np.abs(LogMel(samples, 80).window(0, len(samples) // HOP) - expected(samples, 80)).max() > 1e-3


def test_a_window_has_the_bits_of_the_whole_file() -> None:
    samples = sound()
    file = LogMel(samples, 80)
    whole = file.window(0, file.count)
    for start, rows in ((0, 1), (1, 7), (150, 100), (file.count - 3, 3)):
        assert np.array_equal(file.window(start, rows), whole[start : start + rows])
    beyond = file.window(file.count - 3, 10)
    assert np.array_equal(beyond[:3], whole[-3:])
    assert not beyond[3:].any()


def test_the_rows_of_one_window_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, int]] = []
    logs = LogMel._logs
    monkeypatch.setattr(LogMel, "_logs", lambda self, start, end: (computed.append((start, end)), logs(self, start, end))[1])
    samples = sound()
    file = LogMel(samples, 80)
    kept = np.concatenate([file.window(0, 150), file.window(150, file.count - 150)])
    assert computed == [(0, file.count)]
    assert np.array_equal(file.window(0, file.count), kept)  # computed again, with the same bits
    assert len(computed) == 2
    longer = LogMel(np.tile(samples, 8), 80)
    longer.window(0, 10)
    assert computed[2:] == [(0, 3000), (3000, 3200), (0, 10)]


def test_a_file_of_a_few_samples_has_rows() -> None:
    for count in (0, 1, 159, 160, 161, 400):
        file = LogMel(sound()[:count], 80)
        assert file.count == count // HOP
        assert np.isfinite(file.window(0, 5)).all()
