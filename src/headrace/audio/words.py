"""Times of words: a window's text is split into words, which are placed by the alignment of their tokens.

Source: `whisper/timing.py` of openai-whisper.
"""

import math
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headrace.audio.transcript import Segment, Word

UNSPACED = ("zh", "ja", "th", "lo", "my", "yue")  # languages without spaces between words
REPLACED = "\ufffd"  # of bytes that are no whole character
BEFORE, AFTER = "\"'“¿([{-", "\"'.。,，!！?？:：”)]}、"  # punctuation that belongs to the next word, and to the one before
SENTENCE_ENDS = ".。!！?？"
LONGEST_MEDIAN = 0.7  # seconds
NEAR = 0.5  # seconds by which the times of a segment and of its words may differ


@dataclass
class Timing:
    """A word with its tokens. start, end: seconds in the window. probability: mean of its tokens."""

    word: str
    tokens: list[int]
    start: float = 0.0
    end: float = 0.0
    probability: float = 0.0


def split_words(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], language: str) -> list[Timing]:
    """The words of a text, with their spaces and each punctuation mark alone; in languages without spaces its characters."""
    characters = _characters(tokens, decode)
    if language in UNSPACED:
        return characters
    words: list[Timing] = []
    for one in characters:
        if not words or one.word.startswith(" ") or one.word.strip() in string.punctuation:
            words.append(one)
        else:
            words[-1].word += one.word
            words[-1].tokens += one.tokens
    return words


def _characters(tokens: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Timing]:
    """The shortest runs of tokens that are whole characters."""
    whole, passed = decode(tokens), 0
    runs: list[Timing] = []
    run: list[int] = []
    for token in tokens:
        run.append(token)
        text = decode(run)
        at = passed + text.find(REPLACED)
        if REPLACED not in text or (at < len(whole) and whole[at] == REPLACED):
            runs.append(Timing(text, run))
            passed += len(text)
            run = []
    if run:  # the text ends within a character
        last = runs.pop() if runs else Timing("", [])
        runs.append(Timing(last.word + whole[passed:], last.tokens + run))
    return runs


def place_words(words: Sequence[Timing], starts: Sequence[float], logprobs: Sequence[float]) -> None:
    """Set times and probabilities. starts: seconds at which each token begins, and the end of the last one. logprobs: of the
    tokens."""
    at = 0
    for word in words:
        last = at + len(word.tokens)
        word.start, word.end = starts[at], starts[last]
        word.probability = float(np.mean(np.exp(logprobs[at:last])))
        at = last


@dataclass(frozen=True)
class Durations:
    """Lengths of the words of a window, in seconds."""

    median: float
    most: float

    @classmethod
    def of(cls, words: Sequence[Timing]) -> "Durations":
        lengths = [length for word in words if (length := word.end - word.start)]
        median = min(LONGEST_MEDIAN, float(np.median(lengths))) if lengths else 0.0
        return cls(median, 2 * median)


def shorten_at_sentences(words: Sequence[Timing], durations: Durations) -> None:
    """Shorten words next to the end of a sentence, which are often too long, as they contain the pause."""
    if not durations.most:
        return
    for before, word in pairwise(words):
        if word.end - word.start > durations.most:
            if word.word in SENTENCE_ENDS:
                word.end = word.start + durations.most
            elif before.word in SENTENCE_ENDS:
                word.start = word.end - durations.most


def merge_punctuation(words: list[Timing]) -> None:
    """Add punctuation to the word that it belongs to. The marks stay in the list, as words without text."""
    following = len(words) - 1
    for at in range(len(words) - 2, -1, -1):
        mark, word = words[at], words[following]
        if mark.word.startswith(" ") and mark.word.strip() in BEFORE:
            word.word, word.tokens = mark.word + word.word, mark.tokens + word.tokens
            mark.word, mark.tokens = "", []
        else:
            following = at
    before = 0
    for at in range(1, len(words)):
        word, mark = words[before], words[at]
        if not word.word.endswith(" ") and mark.word in AFTER:
            word.word, word.tokens = word.word + mark.word, word.tokens + mark.tokens
            mark.word, mark.tokens = "", []
        else:
            before = at


def add_words(
    segments: Sequence[Segment],
    counts: Sequence[int],
    words: Sequence[Timing],
    durations: Durations,
    base: float,
    spoken: float,
) -> float:
    """Give each segment its words, and the times of its words. counts: tokens of the segments. base: seconds before the window.
    spoken: end of the last word before. Returns the end of the last segment."""
    at = 0
    for segment, count in zip(segments, counts, strict=True):
        made: list[Word] = []
        taken = 0
        while at < len(words) and taken < count:
            word = words[at]
            if word.word:
                times = round(base + word.start, 2), round(base + word.end, 2)
                made.append(Word(word.word, *times, round(word.probability, 6)))
            taken += len(word.tokens)
            at += 1
        segment.words = made
        if made:
            _shorten_first(made, durations, spoken)
            _agree(segment, made, durations)
            spoken = segment.end
    return spoken


def _shorten_first(words: list[Word], durations: Durations, spoken: float) -> None:
    """Shorten the first two words after a pause."""
    first, most = words[0], durations.most
    second = words[1] if len(words) > 1 else None
    long = first.end - first.start > most or (second is not None and second.end - first.start > 2 * most)
    if first.end - spoken <= 4 * durations.median or not long:
        return
    if second is not None and second.end - second.start > most:
        first.end = second.start = max(second.end / 2, second.end - most)
    first.start = max(0.0, first.end - most)


def _agree(segment: Segment, words: list[Word], durations: Durations) -> None:
    """Take the times of a segment from its words, unless the first or the last one is too long."""
    first, last = words[0], words[-1]
    if first.start + NEAR < segment.start < first.end:
        first.start = max(0.0, min(first.end - durations.median, segment.start))
    else:
        segment.start = first.start
    if last.start < segment.end < last.end - NEAR:
        last.end = max(last.start + durations.median, segment.end)
    else:
        segment.end = last.end
    for word in words:
        word.start, word.end = round(word.start, 3), round(word.end, 3)
    segment.start, segment.end = round(segment.start, 3), round(segment.end, 3)


def last_end(segments: Sequence[Segment]) -> float:
    """End of the last word, or of the last segment if there are no words; -inf without segments."""
    for segment in reversed(segments):
        if segment.words:
            return segment.words[-1].end
    return segments[-1].end if segments else -math.inf
