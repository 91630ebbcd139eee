"""Transcripts as plain data."""

import msgspec


class Word(msgspec.Struct):
    """A word with its spaces and punctuation. start, end: seconds. probability: mean of its tokens."""

    word: str
    start: float
    end: float
    probability: float


class Segment(msgspec.Struct):
    """A part of a transcript. start, end: seconds. temperature, avg_logprob, compression_ratio and no_speech_prob belong to its
    window of sound. words: if their times were wanted. channel: from 1, if the channels of the file were split. logprobs: of
    `tokens`, among the tokens that the timestamp rules allow, if they were wanted."""

    id: int
    start: float
    end: float
    text: str
    tokens: list[int] = []
    temperature: float = 0.0
    avg_logprob: float = 0.0
    compression_ratio: float = 0.0
    no_speech_prob: float = 0.0
    language: str = ""
    words: list[Word] | msgspec.UnsetType = msgspec.UNSET
    channel: int | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[float] | msgspec.UnsetType = msgspec.UNSET


class Skipped(msgspec.Struct):
    """Sound without a transcript, in seconds, and the reason: silence (not decoded), no_speech (by the model), or deadline (of
    the request, which passed before)."""

    start: float
    end: float
    reason: str


class Fallback(msgspec.Struct):
    """A window, from `start` seconds on, that was decoded again, at last with this temperature.

    reason: compression_ratio or avg_logprob, of the first output. exhausted: the last output does not pass either.
    """

    start: float
    temperature: float
    reason: str
    exhausted: bool = False


class Reset(msgspec.Struct):
    """A window, from `start` seconds on, after which the text so far is not given to the next one.

    reason: loop (its segments end with equal ones) or temperature (it was decoded at a high one).
    """

    start: float
    reason: str


class Transcript(msgspec.Struct):
    """The text of a file. language_probability: None if the language was given. duration: seconds. resets: empty if no text is
    given on. way: sequential, windows of 30 s one after the other; chunked, windows that are cut in silences. vad: the detector
    of speech (silero, energy), empty without one. audio_context: positions of a window that was encoded shorter than 30 s, and
    has another text. incomplete: why sound was left out (deadline)."""

    text: str
    language: str
    language_probability: float | None
    duration: float
    segments: list[Segment]
    skipped: list[Skipped]
    fallbacks: list[Fallback]
    resets: list[Reset] = []
    way: str = "sequential"
    vad: str = ""
    audio_context: int | msgspec.UnsetType = msgspec.UNSET
    incomplete: str | msgspec.UnsetType = msgspec.UNSET
