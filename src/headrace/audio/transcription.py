"""Transcription of a file by windows, one after the other or side by side: prompts, fallbacks, seeking.

The engine runs each window as an ordinary request, whose source is found by its hash when it is decoded again.

Source: `transcribe` of openai-whisper.
"""

import math
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np

from headrace.audio.decode import samples_of
from headrace.audio.mel import HOP, RATE, LogMel, SampleRange, Samples
from headrace.audio.transcript import Fallback, Reset, Segment, Skipped, Transcript
from headrace.audio.vad import FRAME, SPEECH, Part, SpeechBounds, VoiceDetector, chunks, clips, speech_parts
from headrace.audio.vocabulary import SpeechTokens
from headrace.audio.wav import Sound
from headrace.audio.words import (
    Durations,
    add_words,
    last_end,
    merge_punctuation,
    place_words,
    shorten_at_sentences,
    split_words,
)
from headrace.data.config import Audio
from headrace.data.frames import frames_of
from headrace.data.params import BeamSearchParams, SamplingParams
from headrace.data.plan import Align
from headrace.data.sources import Frames
from headrace.data.windows import WindowOutput
from headrace.text.tokenizer import Tokenizer

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
COMPRESSION, LOGPROB, NO_SPEECH = 2.4, -1.0, 0.6  # thresholds of fallbacks and skips
CONDITIONED = 0.5  # temperature above which a window's text is not given on
BEST_OF = 5
MAX_BEAMS = 16
STEP = 0.02  # seconds of a timestamp
LATEST_FIRST = 50  # steps: the first timestamp of a window is at most 1 s
HOTWORDS = 100  # tokens
WAYS = ("sequential", "chunked")
CHUNKS = 1_000_000  # windows of a chunk have seeds of their own
SHORT_SHARE, SHORT_SPARE, SHORT_LEAST = 1.1, 64, 512  # positions of a short context: share of the sound, more, the least
REPEATS = 3  # equal segments in a row after which the text is not given on


@dataclass(frozen=True, kw_only=True)
class SpeechSettings:
    """How a file is transcribed.

    language: a code, or None to detect it. languages: codes to choose from when it is detected; empty: all. multilingual:
    detect it in each window. task: transcribe, or translate into English. prompt: text before the first window. hotwords: text
    before every window. temperatures: tried in this order. beams: width of the beam search at temperature 0; 1: greedy.
    condition: give each window's text to the next one. long: sequential (windows one after the other), or chunked (windows cut
    in silences, decoded together, without the text before them). vad: skip silence, by `bounds`. words: find the times of
    words. short_context: encode a file of one window with fewer positions than 30 s have, which is faster and changes the text
    (lossy). logprobs: give each segment the log-probabilities of its tokens.
    """

    language: str | None = None
    languages: tuple[str, ...] = ()
    multilingual: bool = False
    task: str = "transcribe"
    prompt: str = ""
    hotwords: str = ""
    temperatures: tuple[float, ...] = TEMPERATURES
    beams: int = 1
    condition: bool = True
    long: str = "sequential"
    vad: bool = True
    bounds: SpeechBounds = SPEECH
    words: bool = False
    short_context: bool = False
    logprobs: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 <= one <= 2 for one in self.temperatures):
            raise ValueError(f"temperatures must be numbers from 0 to 2, not {list(self.temperatures)}")
        if not 1 <= self.beams <= MAX_BEAMS:
            raise ValueError(f"beams must be between 1 (greedy) and {MAX_BEAMS}, not {self.beams}")
        if self.logprobs and self.beams > 1:
            raise ValueError(
                f"beam search ({self.beams} beams) keeps no log-probabilities of tokens; leave logprobs or beams out"
            )
        if self.long not in WAYS:
            raise ValueError(f"long must be {' or '.join(WAYS)}, not {self.long!r}")
        if self.language is not None and (self.languages or self.multilingual):
            raise ValueError(f"language {self.language!r} is given, so none is detected; leave languages and multilingual out")


@dataclass(frozen=True)
class Window:
    """One request of a transcription. The generator receives its output. align: the request aligns its prompt, and writes
    nothing."""

    prompt: list[int]
    params: SamplingParams
    source: Frames
    align: Align | None = None


