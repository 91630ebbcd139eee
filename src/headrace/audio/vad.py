"""Voice activity detection: the parts of a sound with speech, and the windows that are cut from them.

`SileroDetector` runs the Silero VAD network in numpy. `EnergyDetector` needs no weights: it finds silence, but takes noise for
speech.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.audio.mel import HOP, RATE, Samples

FRAME, CONTEXT = 512, 64  # samples of a frame, and of the frame before it that it reads
FRAMES_AT_ONCE = 256
_HALF = np.float32(0.5)
BEGIN, HYSTERESIS = 0.5, 0.15  # probability at which speech begins, and how far below it ends
SPLIT, PAD = 0.16, 0.4  # seconds: silences that end speech, and sound that is kept around it
LONGEST = 30.0  # seconds of a window
JOINED = 3.0  # longest silence inside a window of `chunks`
QUIET = 2.0  # longest silence that `clips` keeps
SEARCHED = 10.0  # a longer part is cut within the last seconds of a window
# Levels in dB of full scale. Sound louder than LOUD is never silence, sound below SILENT always is.
LOUD, SILENT, ABOVE_NOISE = -45.0, -65.0, 6.0

Part = tuple[int, int]  # samples [start, end)


class VoiceDetector(Protocol):
    """name: of the method, for transcripts."""

    name: str

    def probabilities(self, samples: Samples) -> np.ndarray:
        """Probability of speech in each frame of FRAME samples, float32."""


class EnergyDetector:
    """Frames above the level of the quietest ones are speech."""

    name = "energy"

    def probabilities(self, samples: Samples) -> np.ndarray:
        levels = np.concatenate([np.zeros(0), *map(_levels, _blocks(samples))])
        if not len(levels):
            return levels.astype(np.float32)
        limit = np.clip(np.percentile(levels, 10) + ABOVE_NOISE, SILENT, LOUD)
        return (levels > limit).astype(np.float32)


class SileroDetector:
    """Silero VAD for 16 kHz. weights: the tensors of `silero_vad_16k.safetensors`, version 6.

    Source: Silero Team, "Silero VAD", 2024, https://github.com/snakers4/silero-vad.
    """

    name = "silero"

    def __init__(self, weights: Mapping[str, np.ndarray]) -> None:
        self._stft = np.ascontiguousarray(weights["stft_conv.weight"][:, 0].T)
        self._convs = [
            (_taps_first(weights[f"conv{at}.weight"]), weights[f"conv{at}.bias"], stride)
            for at, stride in ((1, 1), (2, 2), (3, 2), (4, 1))
        ]
        self._inputs, self._state = weights["lstm_cell.weight_ih"].T, weights["lstm_cell.weight_hh"]
        self._bias = weights["lstm_cell.bias_ih"] + weights["lstm_cell.bias_hh"]
        # Gates in the order input, forget, output, cell. sigmoid(x) is tanh(x / 2) / 2 + 1 / 2, so one tanh serves all four.
        size = self._state.shape[1]
        order = np.r_[: 2 * size, 3 * size : 4 * size, 2 * size : 3 * size]
        scale = np.r_[np.full(3 * size, 0.5, np.float32), np.ones(size, np.float32)]
        self._inputs, self._bias = np.ascontiguousarray(self._inputs[:, order] * scale), self._bias[order] * scale
        self._state = self._state[order] * scale[:, None]
        self._last, self._last_bias = weights["final_conv.weight"].reshape(-1), float(weights["final_conv.bias"][0])

    def probabilities(self, samples: Samples) -> np.ndarray:
        hidden, cell = np.zeros((2, self._state.shape[1]), np.float32)
        before = np.zeros(CONTEXT, np.float32)
        found: list[np.ndarray] = []
        for block in _blocks(samples):
            frames = np.zeros((FRAMES_AT_ONCE, CONTEXT + FRAME), np.float32)
            frames[: len(block), CONTEXT:] = block
            frames[1:, :CONTEXT] = frames[:-1, -CONTEXT:]
            frames[0, :CONTEXT] = before
            before = block[-1, -CONTEXT:]
            states = self._states(self._gates(frames)[: len(block)], hidden, cell)
            hidden = states[-1]
            found.append(_sigmoid(np.maximum(states, 0) @ self._last + self._last_bias))
        return np.concatenate(found) if found else np.zeros(0, np.float32)

    def _gates(self, frames: np.ndarray) -> np.ndarray:
        """Inputs of the recurrent gates of frames [n, CONTEXT + FRAME], float32 [n, 4 * state]."""
        mirrored = np.concatenate([frames, frames[:, -2 : -CONTEXT - 2 : -1]], axis=1)
        windows = np.lib.stride_tricks.sliding_window_view(mirrored, len(self._stft), axis=1)[:, ::128]
        # Products of two-dimensional arrays: with three, numpy multiplies the few rows of each frame alone.
        power = (windows.reshape(-1, len(self._stft)) @ self._stft) ** 2
        half = power.shape[1] // 2
        x = np.sqrt(power[:, :half] + power[:, half:]).reshape(len(frames), -1, half)
        for weight, bias, stride in self._convs:
            padded = np.pad(x, ((0, 0), (1, 1), (0, 0)))
            taps = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=1)[:, ::stride].swapaxes(2, 3)
            rows = taps.reshape(-1, len(weight)) @ weight + bias
            x = np.maximum(rows, 0, out=rows).reshape(*taps.shape[:2], -1)
        gates: np.ndarray = x[:, 0] @ self._inputs + self._bias
        return gates

    def _states(self, gates: np.ndarray, hidden: np.ndarray, cell: np.ndarray) -> np.ndarray:
        """State after each step of the recurrent network, [n, state] float32. cell: changed in place."""
        size = len(cell)
        states, values = np.empty((len(gates), size), np.float32), np.empty(4 * size, np.float32)
        opened, proposed = values[: 3 * size], values[3 * size :]
        entered, kept, shown = opened.reshape(3, size)
        for inputs, state in zip(gates, states, strict=True):
            np.dot(self._state, hidden, out=values)
            np.add(values, inputs, out=values)
            np.tanh(values, out=values)
            np.multiply(opened, _HALF, out=opened)
            np.add(opened, _HALF, out=opened)
            np.multiply(kept, cell, out=cell)
            np.multiply(entered, proposed, out=proposed)
            np.add(cell, proposed, out=cell)
            np.tanh(cell, out=state)
            np.multiply(shown, state, out=state)
            hidden = state
        return states


def _taps_first(weight: np.ndarray) -> np.ndarray:
    """Weights [out, in, taps] of a convolution as a matrix [taps * in, out]."""
    return np.ascontiguousarray(weight.transpose(2, 1, 0).reshape(-1, len(weight)))


def _sigmoid(x: np.ndarray) -> np.ndarray:
    value: np.ndarray = 1 / (1 + np.exp(-x))
    return value


def _blocks(samples: Samples) -> Iterator[np.ndarray]:
    """Frames [n, FRAME] of a sound, FRAMES_AT_ONCE at a time; the last one is padded with silence."""
    step = FRAME * FRAMES_AT_ONCE
    return (_frames(samples[start : start + step]) for start in range(0, len(samples), step))


def _frames(samples: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-len(samples) // FRAME) * FRAME, np.float32)
    padded[: len(samples)] = samples
    return padded.reshape(-1, FRAME)


def _levels(frames: np.ndarray) -> np.ndarray:
    """Mean power of each frame in dB of full scale."""
    power: np.ndarray = np.mean(frames.astype(np.float64) ** 2, axis=1)
    return 10 * np.log10(np.maximum(power, 1e-12))


@dataclass(frozen=True, kw_only=True)
class SpeechBounds:
    """Where speech begins and ends. threshold: probability at which it begins; it ends HYSTERESIS below. silence: seconds that
    end it. before, after: seconds of sound that are kept around it."""

    threshold: float = BEGIN
    silence: float = SPLIT
    before: float = PAD
    after: float = PAD


SPEECH = SpeechBounds()


def speech_parts(probabilities: np.ndarray, count: int, bounds: SpeechBounds = SPEECH) -> list[Part]:
    """Parts of a sound of `count` samples with speech and some sound around it, in order, without overlaps."""
    silence = bounds.silence * RATE
    parts: list[Part] = []
    start = quiet = -1  # first frame of the speech, and of the silence after it
    for at, value in enumerate([*probabilities.tolist(), *[0.0] * (int(silence) // FRAME + 2)]):
        if value >= bounds.threshold:
            start, quiet = at if start < 0 else start, -1
        elif value < bounds.threshold - HYSTERESIS and start >= 0:
            quiet = at if quiet < 0 else quiet
            if (at - quiet) * FRAME >= silence:
                parts.append((start * FRAME, quiet * FRAME))
                start = quiet = -1
    before, after, padded = int(bounds.before * RATE), int(bounds.after * RATE), list[Part]()
    for begin, end in parts:
        begin, end = max(begin - before, 0) // HOP * HOP, min(-(-(end + after) // HOP) * HOP, count)
        if padded and begin <= padded[-1][1]:
            begin = padded.pop()[0]
        padded.append((begin, end))
    return padded


def clips(parts: Sequence[Part]) -> list[Part]:
    """Parts without the silences of more than QUIET seconds between them."""
    return _joined(parts, QUIET, None)


def chunks(parts: Sequence[Part], probabilities: np.ndarray) -> list[Part]:
    """Parts of at most LONGEST seconds. Neighbouring parts are joined with the silence between them, unless it is longer than
    JOINED; a longer part is cut where speech is least likely."""
    most, cut = int(LONGEST * RATE), list[Part]()
    for start, end in parts:
        while end - start > most:
            first, last = (start + most - int(SEARCHED * RATE)) // FRAME, (start + most) // FRAME
            at = (first + int(np.argmin(probabilities[first:last]))) * FRAME // HOP * HOP
            cut.append((start, at))
            start = at
        cut.append((start, end))
    return _joined(cut, JOINED, most)


def _joined(parts: Sequence[Part], silence: float, most: int | None) -> list[Part]:
    joined: list[Part] = []
    for start, end in parts:
        if joined and start - joined[-1][1] <= silence * RATE and (most is None or end - joined[-1][0] <= most):
            start = joined.pop()[0]
        joined.append((start, end))
    return joined
