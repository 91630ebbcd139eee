"""Decoding of sound files in a confined process, as int16 samples at 16 kHz.

The process has no file, no network and no descriptor, and a limit on its CPU time and memory. Length, rate and channels are
counted while decoding; headers are not trusted.
"""

import contextlib
import math
import mmap
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.audio import formats
from headrace.audio.mel import RATE, Samples
from headrace.audio.wav import (
    MOST_SECONDS,
    AudioError,
    Sound,
    UnsupportedError,
    WavSamples,
    at_rate,
    check_length,
    is_wav,
)
from headrace.confined.process import ConfinedProcess, OverrunError, Task

SECONDS_AT_ONCE = 30  # of a WAV file that are decoded at once
PIECE_SECONDS = 60  # of a long file, in one answer
MEMORY, MOST_MEMORY = 512 << 20, 2 << 30  # bytes of address space next to the samples, and all together
MOST_BYTES = 512 << 20  # of a file that is not WAV
CPU_SECONDS, CPU_PER_SECOND = 2.0, 0.02  # limit of CPU time, and for each second of sound
SPARE = 4096  # bytes of an answer next to its samples


class Question(msgspec.Struct):
    """A file to decode, and the longest sound that is accepted, in seconds.

    split: decode each channel as a sound of its own. partial: keep what comes before the cut or damaged place of a file.
    """

    data: bytes
    most_seconds: int
    split: bool = False
    partial: bool = False


class Answer(msgspec.Struct):
    """The samples of each sound, int16 at 16 kHz, little-endian; or what is wrong with the file."""

    sounds: list[bytes] = []
    error: str = ""


def decoding_task(most_seconds: int) -> Task:
    """The task of decoding one file that is mixed to one channel."""
    seconds, size = CPU_SECONDS + CPU_PER_SECOND * most_seconds, 2 * RATE * most_seconds
    return Task(__name__, "decode", seconds=seconds, memory=min(MEMORY + 4 * size, MOST_MEMORY), answer=size + SPARE)


def encoded(question: Question) -> Any:
    """A question as plain values."""
    return msgspec.to_builtins(question, builtin_types=(bytes,))


def read_answer(answer: Any) -> list[np.ndarray]:
    """The sounds of an answer, [n] int16 each. Raises AudioError."""
    result = msgspec.convert(answer, Answer)
    if result.error:
        raise AudioError(result.error)
    return [np.frombuffer(sound, "<i2") for sound in result.sounds]


def overrun(error: OverrunError, most_seconds: int) -> AudioError:
    """The error of a file whose decoding ended its process."""
    if error.in_time:
        return AudioError(
            "the sound was not decoded: its decoder ended (damaged file, or too little memory); convert it to WAV"
        )
    seconds = CPU_SECONDS + CPU_PER_SECOND * most_seconds
    return AudioError(f"the sound takes more than {seconds:g} s of CPU time to decode; the file is damaged, or cut it")


class LocalDecoder:
    """Decodes files for a program of this machine, in one confined process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: ConfinedProcess | None = None

    def decode(self, question: Question) -> list[np.ndarray]:
        """The sounds of a file, [n] int16 each, in a file without a name. Raises AudioError."""
        if len(question.data) > MOST_BYTES:
            size = len(question.data)
            raise AudioError(f"the sound has {size:,} bytes; at most {MOST_BYTES:,} are read of other files than WAV, cut it")
        with self._lock:
            try:
                return self._decode(question)
            except OverrunError as error:
                self._process = None
                raise overrun(error, question.most_seconds) from None

    def _decode(self, question: Question) -> list[np.ndarray]:
        files: list[Any] = []
        for piece in self._pieces(question):
            files = files or [tempfile.TemporaryFile() for _ in piece]  # noqa: SIM115 - they live as long as their arrays
            for file, samples in zip(files, piece, strict=True):
                file.write(samples.tobytes())
        for file in files:
            file.flush()
        return [np.memmap(file, "<i2", "r") for file in files]

    def _pieces(self, question: Question) -> Iterator[list[np.ndarray]]:
        seconds = CPU_SECONDS + CPU_PER_SECOND * question.most_seconds
        yield self._ask("begin", encoded(question), seconds)
        while sounds := self._ask("more", None, seconds):
            yield sounds

    def _ask(self, function: str, question: Any, seconds: float) -> list[np.ndarray]:
        answer = 2 * RATE * (PIECE_SECONDS + 60) * formats.MOST_CHANNELS + SPARE
        task = Task(__name__, function, seconds=seconds, memory=MOST_MEMORY, answer=answer)
        if self._process is None:
            self._process = ConfinedProcess(task)
            self._process.start()
        frame = msgspec.msgpack.encode((function, task.seconds, task.memory, question))
        return read_answer(self._process.ask(task, frame))


LOCAL = LocalDecoder()


class Int16Samples:
    """int16 samples in memory or in a file; parts are float32 in [-1, 1]."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, part: slice, /) -> np.ndarray:
        return self.values[part].astype(np.float32) / np.float32(32768)


