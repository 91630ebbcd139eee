"""Transcription of a file that is opened when its turn comes: all channels mixed, or each one alone."""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from headrace.audio.decode import open_sound, samples_of
from headrace.audio.mel import Samples
from headrace.audio.transcript import Transcript
from headrace.audio.transcription import Job, SpeechSettings, Transcription, Window
from headrace.audio.wav import Sound
from headrace.data.windows import WindowOutput


@dataclass
class SoundFile:
    """One file. make: makes the transcription of its samples. split: each channel alone, merged by time. partial: a file that
    is cut or damaged counts up to there. rate: samples a second, of a sound that is an array."""

    sound: Sound
    make: Callable[[Samples], Transcription]
    rate: int | None = None
    split: bool = False
    partial: bool = False
    transcriptions: list[Transcription] = field(default_factory=list)

    def start(self) -> Generator[Window, WindowOutput, list[Job]]:
        """As `Transcription.start`. Sections of split channels yield no segments."""
        if isinstance(self.sound, np.ndarray):
            sounds = [samples_of(self.sound, self.rate)]
        else:
            sounds = open_sound(self.sound, split=self.split, partial=self.partial)
        self.transcriptions = [self.make(samples) for samples in sounds]
        jobs: list[Job] = []
        for one in self.transcriptions:
            jobs += yield from one.start()
        return [_without_segments(job) for job in jobs] if self.split else jobs

    def transcript(self) -> Transcript:
        """The result, once all sections have ended."""
        transcripts = [one.transcript() for one in self.transcriptions]
        return merge(transcripts) if self.split else transcripts[0]


def _without_segments(job: Job) -> Job:
    try:
        event = next(job)
        while True:
            event = job.send((yield event)) if isinstance(event, Window) else next(job)
    except StopIteration:
        return


def merge(transcripts: list[Transcript]) -> Transcript:
    """One transcript of the channels of a file, whose segments name their channel, from 1."""
    marked = [
        msgspec.structs.replace(segment, channel=number)
        for number, transcript in enumerate(transcripts, 1)
        for segment in transcript.segments
    ]
    segments = [
        msgspec.structs.replace(segment, id=at)
        for at, segment in enumerate(sorted(marked, key=lambda one: (one.start, one.channel)))
    ]
    # The channel with the most text stands for the file.
    longest = max(transcripts, key=lambda one: len(one.text))
    return msgspec.structs.replace(
        longest,
        text=" ".join(segment.text.strip() for segment in segments),
        segments=segments,
        skipped=[one for transcript in transcripts for one in transcript.skipped],
        fallbacks=[one for transcript in transcripts for one in transcript.fallbacks],
        resets=[one for transcript in transcripts for one in transcript.resets],
    )


def sound_files(
    sounds: Iterable[Sound],
    rate: int | None,
    start: Callable[[Samples, SpeechSettings], Transcription],
    *,
    channels: str = "mix",
    partial: bool = False,
    **settings: Any,
) -> Iterator[SoundFile]:
    """The files of several sounds. start: makes a transcription. settings: of SpeechSettings. Raises ValueError, TypeError."""
    if channels not in ("mix", "split"):
        raise ValueError(f"channels must be mix or split, not {channels!r}")
    chosen = SpeechSettings(**settings)
    return (SoundFile(sound, lambda samples: start(samples, chosen), rate, channels == "split", partial) for sound in sounds)
