"""Long texts: a lower bound of their number of tokens, and their tokens from a confined process."""

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

LONG = 64 << 10  # characters that are encoded in this process, in a thread; more are not
SECONDS = 20.0  # CPU time of a request's texts
SLICE = 16 << 10  # characters that are counted at a time
MARGIN = 64  # tokens by which a slice may have more than the same characters have within the text: a cut changes its ends only
CUT = re.compile(r"\S(?=\s+\S*$)")  # before the last blank


async def count_at_least(text: str, encode: Callable[[str], list[int]], most: int) -> int:
    """A lower bound of the number of tokens of a text. Counting stops above `most`, so a refusal costs about as much as
    encoding `most` tokens. Threads do the work, slice by slice, on the client's share of CPU time. 0 if a slice cannot be
    encoded."""
    seconds, count, begin = 0.0, 0, 0

    def size_of(part: str) -> int:
        nonlocal seconds
        began = time.thread_time()
        try:
            return len(encode(part))
        except TokenizerError:  # encoding the whole text says where it is wrong
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
        raise TokenizerError("the text takes too much time or memory to be encoded; shorten it") from None
    if isinstance(found, str):
        raise TokenizerError(found)
    return [array.array("i", ids).tolist() for ids in found]


def encode(question: tuple[str, list[str], bool, bool, bool]) -> list[bytes] | str:
    """The ids of each text as 32-bit numbers, or what is wrong with one."""
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
    """Read the vocabulary, of which plain text and text with marks may need another form."""
    for parse_special, marked in ((True, False), (False, False), (True, True)):
        encode((path, [MARK], True, parse_special, marked))