@dataclass
class Decoded:
    """The output of a window that counts. logprobs: of its tokens; empty after beam search."""

    tokens: list[int]
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Section:
    """Sound whose windows are decoded one after the other, with its results. clips: its parts with speech, in samples.

    known: tokens of the text so far; given_from: the first of them that the next window is given. number: of its next window.
    spoken: end of the last word so far, in seconds. reached: row of the file up to which its windows are decoded.
    """

    clips: list[Part]
    mel: LogMel
    number: int
    known: list[int]
    given_from: int = 0
    spoken: float = 0.0
    reached: int = 0
    segments: list[Segment] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    fallbacks: list[Fallback] = field(default_factory=list)
    resets: list[Reset] = field(default_factory=list)


Job = Generator["Window | Segment", WindowOutput, None]


@dataclass
class Transcription:
    """The transcription of one file. `run` yields windows, receives their outputs, and yields each segment once it is final.

    rate: samples a second, of a sound that is an array. context: tokens of the decoder. audio: the encoder's windows. detector:
    finds speech; None: every part of the sound is decoded.
    """

    sound: Sound | Samples
    rate: int | None
    tokens: SpeechTokens
    tokenizer: Tokenizer
    audio: Audio
    context: int
    settings: SpeechSettings
    detector: VoiceDetector | None = None
    language: str = "en"
    language_probability: float | None = None
    duration: float = 0.0
    sections: list[Section] = field(default_factory=list)
    silences: list[Skipped] = field(default_factory=list)

    def run(self) -> Generator[Window | Segment, WindowOutput, Transcript]:
        """Transcribe the file. Send the output of each yielded window; segments are for the caller. Returns the transcript."""
        for job in (yield from self.start()):
            yield from job
        return self.transcript()

    def start(self) -> Generator[Window, WindowOutput, list[Job]]:
        """Read the sound, find its speech, and detect its language. Returns generators that may run side by side: each yields
        its windows and, at its end or before, its segments. `transcript` is complete when all have ended."""
        self.tokens.check(self.settings.language, self.settings.task)
        for language in self.settings.languages:
            self.tokens.check(language, self.settings.task)
        samples = samples_of(self.sound, self.rate)
        self.duration = len(samples) / RATE
        self.sections = self._sections(samples)
        self.language = self.settings.language or self.language
        if self.settings.language is None and self.tokens.languages and self.sections and not self.settings.multilingual:
            first = self.sections[0]
            start, end = self._rows(first.clips[0])
            self.language, self.language_probability = yield from self._detect(self._frames(first, start, end))
        return [self._run(section) for section in self.sections]

    def transcript(self, incomplete: str = "") -> Transcript:
        """The result of all sections. incomplete: why some have not ended; their remaining sound is skipped for this reason."""
        segments = [segment for section in self.sections for segment in section.segments]
        for number, segment in enumerate(segments):
            segment.id = number
        skipped = self.silences + [one for section in self.sections for one in section.skipped]
        if incomplete:
            skipped += self._unread(incomplete)
        fallbacks = [one for section in self.sections for one in section.fallbacks]
        resets = [one for section in self.sections for one in section.resets]
        text = "".join(segment.text for segment in segments).strip()
        skipped.sort(key=lambda one: one.start)
        return Transcript(
            text,
            self.language,
            self.language_probability,
            self.duration,
            segments,
            skipped,
            fallbacks,
            resets,
            way=self.settings.long,
            vad=self.detector.name if self.detector is not None and self.settings.vad else "",
            audio_context=self._short_positions or msgspec.UNSET,
            incomplete=incomplete or msgspec.UNSET,
        )

    def _unread(self, reason: str) -> list[Skipped]:
        """The sound that was not decoded."""
        parts = [
            (max(start, section.reached), end) for section in self.sections for start, end in map(self._rows, section.clips)
        ]
        return [Skipped(self._seconds(start), self._seconds(end), reason) for start, end in parts if start < end]

    def _sections(self, samples: Samples) -> list[Section]:
        count, parts = len(samples), [(0, len(samples))]
        chunked = self.settings.long == "chunked"
        probabilities = np.zeros(-(-count // FRAME), np.float32)
        if self.detector is not None and self.settings.vad:
            probabilities = self.detector.probabilities(samples)
            parts = speech_parts(probabilities, count, self.settings.bounds)
        parts = chunks(parts, probabilities) if chunked else clips(parts)
        self.silences = _silences(parts, count)
        known = self._encode(self.settings.prompt)
        if not chunked:
            return [Section(parts, LogMel(samples, self.audio.bins), 0, known)] if parts else []
        return [
            # The rows of a window of its own are normalised by its loudest value.
            Section([part], LogMel(SampleRange(samples, *part), self.audio.bins), number, list(known), spoken=part[0] / RATE)
            for number, part in enumerate(parts)
        ]

    def _encode(self, text: str) -> list[int]:
        """Tokens of a text before a window."""
        return self.tokenizer.encode(" " + text.strip(), add_special=False, parse_special=False) if text.strip() else []

    def _rows(self, part: Part) -> Part:
        return part[0] // HOP, part[1] // HOP

    def _frames(self, section: Section, start: int, end: int) -> Frames:
        """The window of rows [start, end) of the file, cut to the length of a window, with silence after it."""
        offset = section.mel.samples.start // HOP if isinstance(section.mel.samples, SampleRange) else 0
        rows = min(end - start, self.audio.rows)
        positions = self._short_positions or self.audio.positions
        window = np.zeros((positions * self._rows_per_step, self.audio.bins), np.float32)
        window[:rows] = section.mel.window(start - offset, rows)
        return frames_of(window)

    @property
    def _short_positions(self) -> int:
        """Positions of the window of a file that is encoded shorter; 0: whole windows."""
        rows = round(self.duration * RATE) // HOP
        if not self.settings.short_context or rows > self.audio.rows:
            return 0
        wanted = math.ceil(SHORT_SHARE * rows / self._rows_per_step) + SHORT_SPARE
        wanted = max(wanted, SHORT_LEAST)
        return wanted if wanted < self.audio.positions else 0

    def _run(self, section: Section) -> Job:
        """Decode the windows of a section."""
        for clip in section.clips:
            seek, end = self._rows(clip)
            # Rows of less than one timestamp have no text.
            while end - seek >= self._rows_per_step:
                size = min(self.audio.rows, end - seek)
                source = self._frames(section, seek, end)
                language = self.language
                if self.settings.multilingual and self.tokens.languages:
                    language, _ = yield from self._detect(source)
                before = self._before(section.known[section.given_from :])
                no_speech = yield from self._no_speech(before, source)
                result = yield from self._decode(section, before, source, language, no_speech, seek)
                section.number += 1 if self.settings.long == "sequential" else CHUNKS
                if no_speech > NO_SPEECH and result.avg_logprob <= LOGPROB:
                    section.skipped.append(Skipped(self._seconds(seek), self._seconds(seek + size), "no_speech"))
                    seek = section.reached = seek + size
                    continue
                made, moved = self._cut(result, seek, size, no_speech)
                if self.settings.words:
                    moved = yield from self._add_words(section, made, source, language, seek, size, moved, result)
                for segment in made:
                    segment.id, segment.language = len(section.segments), language
                    section.segments.append(segment)
                    yield segment
                self._remember(section, made, result, seek)
                seek = section.reached = seek + moved

    def _add_words(
        self,
        section: Section,
        made: list[Segment],
        source: Frames,
        language: str,
        seek: int,
        size: int,
        moved: int,
        result: Decoded,
    ) -> Generator[Window, WindowOutput, int]:
        """Give the segments of a window the times of their words. Returns the rows by which it moves on."""
        texts = [[token for token in segment.tokens if token < self.tokens.end] for segment in made]
        text = [token for one in texts for token in one]
        if not text:
            return moved
        prompt = self.tokens.aligned_prompt(language, self.settings.task, text)
        align = Align(self.tokens.alignment, len(prompt) - len(text) - 2, size // self._rows_per_step)
        output = yield Window(prompt, SamplingParams(max_tokens=1), source, align)
        starts, logprobs = output.aligned[: len(text) + 1], output.aligned[len(text) + 1 :]
        words = split_words(text, self.tokenizer.decode, language)
        place_words(words, [start * STEP for start in starts], logprobs)
        durations = Durations.of(words)
        shorten_at_sentences(words, durations)
        merge_punctuation(words)
        section.spoken = add_words(made, list(map(len, texts)), words, durations, self._seconds(seek), section.spoken)
        end = round(last_end(made) * RATE / HOP)
        # A window that ends with a closed segment is done; after others the next one begins behind the last word.
        if not self._closed(result.tokens) and end > seek:
            moved = max(end - seek, self._rows_per_step)
        section.spoken = max(section.spoken, last_end(made))
        return moved

    def _closed(self, tokens: Sequence[int]) -> bool:
        """Whether a window's output ends with a single timestamp."""
        return [token >= self.tokens.first for token in tokens[-2:]] == [False, True]

    def _remember(self, section: Section, made: Sequence[Segment], result: Decoded, seek: int) -> None:
        """Keep the text of a window for the next one, unless it is likely to be wrong."""
        section.known += [token for segment in made for token in segment.tokens]
        reason = self._reset_reason(section, made, result)
        if reason:
            section.resets.append(Reset(self._seconds(seek), reason))
        if reason or not self._conditions:
            section.given_from = len(section.known)

    @property
    def _conditions(self) -> bool:
        """Whether the text of a window is given to the next one."""
        return self.settings.condition and self.settings.long == "sequential"

    def _reset_reason(self, section: Section, made: Sequence[Segment], result: Decoded) -> str:
        """Why the text of a window is not given on; empty if it is, or if no text ever is."""
        if not self._conditions:
            return ""
        texts = [segment.text for segment in section.segments[-REPEATS - 1 :]]
        if made and len(texts) > REPEATS and len(set(texts)) == 1:
            return "loop"
        return "temperature" if result.temperature > CONDITIONED else ""

    @property
    def _rows_per_step(self) -> int:
        return self.audio.rows // self.audio.positions

    def _seconds(self, rows: int) -> float:
        return rows * HOP / RATE

    def _before(self, known: Sequence[int]) -> list[int]:
        """Tokens before the start token: hotwords and the end of the text that is known, at most half of the context."""
        hotwords = self._encode(self.settings.hotwords)[: most_hotwords(self.context)]
        if self.tokens.previous is None or not (known or hotwords):
            return []
        room = self.context // 2 - 1 - len(hotwords)
        return [self.tokens.previous, *hotwords, *known[max(len(known) - room, 0) :]]

    def _likeliest(
        self, prompt: list[int], source: Frames, tokens: Sequence[int], mode: Literal["raw", "masked"]
    ) -> Generator[Window, WindowOutput, tuple[int, float]]:
        """The likeliest of some tokens after a prompt and its probability, among all tokens (raw) or among these (masked)."""
        params = SamplingParams(
            allowed_token_ids=tuple(tokens), max_tokens=1, temperature=0.0, ignore_eos=True, logprobs=0, logprobs_mode=mode
        )
        output = yield Window(prompt, params, source)
        (((token,), logprob),) = output.choices
        return token, math.exp(logprob)

    def _detect(self, source: Frames) -> Generator[Window, WindowOutput, tuple[str, float]]:
        """The likeliest language of a window, and its probability."""
        codes = {token: code for code, token in self.tokens.languages.items()}
        chosen = self.settings.languages
        ids = [token for token, code in codes.items() if not chosen or code in chosen]
        token, probability = yield from self._likeliest([self.tokens.start], source, ids, "masked")
        return codes[token], probability

    def _no_speech(self, before: list[int], source: Frames) -> Generator[Window, WindowOutput, float]:
        """The model's probability that a window has no speech."""
        if self.tokens.no_speech is None:
            return 0.0
        _, probability = yield from self._likeliest([*before, self.tokens.start], source, [self.tokens.no_speech], "raw")
        return probability

    def _decode(
        self, section: Section, before: list[int], source: Frames, language: str, no_speech: float, seek: int
    ) -> Generator[Window, WindowOutput, Decoded]:
        """Decode a window at the first temperature whose output passes the thresholds, otherwise at the last one."""
        prompt = [*before, *self.tokens.prompt(language, self.settings.task)]
        reasons: list[str] = []
        for temperature in self.settings.temperatures:
            result = yield from self._attempt(prompt, source, temperature, section.number)
            reason = self._fault(result, no_speech)
            if not reason:
                break
            reasons.append(reason)
        if reasons:
            section.fallbacks.append(Fallback(self._seconds(seek), result.temperature, reasons[0], bool(reason)))
        return result

    def _attempt(
        self, prompt: list[int], source: Frames, temperature: float, number: int
    ) -> Generator[Window, WindowOutput, Decoded]:
        end = self.tokens.end
        limits: dict[str, Any] = {"max_tokens": min(self.context // 2, self.context - len(prompt)), "stop_token_ids": (end,)}
        rules: dict[str, Any] = {"logprobs_mode": "masked", "timestamps": self.tokens.rules(LATEST_FIRST)}
        if self.settings.beams > 1 and not temperature:
            params = BeamSearchParams(beam_width=self.settings.beams, **limits).sampling().replace(**rules)
        else:
            draws: dict[str, Any] = {"n": BEST_OF if temperature else 1, "seed": self.settings.seed + number, "logprobs": 0}
            params = SamplingParams(temperature=temperature, **draws, **limits, **rules)
        output = yield Window(prompt, params, source)
        results = []
        for at, (written, total) in enumerate(output.choices):
            count = sum(token != end for token in written)
            results.append((total / max(count, 1), total / (count + 1), at))
        _, avg_logprob, best = max(results, key=lambda result: result[0])
        written = output.choices[best][0]
        tokens = [token for token in written if token != end]
        logprobs = output.logprobs[best] if output.logprobs else []
        logprobs = [logprob for token, logprob in zip(written, logprobs, strict=False) if token != end]
        text = self._text(tokens)
        return Decoded(tokens, text, temperature, avg_logprob, compression_ratio(text), logprobs)

    def _fault(self, result: Decoded, no_speech: float) -> str:
        """Why a window is decoded again; empty if it is not."""
        silent = no_speech > NO_SPEECH and result.avg_logprob < LOGPROB
        if silent:
            return ""
        if result.compression_ratio > COMPRESSION:
            return "compression_ratio"
        return "avg_logprob" if result.avg_logprob < LOGPROB else ""

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token < self.tokens.end])

    def _cut(self, result: Decoded, seek: int, size: int, no_speech: float) -> tuple[list[Segment], int]:
        """The segments of a window, and the rows by which it moves on: to the last closed segment, or by the whole window."""
        tokens, first, per_step = result.tokens, self.tokens.first, self._rows_per_step
        times = [token >= first for token in tokens]
        ends = [at for at in range(1, len(tokens)) if times[at] and times[at - 1]]
        made: list[Segment] = []

        def add(part: slice, start: float, end: float) -> None:
            text = self._text(tokens[part])
            if start < end and text.strip():
                details = result.temperature, result.avg_logprob, result.compression_ratio, no_speech
                segment = Segment(0, round(start, 3), round(end, 3), text, tokens[part], *details)
                if self.settings.logprobs:
                    segment.logprobs = result.logprobs[part]
                made.append(segment)

        base = self._seconds(seek)
        if not ends:
            last = next((token for token in reversed(tokens) if token > first), None)
            add(slice(None), base, base + (self._seconds(size) if last is None else (last - first) * STEP))
            return made, size
        closed = self._closed(tokens)
        for start, end in zip([0, *ends], [*ends, len(tokens)] if closed else ends, strict=False):
            add(slice(start, end), base + (tokens[start] - first) * STEP, base + (tokens[end - 1] - first) * STEP)
        moved = (tokens[ends[-1] - 1] - first) * per_step
        return made, moved if moved and not closed else size


def _silences(parts: Sequence[Part], count: int) -> list[Skipped]:
    """The sound around the parts."""
    edges = [0, *(edge for part in parts for edge in part), count]
    pairs = zip(edges[::2], edges[1::2], strict=True)
    return [Skipped(start / RATE, end / RATE, "silence") for start, end in pairs if end - start >= HOP]


def most_hotwords(context: int) -> int:
    """Tokens of hotwords before a window, of a decoder with this context."""
    return min(HOTWORDS, context // 2 - 1)


def compression_ratio(text: str) -> float:
    """Bytes of a text by those of its compressed form: high if it repeats itself."""
    data = text.strip().encode()
    return len(data) / len(zlib.compress(data))
