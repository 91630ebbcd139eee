"""Transcripts as text: txt, json, srt, vtt, tsv; subtitles of whole segments, or laid out by the times of words."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from headrace.audio.transcript import Segment, Transcript, Word

PAUSE = 3.0  # seconds between two words, at which a subtitle ends
NO_LIMIT = 1000


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of subtitles, which needs the times of words. 0: no limit.

    max_line: characters of a line. max_lines: lines of a subtitle; with max_line, subtitles go across segments. max_words:
    words of a subtitle, if max_line is 0. highlight: a subtitle for each word, which is underlined in it.

    Source: `SubtitlesWriter` of openai-whisper.
    """

    max_line: int = 0
    max_lines: int = 0
    max_words: int = 0
    highlight: bool = False


PLAIN = Layout()
Cue = tuple[float, float, str]  # start, end, text


def clock(seconds: float, point: str = ",", hours: bool = True) -> str:
    """Seconds as 00:01:02,345. hours: also if there are none."""
    total = round(seconds * 1000)
    whole, minutes, rest = total // 3_600_000, total // 60_000 % 60, total % 60_000
    head = f"{whole:02d}:" if hours or whole else ""
    return f"{head}{minutes:02d}:{rest // 1000:02d}{point}{rest % 1000:03d}"


def cues(transcript: Transcript, layout: Layout = PLAIN) -> Iterator[Cue]:
    """The subtitles of a transcript. Without a layout each segment is one, from its first word to its last."""
    if layout == PLAIN or not any(segment.words for segment in transcript.segments):
        yield from map(_cue_of, transcript.segments)
        return
    for words in _subtitles(transcript, layout):
        if layout.highlight:
            yield from _highlighted(words)
        else:
            yield words[0].start, words[-1].end, "".join(word.word for word in words)


def _cue_of(segment: Segment) -> Cue:
    if words := segment.words:
        return words[0].start, words[-1].end, line(segment)
    return segment.start, segment.end, line(segment)


def _subtitles(transcript: Transcript, layout: Layout) -> Iterator[list[Word]]:
    """Words of each subtitle, with the spaces and line ends between them."""
    width, joins = layout.max_line or NO_LIMIT, bool(layout.max_line and layout.max_lines)
    words: list[Word] = []
    length, lines, last = 0, 1, 0.0
    for segment in transcript.segments:
        given = segment.words or []
        most = len(given) if layout.max_line else layout.max_words or len(given)
        for at, word in enumerate(given):
            pause = joins and word.start - last > PAUSE
            ends = at % most == 0 and bool(words) and not joins
            last = word.start
            if length and length + len(word.word) <= width and not pause and not ends:
                length += len(word.word)
                words.append(word)
                continue
            text = ("" if at else _channel(segment)) + word.word.strip()
            if words and (ends or (layout.max_lines and (pause or lines >= layout.max_lines))):
                yield words
                words, lines = [], 1
            elif length:
                lines += 1
                text = "\n" + text
            length = len(text.strip())
            words.append(msgspec.structs.replace(word, word=text))
    if words:
        yield words


def _highlighted(words: list[Word]) -> Iterator[Cue]:
    """A cue for each word, and for each pause between words."""
    texts, last = [word.word for word in words], words[0].start
    for at, word in enumerate(words):
        if last != word.start:
            yield last, word.start, "".join(texts)
        marked = re.sub(r"^(\s*)(.*)$", r"\1<u>\2</u>", word.word)
        yield word.start, word.end, "".join([*texts[:at], marked, *texts[at + 1 :]])
        last = word.end


def line(segment: Segment) -> str:
    """The text of a segment, after its channel."""
    return _channel(segment) + segment.text.strip()


def _channel(segment: Segment) -> str:
    """The channel before a segment's text; empty for mixed sound."""
    return "" if segment.channel is msgspec.UNSET else f"{segment.channel}: "


def _txt(transcript: Transcript, layout: Layout = PLAIN) -> str:
    return "".join(f"{line(segment)}\n" for segment in transcript.segments)


def _srt(transcript: Transcript, layout: Layout = PLAIN) -> str:
    return "\n".join(
        f"{number}\n{clock(start)} --> {clock(end)}\n{_cue(text)}\n"
        for number, (start, end, text) in enumerate(cues(transcript, layout), 1)
    )


def _vtt(transcript: Transcript, layout: Layout = PLAIN) -> str:
    blocks = (f"\n{clock(start, '.')} --> {clock(end, '.')}\n{_cue(text)}\n" for start, end, text in cues(transcript, layout))
    return "WEBVTT\n" + "".join(blocks)


def _cue(text: str) -> str:
    """The text of a cue. The arrow of a time line must not stand in it."""
    return text.replace("-->", "->")


def _tsv(transcript: Transcript, layout: Layout = PLAIN) -> str:
    rows = (
        f"{round(1000 * segment.start)}\t{round(1000 * segment.end)}\t{line(segment).replace(chr(9), ' ')}\n"
        for segment in transcript.segments
    )
    return "start\tend\ttext\n" + "".join(rows)


def _json(transcript: Transcript, layout: Layout = PLAIN) -> str:
    return json.dumps(msgspec.to_builtins(transcript), ensure_ascii=False, indent=2) + "\n"


FORMATS: dict[str, Callable[..., str]] = {"txt": _txt, "json": _json, "srt": _srt, "vtt": _vtt, "tsv": _tsv}
SUBTITLES = ("srt", "vtt")
"""Formats with a layout."""