def samples_of(sound: Sound | Samples, rate: int | None = None) -> Samples:
    """Samples at 16 kHz, all channels mixed. rate: samples a second of an array, 16,000 by default.

    Raises AudioError, OSError.
    """
    if isinstance(sound, np.ndarray):
        if sound.dtype == np.int16 and sound.ndim == 1 and rate in (None, RATE):
            check_length(len(sound), RATE, "the sound")
            return Int16Samples(sound)
        return at_rate(sound, RATE if rate is None else rate)
    if isinstance(sound, str | Path | bytes):
        (mixed,) = open_sound(sound)
        return mixed
    return sound


def open_sound(sound: str | Path | bytes, *, split: bool = False, partial: bool = False) -> list[Samples]:
    """The sounds of a file or its bytes: one, or one for each channel (`split`). WAV files are mapped, others are decoded in a
    confined process. partial: a file that is cut or damaged counts up to there. Raises AudioError, OSError."""
    name = "the sound" if isinstance(sound, bytes) else str(sound)
    data = sound if isinstance(sound, bytes) else mapped(Path(sound))
    if not len(data):
        raise AudioError(f"{name} is empty")
    if is_wav(data):
        with contextlib.suppress(UnsupportedError):
            whole = WavSamples(data, name, partial=partial)
            return [whole.one_channel(at) for at in range(whole.channels)] if split else [whole]
    try:
        decoded = LOCAL.decode(Question(bytes(data), MOST_SECONDS, split, partial))
    except AudioError as error:
        raise AudioError(str(error).replace("the sound", name, 1)) from None
    return [Int16Samples(values) for values in decoded]


def mapped(path: Path) -> bytes | mmap.mmap:
    """The bytes of a file, mapped into memory. Raises OSError."""
    with path.open("rb") as file:
        if not path.is_file() or not os.fstat(file.fileno()).st_size:
            return file.read()
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


# -- in the confined process -------------------------------------------------------------------------------------------
RUNNING: list[Iterator[list[np.ndarray]]] = []  # the file that `more` continues


def warm(argument: str) -> None:
    """Load everything that decoding needs: PyAV imports modules when it is first used."""
    head = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 236, b"WAVE", b"fmt ", 16, 1, 1, 8000, 16000, 2, 16, b"data", 200)
    for data in (head + bytes(200), head):
        with contextlib.suppress(AudioError):
            list(formats.OtherSamples(data, 1, split=True).pieces())


def decode(question: Any) -> Any:
    """Decode a file. The answer has its samples, or an error."""
    return _answer(_pieces(msgspec.convert(question, Question)))


def begin(question: Any) -> Any:
    """The first piece of a file, of PIECE_SECONDS."""
    RUNNING[:] = [_pieces(msgspec.convert(question, Question))]
    return more(None)


def more(question: Any) -> Any:
    """The next piece. At the end of the file it has no sounds."""
    return _answer(RUNNING[0], PIECE_SECONDS)


def _answer(pieces: Iterator[list[np.ndarray]], seconds: float = math.inf) -> Any:
    """The next pieces, until they have this many seconds."""
    sounds: list[bytearray] = []
    try:
        for piece in pieces:
            sounds = sounds or [bytearray() for _ in piece]
            for sound, samples in zip(sounds, piece, strict=True):
                sound += samples.tobytes()
            if len(sounds[0]) >= 2 * RATE * seconds:
                break
    except AudioError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "the sound needs more memory than decoding may have; cut it"}
    return {"sounds": sounds}


def _pieces(asked: Question) -> Iterator[list[np.ndarray]]:
    """Samples of each sound, int16, one piece after the other."""
    if is_wav(asked.data):
        try:
            yield from _wav_pieces(asked)
            return
        except UnsupportedError:
            if formats.av is None:
                raise
    other = formats.OtherSamples(asked.data, asked.most_seconds, asked.split, asked.partial)
    for piece in other.pieces():
        yield list(piece)


def _wav_pieces(asked: Question) -> Iterator[list[np.ndarray]]:
    whole = WavSamples(asked.data, most_seconds=asked.most_seconds, partial=asked.partial)
    sounds = [whole.one_channel(at) for at in range(whole.channels)] if asked.split else [whole]
    step = SECONDS_AT_ONCE * RATE
    for start in range(0, len(whole), step):
        parts = [sound[start : start + step] for sound in sounds]
        yield [np.clip(np.round(part * 32768), -32768, 32767).astype("<i2") for part in parts]
