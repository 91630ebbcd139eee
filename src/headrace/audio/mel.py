"""Log-mel rows of sound, as Whisper was trained on them. In float64 and without BLAS: a row depends on its samples alone."""

from functools import cache, cached_property
from typing import Protocol

import numpy as np

RATE = 16_000  # samples a second
WINDOW, HOP = 400, 160  # samples of a row, and between two rows
FLOOR = 1e-10
RANGE = 8.0  # decades below the loudest value that are kept
ROWS_AT_ONCE = 3000
KEPT_ROWS = 30_000  # 5 minutes: 19 MB with 80 bins
# Rows of one numpy call: its arrays then stay in the cache.
BLOCK = 300


class Samples(Protocol):
    """Samples at 16 kHz, one channel, float32 in [-1, 1], of which parts are read: `samples[start:end]`."""

    def __len__(self) -> int: ...
    def __getitem__(self, part: slice, /) -> np.ndarray: ...


class SampleRange:
    """Samples [start, end) of a sound, read on demand."""

    def __init__(self, samples: Samples, start: int, end: int) -> None:
        self.samples, self.start, self.end = samples, start, end

    def __len__(self) -> int:
        return self.end - self.start

    def __getitem__(self, part: slice, /) -> np.ndarray:
        start, end, _ = part.indices(len(self))
        return self.samples[self.start + start : self.start + max(start, end)]


class LogMel:
    """The log-mel rows of one file, computed on demand. Rows are normalised by the loudest value of the whole file.

    samples: float32 at 16 kHz, in [-1, 1], read part by part. The sound is mirrored at its start, and followed by silence.
    """

    def __init__(self, samples: Samples, bins: int) -> None:
        self.samples = samples
        self.bins = bins
        self.count = len(samples) // HOP
        # Of a sound of up to KEPT_ROWS, until its last row is read: the pass for the loudest value computes all its rows.
        self._kept: np.ndarray | None = None

    @cached_property
    def loudest(self) -> float:
        """The largest logarithm of the file."""
        largest = float(np.log10(FLOOR))
        kept = np.empty((self.count, self.bins)) if self.count <= KEPT_ROWS else None
        for at in range(0, self.count, ROWS_AT_ONCE):
            logs = self._logs(at, min(at + ROWS_AT_ONCE, self.count))
            largest = max(largest, float(logs.max()))
            if kept is not None:
                kept[at : at + ROWS_AT_ONCE] = logs
        self._kept = kept
        return largest

    def window(self, start: int, rows: int) -> np.ndarray:
        """Rows from `start` on, [rows, bins] float32; zeros after the end of the file."""
        end = min(start + rows, self.count)
        window = np.zeros((rows, self.bins), np.float32)
        if end > start:
            lowest = self.loudest - RANGE
            logs = self._logs(start, end) if self._kept is None else self._kept[start:end]
            window[: end - start] = (np.maximum(logs, lowest) + 4.0) / 4.0
            self._kept = None if end == self.count else self._kept
        return window

    def _logs(self, start: int, end: int) -> np.ndarray:
        """log10 of the mel energies of rows [start, end), float64. Blocks change no bit."""
        return np.concatenate([self._block(at, min(at + BLOCK, end)) for at in range(start, end, BLOCK)])

    def _block(self, start: int, end: int) -> np.ndarray:
        first, last = start * HOP - WINDOW // 2, (end - 1) * HOP + WINDOW // 2
        part = self.samples[max(first, 0) : last].astype(np.float64)
        if first < 0:
            mirrored = self.samples[1 : 1 - first][::-1].astype(np.float64)
            part = np.concatenate([np.zeros(-first - len(mirrored)), mirrored, part])
        part = np.concatenate([part, np.zeros(last - first - len(part))])
        spectra = np.fft.rfft(np.lib.stride_tricks.sliding_window_view(part, WINDOW)[::HOP] * _hann(), axis=1)
        columns, weights, starts = _sums(self.bins)
        power = spectra.real**2 + spectra.imag**2
        logs: np.ndarray = np.log10(np.maximum(np.add.reduceat(power[:, columns] * weights, starts, axis=1), FLOOR))
        return logs


@cache
def _hann() -> np.ndarray:
    """A periodic Hann window."""
    return 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(WINDOW) / WINDOW)


@cache
def filters(bins: int) -> np.ndarray:
    """Triangular filters on Slaney's mel scale with equal areas, [bins, 201] float64.

    The scale is linear below 1 kHz and logarithmic above. Source: Slaney, "Auditory Toolbox", 1998.
    """
    linear, step = 200 / 3, np.log(6.4) / 27
    highest = 15 + np.log(RATE / 2 / 1000) / step
    mels = np.linspace(0, highest, bins + 2)
    edges = np.where(mels < 15, linear * mels, 1000 * np.exp(step * (mels - 15)))
    frequencies = np.arange(WINDOW // 2 + 1) * RATE / WINDOW
    up = (frequencies - edges[:-2, None]) / np.diff(edges)[:-1, None]
    down = (edges[2:, None] - frequencies) / np.diff(edges)[1:, None]
    triangles: np.ndarray = np.maximum(0, np.minimum(up, down)) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return triangles


@cache
def _sums(bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The non-zero weights of all filters in a row: their columns, their values, and the first one of each filter."""
    rows, columns = filters(bins).nonzero()
    return columns, filters(bins)[rows, columns], np.searchsorted(rows, np.arange(bins))
