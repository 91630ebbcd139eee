"""Tokenization of long texts: a lower bound of their length, and encoding in a confined process."""

import array
import asyncio
import functools
import re
import time
from collections.abc import Callable
from pathlib import Path

from headrace.confined.pool import CLIENT, OverrunError, Task, shared_pool
from headrace.startup.opening import open_files
from headrace.text.content_marks import MARK
from headrace.text.tokenizer import Tokenizer, TokenizerError

# Longest text, in characters, that this process encodes in a thread.
LONG = 64 << 10
# CPU time for the texts of a request.
SECONDS = 20.0
# Characters of one slice in `count_at_least`.
SLICE = 16 << 10
# A slice may have this many tokens more than the same characters within the text, as cuts change its ends.
MARGIN = 64
# Before the last blank.
CUT = re.compile(r"\S(?=\s+\S*$)")


async def count_at_least(text: str, encode: Callable[[str], list[int]], most: int) -> int:
    """A lower bound of a text's number of tokens.

    Counting stops above `most`, so a refusal costs about as much as encoding `most` tokens. Threads encode slice by slice, and
    the CPU time counts as the client's. A slice that cannot be encoded counts 0.
    """
    seconds, count, begin = 0.0, 0, 0

    def size_of(part: str) -> int:
        nonlocal seconds
        began = time.thread_time()
        try:
            return len(encode(part))
        except TokenizerError:  # the later encoding of the whole text reports it
            return 0
        finally:
            seconds += time.thread_time() - began

    try:
        while begin < len(text) and count <= most:
            end = begin + SLICE
            if end < len(text) and (blank := CUT.search(text, end - 256, end)):
                end = blank.end()
            count += max(0, await asyncio.to_thread(size_of, text[begin:end]) - MARGIN)
            begin = end
    finally:
        shared_pool().shares.charge(CLIENT.get(), seconds)
    return count


async def encode_long(
    path: Path, texts: list[str], add_special: bool, parse_special: bool, marked: bool = False
) -> list[list[int]]:
    """Token ids of texts by the tokenizer of the model at `path`. Raises TokenizerError, BusyError."""
    task = Task(__name__, "encode", str(path.absolute()), seconds=SECONDS, memory=2 << 30, answer=64 << 20)
    try:
        found = await shared_pool().ask(task, [task.argument, texts, add_special, parse_special, marked])
    except OverrunError:
        raise TokenizerError("the text takes too much time or memory to encode; shorten it") from None
    if isinstance(found, str):
        raise TokenizerError(found)
    return [array.array("i", ids).tolist() for ids in found]


def encode(question: tuple[str, list[str], bool, bool, bool]) -> list[bytes] | str:
    """The ids of each text as 32-bit integers, or an error message."""
    path, texts, add_special, parse_special, marked = question
    try:
        ids = [_tokenizer(path).encode(text, add_special, parse_special, marked=marked) for text in texts]
    except TokenizerError as error:
        return str(error)
    return [array.array("i", each).tobytes() for each in ids]


@functools.cache
def _tokenizer(path: str) -> Tokenizer:
    opened = open_files(path, download=False)
    try:
        return opened.tokenizer
    finally:
        opened.source.close()


def warm(path: str) -> None:
    """Load the tokenizer. Plain text and text with marks may use different forms of the vocabulary."""
    for parse_special, marked in ((True, False), (False, False), (True, True)):
        encode((path, [MARK], True, parse_special, marked))
